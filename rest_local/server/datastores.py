"""Datastores over HTTP: list, search, add documents, remove them. The next lookup uses a changed datastore.

A name is compared with the open datastores and with those in the user's directory, and never joined to a path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.bodies import DocumentBody, SearchBody
from rest_local.api.errors import ApiError, from_error
from rest_local.api.requests import prompt_text
from rest_local.decoding import following
from rest_local.errors import DatastoreError, printable
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import Manifest, VocabularyId
from rest_local.retrieval.home import datastore_path, list_datastores, manifests
from rest_local.retrieval.sources.source import secret_content, secret_name
from rest_local.retrieval.update.forgetting import forget
from rest_local.retrieval.update.updating import add
from rest_local.server.answering import parse
from rest_local.server.operations import Routes, delete, get, post
from rest_local.server.state import state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service

PLACES = 10
CONTINUATION = 32  # tokens shown after a place
NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


async def list_all(request: HttpRequest) -> Response:
    _, engine = state_of(request).loaded()
    is_local = state_of(request).settings.is_local
    return json_response({"object": "list", "data": await anyio.to_thread.run_sync(_list, engine, is_local)})


async def search(request: HttpRequest) -> Response:
    """Find where the end of a text occurs in a datastore, and how it continues there.

    Other machines are refused, as for draft statistics, because the answer reveals the datastore's content.
    """
    body = await parse(request, SearchBody)
    if not state_of(request).settings.shows_steps:
        text = "the content of datastores is not shown to other machines; see --share-statistics"
        raise ApiError(403, text, code="withheld")
    _, engine = state_of(request).loaded()
    path = _path(engine, request.path_params["name"])
    found = await state_of(request).workers.run(request, lambda: _search(engine, path, body.text, body.limit or PLACES))
    return json_response(found)


async def add_document(request: HttpRequest) -> Response:
    body = await parse(request, DocumentBody)
    service, engine = state_of(request).loaded()
    path = _changeable(request, engine, may_be_new=True)
    return json_response(await state_of(request).workers.run(request, lambda: _add(service, engine, path, body)))


async def forget_document(request: HttpRequest) -> Response:
    service, engine = state_of(request).loaded()
    path, document = _changeable(request, engine), request.path_params["document"]

    def work() -> int:
        known = engine.model.vocabulary.identity
        count = forget(path, {document}, whole=True, mmap=_mmap(engine), vocabulary_hash=known.hash)
        if count:
            reopen(service, engine)
        return count

    count = await anyio.to_thread.run_sync(work)
    if not count:
        raise ApiError(404, "the datastore has no document with that name", code="document_not_found")
    return json_response({"forgotten": count})


def reopen(service: Service, engine: Engine, also: Sequence[Path] = ()) -> None:
    """Open the newest commits, which the next lookup uses. Must not be called in the engine's thread."""
    following.reopen(engine.model, engine.datastores, also)
    service.run(lambda engine: engine.decoder.use_datastores())
    engine.datastores.close_retired()


def _mmap(engine: Engine) -> bool | None:
    """Return the value that the engine's own datastores use: --no-mmap applies to every reader of this process."""
    return None if engine.model.options.mmap else False


def _open_paths(engine: Engine) -> dict[str, Path]:
    return {store.path.name: store.path for store in engine.datastores.in_use}


def _path(engine: Engine, name: str, *, may_be_new: bool = False) -> Path:
    """Return the path of the datastore `name`. Raises ApiError 404, or 400 for an invalid new name."""
    opened = _open_paths(engine)
    if name in opened:
        return opened[name]
    if may_be_new and not NEW_NAME.fullmatch(name):
        text = "a datastore's name may contain letters, digits, dots, dashes and underscores"
        raise ApiError(400, text, param="name")
    if not may_be_new and name not in list_datastores():
        raise ApiError(404, "no such datastore; GET /datastores lists them", code="datastore_not_found")
    return datastore_path(name)


def _changeable(request: HttpRequest, engine: Engine, *, may_be_new: bool = False) -> Path:
    """Return the path of the datastore to change. Raises ApiError 403, and what `_path` raises.

    All users could delete its documents and put texts into drafts. Users other than the one at this machine need an
    option for that, and may only change what is open here.
    """
    settings, name = state_of(request).settings, request.path_params["name"]
    if settings.is_local:
        return _path(engine, name, may_be_new=may_be_new)
    if not settings.change_datastores:
        raise ApiError(403, "other users may not change datastores; see --change-datastores", code="withheld")
    if name not in _open_paths(engine):
        raise ApiError(404, "no such datastore is open; GET /datastores lists them", code="datastore_not_found")
    return _open_paths(engine)[name]


def _list(engine: Engine, is_local: bool) -> list[dict[str, Any]]:
    opened = _open_paths(engine)
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


def _search(engine: Engine, path: Path, text: str, limit: int) -> dict[str, Any]:
    vocabulary = engine.model.vocabulary
    known, name, tokens = vocabulary.hash, vocabulary.name, vocabulary.tokenize(text)

    def decode(tokens: Any) -> str:
        return prompt_text(vocabulary, [int(token) for token in tokens if token >= 0])

    with Datastore.open(path, vocabulary_hash=known, vocabulary_name=name, mmap=_mmap(engine)) as store:
        context = tokens[: len(tokens) - store.to_leave_off(tokens)]
        match, places, positions = store.find(context, limit)
        found = []
        for position in positions.tolist():
            name, line, offset = store.place(position, decode)
            found.append({"document": printable(name), "line": line, "token": offset})
        rows = store.rows(context, limit, CONTINUATION)
        following = list(dict.fromkeys(decode(row) for row in rows.continuations))
    matched = decode(context[len(context) - match :])
    return {
        "tokens": len(tokens),
        "match": match,
        "matched": matched,
        "left_off": decode(tokens[len(context) :]),
        "places": places,
        "found": found,
        "continuations": following,
    }


def _add(service: Service, engine: Engine, path: Path, body: DocumentBody) -> dict[str, Any]:
    secret = secret_name(Path(body.name).name) or secret_content(body.text.encode("utf-8", "replace"))
    if secret and not body.allow_secrets:
        raise ApiError(400, "the text seems to contain a key or password; set allow_secrets to add it", code="secret")
    vocabulary = engine.model.vocabulary
    documents = [(body.name, vocabulary.tokenize(body.text))]  # stops if the client disconnects
    recipe = {"model": str(engine.model.path.absolute())}
    identity = VocabularyId(*vocabulary.identity)
    manifest = add(path, documents, vocabulary=identity, recipe=recipe, mmap=_mmap(engine))
    reopen(service, engine, () if path in _open_paths(engine).values() else (path,))
    return {
        "datastore": path.name,
        "document": body.name,
        "tokens": sum(len(tokens) for _, tokens in documents),
        "documents": sum(segment.documents for segment in manifest.segments),
    }


ROUTES: Routes = (
    (get("/datastores", "List datastores"), list_all),
    (post("/datastores/{name}/search", "Find text in a datastore", SearchBody), search),
    (post("/datastores/{name}/documents", "Add a document", DocumentBody), add_document),
    (delete("/datastores/{name}/documents/{document}", "Remove a document"), forget_document),
)
