"""The grammar that a body asks for: its own, the one of its JSON schema, or that of a call it forces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.tools import AnswerFormat
from rest_local.grammar import Grammar, any_object, gbnf, json_schema, lark
from rest_local.server.bodies import ChatBody, Generation
from rest_local.server.errors import ApiError

Schema = dict[str, Any] | bool


def grammar_of(body: Generation) -> Grammar | None:
    """None where the answer is free. Raises OptionError for a schema that cannot be kept and a grammar that cannot be
    read or compiled, ApiError 400 where both are given.
    """
    schema = _schema(body)
    if body.grammar or schema is None:
        return _written(body)
    return any_object() if schema is True or schema == {} else json_schema(schema)


def chat_grammar(
    body: ChatBody, form: AnswerFormat, tools: Sequence[Mapping[str, Any]], choice: Any, prompt: str
) -> Grammar | None:
    """As `grammar_of`, after the reasoning of models that reason. A forced call goes before a schema, and a schema
    before calls that the model may or may not make. Raises as `grammar_of`, OptionError for a choice that is none.
    """
    schema = _schema(body)
    forced = form.forced(tools, choice, prompt, parallel=body.parallel_tool_calls is not False)
    if forced is not None and body.grammar:
        raise ApiError(400, "give a grammar or force a call, not both", param="grammar")
    if forced is not None or body.grammar or schema is None:
        return forced or _written(body)
    return form.schema(None if schema is True or schema == {} else schema, prompt)


def _written(body: Generation) -> Grammar | None:
    """The body's own grammar."""
    if not body.grammar:
        return None
    return gbnf(body.grammar) if isinstance(body.grammar, str) else lark(body.grammar.value)


def _schema(body: Generation) -> Schema | None:
    """True: any object. Raises ApiError 400 where there is a grammar as well."""
    schema = _given_schema(body)
    if body.grammar and schema is not None:
        raise ApiError(400, "give a grammar or a JSON schema, not both", param="grammar")
    return schema


def _given_schema(body: Generation) -> Schema | None:
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
