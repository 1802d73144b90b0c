"""The application of the process that clients reach: which calls it answers itself, and where it sends the others.

Every route of `rest_local.server` is one of this application, too. A call marked `of_server` is answered here; any
other is forwarded to the process of the model that it names: in the field `model` of a body, else in the query
(`?model=NAME`), else the default model. Host, origin, key and size are checked here.

`GET /slots` and `GET /metrics` do not load a model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.bodies import Body, load
from rest_local.api.errors import ApiError, loading, no_such_model
from rest_local.api.models import Row, list_of, named_row, row_of, running, tags
from rest_local.api.response_storage import ResponseStorage
from rest_local.router.forwarding import Forwarded
from rest_local.router.pool import Entry, Pool
from rest_local.server import app as model_app
from rest_local.server.answering import parse, read
from rest_local.server.operations import Endpoint, Routes, post
from rest_local.server.page import page
from rest_local.server.settings import ANY_MODEL, Settings
from rest_local.server.streaming import json_response

_SMALL = 1 << 14  # bytes of a body that is parsed in the event loop
_STATISTICS = ("/slots", "/metrics")


@dataclass
class RouterState:
    """What the endpoints of a router share.

    ready   whether the models that are loaded at the start are
    """

    settings: Settings
    pool: Pool
    folder: Path
    ready: bool = False
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def responses(self) -> ResponseStorage:
        """Responses of /v1/responses, which the models' processes keep in the same folder."""
        return ResponseStorage(self.folder)

    def entry(self, name: str | None) -> Entry:
        """The model of that name. Raises ApiError 404."""
        return self.pool.entry(name, anything=ANY_MODEL in self.settings.aliases)


def router_of(request: HttpRequest) -> RouterState:
    state: RouterState = request.app.state.server
    return state


class ModelBody(Body):
    """POST /models/load and /models/unload."""

    model: str


async def forward(request: HttpRequest) -> Response:
    """The answer of the model's process. Raises ApiError 400, 403, 404, and what `Pool.using` raises."""
    router = router_of(request)
    # A page of another site has a browser fetch an image or a link without naming the page's origin. The page could not
    # read the answer, but the call would load a model.
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and "origin" not in request.headers:
        raise ApiError(403, "pages of other sites may not call this", code="origin_not_allowed")
    body = await read(request) if request.method in ("POST", "PUT", "PATCH") else b""
    entry = router.entry(await _model_of(request, router, body))
    load = request.method not in ("GET", "HEAD") or request.url.path not in _STATISTICS
    if load or entry.status == "loaded":
        return Forwarded(router.pool, entry, body, load=load)
    if request.url.path == "/slots":
        return json_response([])
    if not router.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    return Response(b"", media_type="text/plain")


async def _model_of(request: HttpRequest, router: RouterState, body: bytes) -> str | None:
    """The name of the model in a request. Raises ApiError 400 for a body that is no JSON object."""
    if len(router.pool.entries) == 1 and ANY_MODEL in router.settings.aliases:
        return None  # any name will do
    if not body:
        return request.query_params.get("model")
    value = load(body) if len(body) < _SMALL else await anyio.to_thread.run_sync(load, body)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    name = value.get("model")
    if not name and request.url.path.startswith("/api/"):
        name = value.get("name")  # as older clients of Ollama write it
    if name is not None and not isinstance(name, str):
        raise ApiError(400, "model: Input should be a valid string", code="invalid_type", param="model")
    return name or request.query_params.get("model")


async def models(request: HttpRequest) -> Response:
    """All models under all their names, loaded or not."""
    router = router_of(request)
    return json_response(list_of(rows(router)))


async def model(request: HttpRequest) -> Response:
    """One name of a model. Any other name is 404."""
    name = request.path_params["name"]
    for row in rows(router_of(request)):
        if row["id"] == name:
            return json_response(row)
    raise no_such_model()


def rows(router: RouterState) -> list[dict[str, Any]]:
    """A row of `GET /v1/models` for each name of each model. `meta`: of a model that was loaded before."""
    return [
        named_row(name, router.started)
        | {"status": {"value": entry.status}}
        | ({"meta": entry.meta} if entry.meta else {})
        for entry in router.pool.entries
        for name in entry.names
    ]


async def health(request: HttpRequest) -> Response:
    """503 while the models that are loaded at the start are not."""
    if not router_of(request).ready:
        raise loading()
    return json_response({"status": "ok"})


async def ollama_models(request: HttpRequest) -> Response:
    """Ollama's list of all models, loaded or not."""
    return json_response(tags(ollama_rows(router_of(request).pool)))


async def ollama_running(request: HttpRequest) -> Response:
    """Ollama's list of the models in memory, and when they are unloaded unless they are used."""
    return json_response(running(ollama_rows(router_of(request).pool)))


def ollama_rows(pool: Pool) -> list[Row]:
    """A row for each name of each model; what is known of a model that was never loaded is its file."""
    found = []
    for entry in pool.entries:
        expires = None
        if pool.idle is not None:
            left = 0.0 if entry.users else time.monotonic() - entry.used_at
            expires = time.time() + max(pool.idle - left, 0.0)
        for name in entry.names:
            is_loaded = entry.status == "loaded"
            found.append(row_of(name, entry.path, entry.meta, is_loaded=is_loaded, expires=expires))
    return found


async def load_model(request: HttpRequest) -> Response:
    """Loads a model before it is used."""
    router, body = router_of(request), await parse(request, ModelBody)
    await router.pool.load(router.entry(body.model))
    return json_response({"success": True})


async def unload_model(request: HttpRequest) -> Response:
    """Unloads a model when its running answers have ended; the next request loads it again."""
    router, body = router_of(request), await parse(request, ModelBody)
    await router.pool.unload(router.entry(body.model))
    return json_response({"success": True})


OWN: dict[str, Endpoint] = {
    "/": page,
    "/health": health,
    "/v1/models": models,
    "/v1/models/{name}": model,
    "/api/tags": ollama_models,
    "/api/ps": ollama_running,
}
"""Calls that the router answers in another way than the server of one model."""

ROUTES: Routes = (
    (post("/models/load", "Load a model", ModelBody, of_server=True), load_model),
    (post("/models/unload", "Unload a model", ModelBody, of_server=True), unload_model),
)


def create_router(state: RouterState) -> Starlette:
    shared = tuple(
        (operation, OWN.get(operation.path, endpoint) if operation.of_server else forward)
        for operation, endpoint in model_app.ROUTES
    )
    return model_app.assemble((*shared, *ROUTES), state, state.settings)
