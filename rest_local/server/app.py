"""The ASGI application: its routes, and what stands before them.

From the outside in: the log of requests; `Gate` (Host, Origin); CORS, where origins are allowed; `Guard` (key, kind and
size of the body); the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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
from rest_local.server.openapi import Call, openapi
from rest_local.server.page import page
from rest_local.server.security import Gate, Guard
from rest_local.server.state import State

Endpoint = Callable[[HttpRequest], Awaitable[Response]]

_CALLS: tuple[tuple[Call, Endpoint], ...] = (
    (Call("POST", "/v1/chat/completions", "A chat", bodies.ChatBody, streams=True), chat_completions),
    (Call("POST", "/v1/completions", "Text is continued", bodies.CompletionBody, streams=True), completions),
    (Call("POST", "/v1/embeddings", "Texts as vectors", bodies.EmbeddingBody), embeddings),
    (Call("POST", "/v1/rerank", "Not served: 501"), rerank),
    (Call("GET", "/v1/models", "The model's names"), model_info.models),
    (Call("GET", "/v1/models/{name}", "One of them"), model_info.model),
    (Call("POST", "/completion", "llama-server's completion", bodies.NativeBody, streams=True), completion),
    (Call("POST", "/infill", "A gap is filled", bodies.InfillBody, streams=True), infill),
    (Call("POST", "/tokenize", "Text to token ids", bodies.TokenizeBody), model_info.tokenize),
    (Call("POST", "/detokenize", "Token ids to text", bodies.DetokenizeBody), model_info.detokenize),
    (Call("POST", "/apply-template", "The prompt of a chat", bodies.TemplateBody), model_info.apply_template),
    (Call("GET", "/props", "The model and its template"), model_info.props),
    (Call("GET", "/health", "Whether the model is loaded"), model_info.health),
    (Call("GET", "/slots", "What is being served"), model_info.slots),
    (Call("GET", "/metrics", "Totals for Prometheus", media="text/plain"), metrics),
    (Call("GET", "/datastores", "What can be drafted from"), datastores.list_all),
    (Call("POST", "/datastores/{name}/search", "Where a text occurs", bodies.SearchBody), datastores.search),
    (Call("POST", "/datastores/{name}/documents", "Add a text", bodies.DocumentBody), datastores.add_document),
    (Call("DELETE", "/datastores/{name}/documents/{document}", "Forget a text"), datastores.forget_document),
    (Call("GET", "/", "The chat page", media="text/html"), page),
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
    """The application of one server; the caller fills in the state once the model is loaded."""
    endpoints = {(call.method, call.path): endpoint for call, endpoint in _CALLS}
    routes = [Route(_pattern(call.path), endpoint, methods=[call.method]) for call, endpoint in _CALLS]
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
            allow_methods=sorted({call.method for call, _ in _CALLS}),
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
    app.state.calls = tuple(call for call, _ in _CALLS)
    return app


def _pattern(path: str) -> str:
    """A document's name may hold slashes."""
    return path.replace("{document}", "{document:path}")
