"""The ASGI application: routes and middleware, the page, and the description of the calls.

From the outside in: `Drained` (the end of a connection); the log of requests; `Gate` (size of the head, Host, Origin);
CORS, if origins are allowed; `Guard` (key, type and size of the body); the routes.

`GET /openapi.json` describes every route. It is made of the types that check the bodies, so it cannot differ.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from rest_local.api.errors import ApiError
from rest_local.errors import RestLocalError
from rest_local.server import datastores, routes, slots
from rest_local.server.errors import on_any_error, on_api_error, on_http_error, on_own_error
from rest_local.server.operations import Operation, Routes, describe, get
from rest_local.server.page import page
from rest_local.server.security import AccessLog, Drained, Gate, Guard, Inner
from rest_local.server.settings import Settings
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response


async def openapi(request: HttpRequest) -> Response:
    """The description of this server."""
    operations: tuple[Operation, ...] = request.app.state.operations
    return json_response(describe(operations, bool(state_of(request).settings.keys)))


ROUTES: Routes = (
    *routes.ROUTES,
    *datastores.ROUTES,
    *slots.ROUTES,
    (get("/", "The chat page", media="text/html", of_server=True), page),
)
_OTHER_NAMES = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/health": "/health",
}


def create_app(state: State, secret: bytes | None = None) -> Starlette:
    """The application of one model's server. The caller sets the state's engine and service once the model is loaded.

    secret   of the process that forwards requests to this one, which is then the only one that may call
    """
    return assemble(ROUTES, state, state.settings, secret)


def assemble(routes: Routes, state: object, settings: Settings, secret: bytes | None = None) -> Starlette:
    """An application of these routes and their other names, with what surrounds them. `state`: what endpoints find."""
    endpoints = {(each.method, each.path): endpoint for each, endpoint in routes}
    named = [Route(_pattern(operation.path), endpoint, methods=[operation.method]) for operation, endpoint in routes]
    named.append(Route("/openapi.json", openapi, methods=["GET"]))
    for other, path in _OTHER_NAMES.items():
        found = [(method, endpoint) for (method, name), endpoint in endpoints.items() if name == path]
        named += [Route(other, endpoint, methods=[method]) for method, endpoint in found]
    app = Starlette(
        routes=named,
        middleware=[
            Middleware(Drained),
            Middleware(AccessLog),
            *_admission(routes, settings, secret),
            Middleware(Guard, settings),
        ],
        exception_handlers={
            ApiError: on_api_error,
            RestLocalError: on_own_error,
            HTTPException: on_http_error,
            Exception: on_any_error,
        },
    )
    app.state.server = state
    app.state.operations = tuple(each for each, _ in routes)
    return app


def _admission(routes: Routes, settings: Settings, secret: bytes | None) -> list[Middleware]:
    """What checks where a request comes from."""
    if secret is not None:
        return [Middleware(Inner, secret)]
    if not settings.allowed_origins:
        return [Middleware(Gate, settings)]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=sorted({each.method for each, _ in routes}),
        allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta"],
    )
    return [Middleware(Gate, settings), cors]


def _pattern(path: str) -> str:
    """The path for the router: a document's name may contain slashes."""
    return path.replace("{document}", "{document:path}")
