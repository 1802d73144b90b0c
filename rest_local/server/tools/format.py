"""The seam between the server and the ways in which models call tools: one `ToolFormat` a way, one module each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.conversation import Call, write_calls
from rest_local.llama.grammar import Rules, literal
from rest_local.llama.json_schema import Schema
from rest_local.server.tools.source import Reader


@dataclass(frozen=True)
class Tool:
    """A function that was offered. `strict`: its schema must be kept, or the request is refused."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def arguments(self, rules: Rules) -> str:
        """The rule of its arguments as JSON. Where the schema holds what a grammar cannot keep, any object, unless
        `strict`: then OptionError."""
        try:
            return Schema(rules, dict(self.parameters) | {"type": "object"}).root()
        except OptionError as error:
            if self.strict:
                raise OptionError(f"tool {self.name}: {error}") from error
            return rules.json("object")


@dataclass(frozen=True)
class ToolFormat:
    """How calls are read, written and forced.

    readers         text that begins a call, and what reads on from there
    force           a GBNF body of one call, or of several where the flag is set
    write           earlier calls, where the template does not write them
    whole           reads the whole answer in place of `readers` (formats with channels)
    bare            reads calls that begin the answer without a marker, names known
    id_characters   length of ids that the template takes, 0 for any
    """

    name: str
    readers: Mapping[str, Reader]
    force: Callable[[Rules, Sequence[Tool], bool], str]
    write: Callable[[Sequence[Call]], str] = write_calls
    whole: Reader | None = None
    bare: Reader | None = None
    id_characters: int = 0
    markers: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "markers", tuple(self.readers))


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """OpenAI's `tools`, checked. Raises OptionError with the place."""
    found = []
    for i, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(name, str) or not name:
            raise OptionError(f"tools[{i}]: give an object with a function that has a name")
        parameters = inner.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise OptionError(f"tools[{i}].function.parameters: give a JSON schema")
        found.append(Tool(name, parameters, inner.get("strict") is True))
    return found


def quoted(name: str) -> str:
    """A GBNF literal of the JSON string that holds this text."""
    return literal(json.dumps(name, ensure_ascii=False))


def repeated(rules: Rules, call: str, between: str, many: bool) -> str:
    """One call, or several with something between. At most 32: a model must not call for ever."""
    return f"{call} ({between} {call}){{0,31}}" if many else call


def one_of(rules: Rules, ways: Sequence[str]) -> str:
    return rules.add(" | ".join(ways))
