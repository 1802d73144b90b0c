"""`GET /datastores`: the datastores that this server drafts from, and the others in the user's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.errors import from_error
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import Manifest
from rest_local.retrieval.home import datastore_path, list_datastores, manifests
from rest_local.server.operations import Routes, get
from rest_local.server.state import state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


async def list_all(request: HttpRequest) -> Response:
    _, engine = state_of(request).loaded()
    is_local = state_of(request).settings.is_local
    return json_response({"object": "list", "data": await anyio.to_thread.run_sync(_list, engine, is_local)})


def _list(engine: Engine, is_local: bool) -> list[dict[str, Any]]:
    opened = {store.path.name: store.path for store in engine.datastores.in_use}
    paths = {name: datastore_path(name) for name in list_datastores()} | opened
    rows = []
    for name, path in sorted(paths.items()):
        row: dict[str, Any] = {"name": name, "object": "datastore", "open": name in opened}
        try:
            # Opening reads only sizes and some bytes of each file.
            with Datastore.open(_shown(engine, path), mmap=True) as store:
                info = store.info()
        except DatastoreError as error:
            row["error"] = from_error(error, is_local=is_local).message
        else:
            row |= {key: info[key] for key in ("created", "vocabulary", "tokens", "documents", "segments", "bytes")}
            row["fits_model"] = info["vocabulary"]["hash"] == engine.model.vocabulary.hash
        rows.append(row)
    return rows


def _shown(engine: Engine, path: Path) -> Path:
    """Return the datastore's index for this model, or else its first one."""
    known = engine.model.vocabulary.hash
    found = manifests(path)
    fits = [where for where, one in found.items() if isinstance(one, Manifest) and one.vocabulary.hash == known]
    return next(iter([*fits, *found]), path)


ROUTES: Routes = ((get("/datastores"), list_all),)
