"""The calls of a server, and their description as OpenAPI 3.1.

A protocol's modules export `ROUTES`, which `app` joins. The description is generated from the types that check the
bodies, so the two agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local import __version__
from rest_local.api.errors import Shape, anthropic_shape, ollama_shape, openai_shape, shape_of

_REFERENCE = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_ERRORS = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "OllamaError": _object(error=_TEXT),
}
_ERROR_NAMES: dict[Shape, str] = {openai_shape: "Error", anthropic_shape: "AnthropicError", ollama_shape: "OllamaError"}


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False  # True if the body may request a stream as the answer
    stream_media: str = "text/event-stream"
    media: str = "application/json"
    of_server: bool = False  # True if no model is needed, so the router answers it itself


Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Routes = tuple[tuple[Operation, Endpoint], ...]

get, post, delete = partial(Operation, "GET"), partial(Operation, "POST"), partial(Operation, "DELETE")


@cache
def describe(operations: tuple[Operation, ...], with_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description."""
    bodies = list(dict.fromkeys(each.body for each in operations if each.body is not None))
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    schemas = {**definitions.get("$defs", {}), **_ERRORS}
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
    shape = _ERROR_NAMES[shape_of(call.path)]
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=shape)}}}
    content: dict[str, Any] = {call.media: {"schema": {} if call.media == "application/json" else {"type": "string"}}}
    if call.streams:
        content[call.stream_media] = {"schema": {}}  # readers disagree whether it describes the text or an event
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
