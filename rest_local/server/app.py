"""The ASGI application: routes and middleware, the page, and the description of the calls.

From the outside in: the log of requests; `Gate` (Host, Origin); CORS, if origins are allowed; `Guard` (key, type and
size of the body); the routes.

`GET /openapi.json` describes every route. It is made of the types that check the bodies, so it cannot differ.

`GET /` is the page for chat and fill-in-the-middle, one static file. By its security policy it loads nothing, runs only
its own script and style (the browser compares their hashes), turns no text into markup, calls only this server and
cannot be framed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from rest_local import __version__
from rest_local.errors import RestLocalError
from rest_local.server import bodies, datastores, model_info
from rest_local.server.chat import chat_completions
from rest_local.server.completions import completions, embeddings, rerank
from rest_local.server.errors import ApiError, on_any_error, on_api_error, on_http_error, on_own_error
from rest_local.server.model_info import metrics
from rest_local.server.native import completion, infill
from rest_local.server.security import AccessLog, Gate, Guard
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: HttpRequest) -> Response:
    """The page."""
    html = _html()
    return Response(html, headers=_HEADERS | {"content-security-policy": _policy(html)}, media_type="text/html")


@cache
def _html() -> bytes:
    """The page with line feeds, into which a browser converts all line ends before it computes hashes."""
    return files("rest_local.server").joinpath("page.html").read_bytes().replace(b"\r\n", b"\n")


@cache
def _policy(html: bytes) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(html, b'script')}",
            f"style-src {_hashes(html, b'style')}",
            "img-src data:",
            "connect-src 'self'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(html: bytes, tag: bytes) -> str:
    """Hashes of all inline elements with this tag, in the policy's notation."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)


_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True)
class Operation:
    """A method of a route. `streams`: answers with events if the body requests them."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    media: str = "application/json"


@cache
def describe(operations: tuple[Operation, ...], with_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    bodies = list(dict.fromkeys(each.body for each in operations if each.body is not None))
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    schemas = {**definitions.get("$defs", {}), "Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each)
    components: dict[str, Any] = {"schemas": schemas}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "rest-local", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _described(call: Operation) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    content: dict[str, Any] = {call.media: {"schema": {} if call.media == "application/json" else {"type": "string"}}}
    if call.streams:
        content["text/event-stream"] = {"schema": {}}  # some readers take it for the text, others for an event
    operation: dict[str, Any] = {
        "summary": call.summary,
        "responses": {
            "200": {"description": "success", "content": content},
            "4XX": {"description": "refused", "content": error},
            "5XX": {"description": "not supported, or not possible now", "content": error},
        },
    }
    names = [part[1:-1] for part in call.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if call.body is not None:
        schema = {"$ref": _REFERENCE.format(model=call.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


async def openapi(request: HttpRequest) -> Response:
    """The description of this server."""
    operations: tuple[Operation, ...] = request.app.state.operations
    return json_response(describe(operations, bool(state_of(request).settings.keys)))


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
