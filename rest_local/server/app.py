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

from rest_local.errors import RestLocalError
from rest_local.server import bodies, datastores, messages, model_info, slots
from rest_local.server.chat import chat_completions, input_tokens
from rest_local.server.completions import completions
from rest_local.server.errors import ApiError, on_any_error, on_api_error, on_http_error, on_own_error
from rest_local.server.model_info import metrics
from rest_local.server.native import completion, infill
from rest_local.server.ollama import routes as ollama
from rest_local.server.operations import Operation, Routes, delete, describe, get, post
from rest_local.server.page import page
from rest_local.server.responses import routes as responses
from rest_local.server.security import AccessLog, Drained, Gate, Guard, Inner
from rest_local.server.settings import Settings
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response
from rest_local.server.vectors import embeddings, rerank


async def openapi(request: HttpRequest) -> Response:
    """The description of this server."""
    operations: tuple[Operation, ...] = request.app.state.operations
    return json_response(describe(operations, bool(state_of(request).settings.keys)))


ROUTES: Routes = (
    (post("/v1/chat/completions", "Continue a conversation", bodies.ChatBody, streams=True), chat_completions),
    (post("/v1/chat/completions/input_tokens", "Count a conversation's tokens", bodies.ChatBody), input_tokens),
    (post("/v1/completions", "Continue text", bodies.CompletionBody, streams=True), completions),
    (post("/v1/embeddings", "Embed texts", bodies.EmbeddingBody), embeddings),
    (post("/v1/rerank", "Order documents by relevance", bodies.RerankBody), rerank),
    (get("/v1/models", "Names of the models", of_server=True), model_info.models),
    (get("/v1/models/{name}", "One name of a model", of_server=True), model_info.model),
    (post("/completion", "llama-server's completion", bodies.NativeBody, streams=True), completion),
    (post("/infill", "Fill a gap", bodies.InfillBody, streams=True), infill),
    (post("/tokenize", "Tokenize text", bodies.TokenizeBody), model_info.tokenize),
    (post("/detokenize", "Detokenize ids", bodies.DetokenizeBody), model_info.detokenize),
    (post("/apply-template", "Render a prompt", bodies.TemplateBody), model_info.apply_template),
    (get("/props", "Properties of the model and its template"), model_info.props),
    (get("/health", "Whether the model is loaded", of_server=True), model_info.health),
    (get("/slots", "State of the slots"), model_info.slots),
    (get("/metrics", "Totals for Prometheus", media="text/plain"), metrics),
    (get("/datastores", "List datastores"), datastores.list_all),
    (post("/datastores/{name}/search", "Find text in a datastore", bodies.SearchBody), datastores.search),
    (post("/datastores/{name}/documents", "Add a document", bodies.DocumentBody), datastores.add_document),
    (delete("/datastores/{name}/documents/{document}", "Remove a document"), datastores.forget_document),
    *slots.ROUTES,
    (get("/", "The chat page", media="text/html", of_server=True), page),
    *responses.ROUTES,
    *messages.ROUTES,
    *ollama.ROUTES,
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
