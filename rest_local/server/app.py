"""The ASGI application: routes and middleware.

From the outside in: the log of requests; `Gate` (Host, Origin); CORS, if origins are allowed; `Guard` (key, type and
size of the body); the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from rest_local.errors import RestLocalError
from rest_local.server import bodies, datastores, model_info
from rest_local.server.access import AccessLog
from rest_local.server.chat import chat_completions
from rest_local.server.completions import completions
from rest_local.server.embeddings import embeddings, rerank
from rest_local.server.errors import ApiError, on_any_error, on_api_error, on_http_error, on_own_error
from rest_local.server.metrics import metrics
from rest_local.server.native import completion, infill
from rest_local.server.openapi import Operation, openapi
from rest_local.server.page import page
from rest_local.server.security import Gate, Guard
from rest_local.server.state import State

Endpoint = Callable[[HttpRequest], Awaitable[Response]]

_get, _post = partial(Operation, "GET"), partial(Operation, "POST")
_OPERATIONS: tuple[tuple[Operation, Endpoint], ...] = (
    (_post("/v1/chat/completions", "Continue a conversation", bodies.ChatBody, streams=True), chat_completions),
    (_post("/v1/completions", "Continue text", bodies.CompletionBody, streams=True), completions),
    (_post("/v1/embeddings", "Embed texts", bodies.EmbeddingBody), embeddings),
    (_post("/v1/rerank", "Not served: 501"), rerank),
    (_get("/v1/models", "Names of the model"), model_info.models),
    (_get("/v1/models/{name}", "One name of the model"), model_info.model),
    (_post("/completion", "llama-server's completion", bodies.NativeBody, streams=True), completion),
    (_post("/infill", "Fill a gap", bodies.InfillBody, streams=True), infill),
    (_post("/tokenize", "Tokenize text", bodies.TokenizeBody), model_info.tokenize),
    (_post("/detokenize", "Detokenize ids", bodies.DetokenizeBody), model_info.detokenize),
    (_post("/apply-template", "Render a prompt", bodies.TemplateBody), model_info.apply_template),
    (_get("/props", "Properties of the model and its template"), model_info.props),
    (_get("/health", "Whether the model is loaded"), model_info.health),
    (_get("/slots", "State of the slots"), model_info.slots),
    (_get("/metrics", "Totals for Prometheus", media="text/plain"), metrics),
    (_get("/datastores", "List datastores"), datastores.list_all),
    (_post("/datastores/{name}/search", "Find text in a datastore", bodies.SearchBody), datastores.search),
    (_post("/datastores/{name}/documents", "Add a document", bodies.DocumentBody), datastores.add_document),
    (Operation("DELETE", "/datastores/{name}/documents/{document}", "Remove a document"), datastores.forget_document),
    (_get("/", "The chat page", media="text/html"), page),
)
_OTHER_NAMES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/models": "/v1/models",
    "/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/health": "/health",
}


def create_app(state: State) -> Starlette:
    """The application of one server. The caller sets the state's engine and service once the model is loaded."""
    endpoints = {(each.method, each.path): endpoint for each, endpoint in _OPERATIONS}
    routes = [
        Route(_pattern(operation.path), endpoint, methods=[operation.method]) for operation, endpoint in _OPERATIONS
    ]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    for other, path in _OTHER_NAMES.items():
        found = [(method, endpoint) for (method, name), endpoint in endpoints.items() if name == path]
        routes += [Route(other, endpoint, methods=[method]) for method, endpoint in found]
    settings = state.settings
    between = []
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=sorted({each.method for each, _ in _OPERATIONS}),
            allow_headers=["authorization", "content-type", "x-api-key"],
        )
        between = [cors]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(AccessLog), Middleware(Gate, settings), *between, Middleware(Guard, settings)],
        exception_handlers={
            ApiError: on_api_error,
            RestLocalError: on_own_error,
            HTTPException: on_http_error,
            Exception: on_any_error,
        },
    )
    app.state.server = state
    app.state.operations = tuple(each for each, _ in _OPERATIONS)
    return app


def _pattern(path: str) -> str:
    """The path for the router: a document's name may contain slashes."""
    return path.replace("{document}", "{document:path}")
