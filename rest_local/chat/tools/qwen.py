"""Qwen3-Coder's and Qwen3.5's calls, without quotes around long strings:

    <tool_call>
    <function=write_file>
    <parameter=path>
    src/main.py
    </parameter>
    </function>
    </tool_call>

A parameter is text where the tool's schema says so; otherwise it is JSON if it can be read as JSON. Text is emitted as
it arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.tools.format import Call, Tool, ToolFormat, closed, is_text, repeated, text_until
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

_KEY = re.compile(r"[^<>\n]*")
_ENDS = ("\n</parameter>", "</parameter>")


def function_opened(source: Source) -> Wait[None]:
    """What follows `<function=` where the tag around it is missing."""
    yield from function_call(source)
    yield from closed(source, "</tool_call>")


def function_call(source: Source) -> Wait[None]:
    """What follows `<function=`. If the text ends inside a parameter, the arguments stay incomplete JSON."""
    name = yield from source.name()
    yield from source.need(">")
    source.start(name)
    between = "{"
    while True:
        yield from source.space()
        tag = yield from source.starts("<parameter=", "</function>")
        if tag != "<parameter=":
            source.arguments("}" if between == ", " else "{}")
            return
        key = yield from source.matching(_KEY)
        if not (yield from source.starts(">")):
            source.arguments("}" if between == ", " else "{}")
            source.content(tag + key)
            return
        source.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        between = ", "
        yield from source.starts("\n")
        if not (yield from _parameter(source, _schema(source, name, key))):
            return


def _schema(source: Source, name: str, key: str) -> Any:
    properties = source.tools.get(name, {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _parameter(source: Source, schema: Any) -> Wait[bool]:
    """Reads a parameter's value; False if its end is missing."""
    if is_text(schema):
        source.arguments('"')
        marker = yield from source.until(
            _ENDS, lambda text: source.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        source.arguments('"' if marker else "")
        return bool(marker)
    raw: list[str] = []
    marker = yield from source.until(_ENDS, raw.append)
    text = "".join(raw)
    source.arguments(_as_json(text) if marker else text)
    return bool(marker)


def _as_json(text: str) -> str:
    """JSON stays unchanged, Python's constants become JSON's, anything else becomes a string."""
    constants = {"True": "true", "False": "false", "None": "null"}
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return constants.get(text.strip()) or json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refused(constant: str) -> None:
    raise ValueError(constant)


def write(calls: Sequence[Call]) -> str:
    """Calls in this notation."""
    return "\n".join(_written(call) for call in calls)


def _written(call: Call) -> str:
    arguments = call["arguments"] if isinstance(call["arguments"], Mapping) else {}
    parameters = "".join(
        f"<parameter={key}>\n"
        + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        + "\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={call['name']}>\n{parameters}</function>\n</tool_call>"


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    functions = [
        f"{lark.literal(f'<function={tool.name}>' + chr(10))} {_force_parameters(lark, tool)} "
        f"{lark.literal('</function>' + chr(10))}"
        for tool in tools
    ]
    opening, closing = lark.literal("<tool_call>\n"), lark.literal("</tool_call>")
    return repeated(lark.add(f"{opening} {lark.one_of(functions)} {closing}"), lark.literal("\n"), many)


def _force_parameters(lark: Lark, tool: Tool) -> str:
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    parts = []
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        part = lark.add(f"{lark.literal(f'<parameter={key}>' + chr(10))} {_force_value(lark, tool, schema)}")
        parts.append(part if isinstance(required, list) and key in required else f"{part}?")
    return " ".join(parts)


def _force_value(lark: Lark, tool: Tool, schema: Any) -> str:
    """A rule for the value and the end of its tag."""
    end = "\n</parameter>\n"
    if is_text(schema):
        return text_until(lark, schema, end)
    return f"{tool.argument(lark, schema)} {lark.literal(end)}"


def _opened(source: Source) -> Wait[None]:
    yield from source.space()
    if not (yield from source.starts("<function=")):
        raise Malformed
    yield from function_opened(source)


QWEN = ToolFormat("qwen", {"<tool_call>": _opened, "<function=": function_opened}, _force, write)
