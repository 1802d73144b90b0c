"""Define the base of all formats of tool calls. `json_formats` and `text_formats` have the formats.

`json_call` reads calls that are written as JSON objects, `{"name": ..., "arguments": {...}}`. Most formats put them in
their markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.chat.tools.source import Malformed, Reader, Source, Wait
from rest_local.errors import OptionError
from rest_local.grammar.grammar import Lark

MAX_NAME = 256
Call = Mapping[str, Any]  # an earlier call, with `name` and `arguments`


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `tools_of` makes it."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    strict: bool  # refuse the request if the schema cannot be enforced
    fields: Mapping[str, Any]  # the client's description of the function, for the chat template

    @property
    def _strictly(self) -> str:
        return f"tool {self.name}" if self.strict else ""

    def for_template(self) -> dict[str, Any]:
        """Return OpenAI's object, with every field that templates read without a check that it exists."""
        given = {name: value for name, value in self.fields.items() if value is not None}
        parameters = {"type": "object", "properties": {}, **self.parameters}
        return {"type": "function", "function": {"description": "", **given, "parameters": parameters}}

    def arguments(self, lark: Lark) -> str:
        """Return the rule of the arguments as JSON.

        Raises:
            OptionError: the schema is strict, and no grammar can enforce it
        """
        return lark.json({**self.parameters, "type": "object"}, self._strictly, '{"type": "object"}')

    def argument(self, lark: Lark, schema: Any) -> str:
        """Return the rule of one argument. References into `$defs` and `definitions` of the parameters work."""
        if isinstance(schema, Mapping):
            shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
            schema = {**shared, **schema}
        return lark.json(schema, self._strictly, json_allowed_escapes='nrt"\\')

    def members(self, lark: Lark, value: Callable[[Any], str], comma: str, colon: str, sort: bool = False) -> str:
        """Return a rule for `key colon value` of each argument with commas between. Required ones are always written.

        It is built from right to left: `first` matches the remaining members before any is written, `later` those after
        one. They come in the schema's order, or by name with `sort`.
        """
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


def write_calls(calls: Sequence[Call]) -> str:
    """Write calls in Hermes' notation, which most models without a notation of their own know."""
    return "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in calls
    )


def write_list(calls: Sequence[Call]) -> str:
    """Write calls as one JSON list of objects."""
    listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return json.dumps(listed, ensure_ascii=False)


Force = Callable[[Lark, Sequence[Tool], bool], str]


@dataclass(frozen=True)
class ToolFormat:
    """A format that calls are read, written and forced in."""

    name: str
    readers: Mapping[str, Reader]  # markers that begin a call, each with a reader for the text after it
    force: Force  # makes the body of a Lark rule for one call, or for several if the flag is set
    write: Callable[[Sequence[Call]], str] = write_calls  # writes earlier calls if the template does not
    whole: Reader | None = None  # reads the whole answer in place of `readers` (formats with channels)
    bare: Reader | None = None  # reads calls of known names without a marker at the beginning of the answer
    id_characters: int = 0  # length of the ids that the template accepts, 0 for any


def tools_of(tools: Sequence[Any] | None) -> list[Tool]:
    """Check OpenAI's `tools`.

    Raises:
        OptionError: a tool is none; the message names its place in the request
    """
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]


def _tool(tool: Any, place: str) -> Tool:
    fields = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = fields.get("name") if isinstance(fields, Mapping) else None
    if not isinstance(fields, Mapping) or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise OptionError(f"{place}: give an object with a function that has a name of 1 to {MAX_NAME} characters")
    if tool.get("type", "function") != "function":
        raise OptionError(f'{place}.type: give "function", the only type of tool')
    parameters, description = fields.get("parameters"), fields.get("description")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise OptionError(f"{place}.function.parameters: give a JSON schema")
    if description is not None and not isinstance(description, str):
        raise OptionError(f"{place}.function.description: give text")
    return Tool(name, parameters or {}, fields.get("strict") is True, fields)


def is_text(schema: Any) -> bool:
    """Return True if a schema allows strings only."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def text_until(lark: Lark, schema: Any, end: str) -> str:
    """Return a rule for text without quotes up to its end, inclusive: any text, or one of the schema's values."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return f"({' | '.join(map(lark.literal, values))}) {lark.literal(end)}" if values else lark.until(end)


