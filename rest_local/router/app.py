"""The application of the process that clients reach: which calls it answers itself, and where it sends the others.

Every route of `rest_local.server` is one of this application, too. A call marked `of_server` is answered here; any
other is forwarded to the process of the model that it names: in the field `model` of a body, else in the query
(`?model=NAME`), else the default model. Host, origin, key and size are checked here.

Calls that only look (`GET /slots`, `GET /metrics`) do not load a model.
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
from rest_local.api.models import list_of, named_row
from rest_local.api.response_storage import ResponseStorage
from rest_local.router import ollama
from rest_local.router.forwarding import Forwarded
from rest_local.router.pool import Entry, Pool
from rest_local.server import app as model_app
from rest_local.server.answering import parse, read
from rest_local.server.operations import Endpoint, Operation, Routes, post
from rest_local.server.page import page
from rest_local.server.settings import ANY_MODEL, Settings
from rest_local.server.streaming import json_response

_SMALL = 1 << 14  # bytes of a body that is read in the event loop
_ONLY_LOOK = ("/slots", "/metrics")


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
    """The router's state."""
    state: RouterState = request.app.state.server
    return state


class ModelBody(Body):
    """POST /models/load and /models/unload."""

    model: str


async def forward(request: HttpRequest) -> Response:
    """The answer of the model's process. Raises ApiError 400, 404, and what `Pool.using` raises."""
    router = router_of(request)
    _refuse_other_sites(request)
    body = await read(request) if request.method in ("POST", "PUT", "PATCH") else b""
    entry = router.entry(await _model_of(request, router, body))
    looks = request.method in ("GET", "HEAD") and request.url.path in _ONLY_LOOK
    if looks and entry.status != "loaded":
        return _nothing_to_see(request.url.path, router)
    return Forwarded(router.pool, entry, body, looks=looks)


def _refuse_other_sites(request: HttpRequest) -> None:
    """Raises ApiError 403 for what a page of another site has a browser fetch without naming the page's origin, such as
    an image or a link: the page could not read the answer, but the call would load a model."""
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and "origin" not in request.headers:
        raise ApiError(403, "pages of other sites may not call this", code="origin_not_allowed")


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


def _nothing_to_see(path: str, router: RouterState) -> Response:
    if path == "/metrics" and not router.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    return Response(b"", media_type="text/plain") if path == "/metrics" else json_response([])


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
    return [_row(router, entry, name) for entry in router.pool.entries for name in entry.served.names]


def _row(router: RouterState, entry: Entry, name: str) -> dict[str, Any]:
    row = named_row(name, router.started) | {"status": {"value": entry.status}}
    return row | ({"meta": entry.meta} if entry.meta else {})


async def health(request: HttpRequest) -> Response:
    """503 while the models that are loaded at the start are not."""
    if not router_of(request).ready:
        raise loading()
    return json_response({"status": "ok"})


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
    "/api/tags": ollama.list_models,
    "/api/ps": ollama.list_running,
}
"""Calls that the router answers in another way than the server of one model."""

ROUTES: Routes = (
    (post("/models/load", "Load a model", ModelBody, of_server=True), load_model),
    (post("/models/unload", "Unload a model", ModelBody, of_server=True), unload_model),
)


def create_router(state: RouterState) -> Starlette:
    """The application."""
    shared = tuple((operation, _endpoint(operation, endpoint)) for operation, endpoint in model_app.ROUTES)
    return model_app.assemble((*shared, *ROUTES), state, state.settings)


def _endpoint(operation: Operation, endpoint: Endpoint) -> Endpoint:
    return OWN.get(operation.path, endpoint) if operation.of_server else forward
