"""The seam between the server and the ways in which models call tools: one `ToolFormat` a way, one module each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rest_local.chat.conversation import Call, write_calls
from rest_local.chat.tools.source import Reader
from rest_local.errors import OptionError
from rest_local.grammar.builder import Lark


@dataclass(frozen=True)
class Tool:
    """A function that was offered. `strict`: its schema must be kept, or the request is refused."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def _strictly(self) -> str:
        return f"tool {self.name}" if self.strict else ""

    def arguments(self, lark: Lark) -> str:
        """The rule of its arguments as JSON. Where the schema holds what a grammar cannot keep, any object, unless
        `strict`: then OptionError."""
        return lark.json({**self.parameters, "type": "object"}, self._strictly, '{"type": "object"}')

    def argument(self, lark: Lark, schema: Any) -> str:
        """The rule of one argument, likewise. References within the parameters lead to `$defs` or `definitions`."""
        if isinstance(schema, Mapping):
            shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
            schema = {**shared, **schema}
        return lark.json(schema, self._strictly, json_allowed_escapes='nrt"\\')

    def members(self, lark: Lark, value: Callable[[Any], str], comma: str, colon: str, sort: bool = False) -> str:
        """A rule for `key colon value` of each argument, required ones always, with commas between: from right to left,
        what may follow with nothing said yet, and with something. `sort`: by name, not in the schema's order."""
        properties, required = self.parameters.get("properties"), self.parameters.get("required")
        names = list(properties) if isinstance(properties, Mapping) else []
        first = later = lark.add('""')
        for name in reversed(sorted(names) if sort else names):
            assert isinstance(properties, Mapping)
            said = lark.add(f"{lark.literal(name + colon)} {value(properties[name])} {later}")
            following = lark.add(f"{lark.literal(comma)} {said}")
            must = isinstance(required, list) and name in required
            first = said if must else lark.one_of([said, first])
            later = following if must else lark.one_of([following, later])
        return first


@dataclass(frozen=True)
class ToolFormat:
    """How calls are read, written and forced.

    readers         text that begins a call, and what reads on from there
    force           the body of a Lark rule of one call, or of several where the flag is set
    write           earlier calls, where the template does not write them
    whole           reads the whole answer in place of `readers` (formats with channels)
    bare            reads calls that begin the answer without a marker, names known
    id_characters   length of ids that the template takes, 0 for any
    """

    name: str
    readers: Mapping[str, Reader]
    force: Callable[[Lark, Sequence[Tool], bool], str]
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


def is_text(schema: Any) -> bool:
    """Whether a schema describes texts only."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def text_until(lark: Lark, schema: Any, end: str) -> str:
    """A text without quotes up to and with its end: one of those that the schema names, else any."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return f"({' | '.join(map(lark.literal, values))}) {lark.literal(end)}" if values else lark.until(end)


def json_objects(lark: Lark, tools: Sequence[Tool], arguments: str = "arguments") -> str:
    """A rule: `{"name": ..., "arguments": {...}}` of any of the tools."""
    ways = []
    for tool in tools:
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        ways.append(f"{lark.literal(opening)} {tool.arguments(lark)} {lark.literal('}')}")
    return lark.one_of(ways)


def repeated(call: str, between: str, many: bool) -> str:
    """One call, or several with a term between. At most 32: a model must not call for ever."""
    return f"{call} ({between} {call}){{0,31}}" if many else call