def json_objects(lark: Lark, tools: Sequence[Tool], arguments: str = "arguments") -> str:
    """Return a rule for `{"name": ..., "arguments": {...}}` of any of the tools."""
    ways = []
    for tool in tools:
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        ways.append(f"{lark.literal(opening)} {tool.arguments(lark)} {lark.literal('}')}")
    return lark.one_of(ways)


@dataclass(frozen=True)
class Wrapped:
    """The notation of calls that are written as `before`, the name, `between`, the arguments as JSON, `after`."""

    before: str
    between: str
    after: str = ""

    def rule(self, lark: Lark, tools: Sequence[Tool]) -> str:
        closing = f" {lark.literal(self.after)}" if self.after else ""
        opened = ((lark.literal(self.before + tool.name + self.between), tool) for tool in tools)
        return lark.one_of([f"{opening} {tool.arguments(lark)}{closing}" for opening, tool in opened])

    def write(self, call: Call) -> str:
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        return f"{self.before}{call['name']}{self.between}{arguments}{self.after}"


def repeated(call: str, between: str, many: bool) -> str:
    """Return a rule for one call, or up to 32 with a term between them. Without a limit a model could call forever."""
    return f"{call} ({between} {call}){{0,31}}" if many else call


_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "call_id", "index", "type")


def json_call(source: Source, known: Collection[str] | None = None) -> Wait[None]:
    """Read one call. If its name comes first, its arguments are emitted as they arrive.

    If `known` is given, only these names are calls. Raises Malformed for anything else, and for an incomplete object.
    """
    yield from source.need("{")
    name, early_arguments, started = "", "", False
    while True:
        yield from source.space()
        if (yield from source.starts("}")):
            break
        key = yield from source.string()
        yield from source.space()
        yield from source.need(":")
        yield from source.space()
        if key in _NAMES and not name:
            name = yield from source.string()
            if not name or (known is not None and name not in known):
                raise Malformed
            if early_arguments:
                started = _whole(source, name, early_arguments)
        elif key in _ARGUMENTS and not started and name and (yield from source.peek()) == "{":
            source.start(name)
            started = True
            if not (yield from source.value(source.arguments)):
                return
            source.begin()
        elif key in _ARGUMENTS and not started and not early_arguments:
            early_arguments = yield from _collected(source)
            if name:
                started = _whole(source, name, early_arguments)
        elif key in _IGNORED:
            yield from source.value(lambda text: None)
        else:
            raise Malformed
        yield from source.space()
        if (yield from source.need(",", "}")) == "}":
            break
    if not started:
        if not name:
            raise Malformed
        _whole(source, name, "{}")
    source.end()


def json_calls(source: Source) -> Wait[None]:
    """Read a list of calls, or one. Raises Malformed as `json_call` does, and keeps the calls before the fault."""
    if not (yield from source.starts("[")):
        yield from json_call(source)
        return
    while True:
        yield from source.space()
        if (yield from source.starts("]")):
            return
        yield from json_call(source)
        source.begin()
        yield from source.space()
        if (yield from source.need(",", "]")) == "]":
            source.end()
            return


def closed(source: Source, marker: str) -> Wait[None]:
    """Read the marker after a call, and surplus brackets before it. Without a marker, read nothing."""
    yield from source.space()
    source.begin()
    while (yield from source.starts("}", "]")):
        yield from source.space()
    if (yield from source.starts(marker)):
        source.end()
    else:
        source.rewind()


def _whole(source: Source, name: str, arguments: str) -> bool:
    source.start(name)
    source.arguments(arguments)
    source.begin()
    return True


def _collected(source: Source) -> Wait[str]:
    """Read arguments that precede the name. Arguments inside a JSON string are decoded; null is an empty object."""
    raw: list[str] = []
    if not (yield from source.value(raw.append)):
        raise Malformed
    text = "".join(raw)
    if text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            text = str(json.loads(text, strict=False)) or "{}"
        except ValueError:
            raise Malformed from None
    return text
