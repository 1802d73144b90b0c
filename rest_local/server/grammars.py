"""The grammar that a body asks for: its own, or the one of its JSON schema. Knows nothing of tools."""

from __future__ import annotations

from typing import Any

from rest_local.llama.grammar import json_object, json_schema
from rest_local.server.bodies import Generation
from rest_local.server.errors import ApiError


def grammar_of(body: Generation) -> str | None:
    """GBNF, or None where the answer is free. Raises OptionError for a schema that cannot be kept, ApiError 400 for two
    wishes at once.
    """
    schema = _schema(body)
    if body.grammar and schema is not None:
        raise ApiError(400, "give a grammar or a JSON schema, not both", param="grammar")
    if body.grammar:
        return body.grammar
    if schema is None:
        return None
    return json_object() if schema is True or schema == {} else json_schema(schema)


def _schema(body: Generation) -> dict[str, Any] | bool | None:
    """True: any object."""
    if body.json_schema is not None:
        return body.json_schema
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return wanted.schema_ if wanted.schema_ is not None else True
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(400, "response_format: json_schema needs json_schema.schema", param="response_format")
    return wanted.json_schema.schema_
