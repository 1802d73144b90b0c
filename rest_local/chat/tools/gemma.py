"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3,list:[true]}<tool_call|>`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.tools.format import Call, Tool, ToolFormat, is_text, repeated, text_until
from rest_local.chat.tools.hermes import tagged
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|"([^"\\]*)"|([^\s:{}\[\],"]+))\s*:\s*', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_DEEPEST = 100


def _called(source: Source) -> Wait[None]:
    yield from source.space()
    yield from source.need("call:")
    name = yield from source.name()
    text: list[str] = []
    if not (yield from source.until((_CLOSING,), text.append)):
        raise Malformed
    arguments, end = _value("".join(text).strip(), 0, 0)
    if not isinstance(arguments, dict) or end < len("".join(text).strip()):
        raise Malformed
    source.start(name)
    source.arguments(json.dumps(arguments, ensure_ascii=False))


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at index `at`, and the index of its end."""
    if depth > _DEEPEST:
        raise Malformed
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise Malformed
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _members(text, at, depth)
    if text.startswith('"', at):
        try:
            return json.JSONDecoder(strict=False).raw_decode(text, at)
        except ValueError:
            raise Malformed from None
    found = _SCALAR.match(text, at)
    if not found:
        raise Malformed
    return _scalar(found[0]), found.end()


def _scalar(text: str) -> Any:
    """A number or a constant, else text without quotes."""
    if text in ("true", "false", "null") or (_NUMBER.fullmatch(text) and len(text) < 300):
        value = json.loads(text)
        return value if value not in (math.inf, -math.inf) else text
    return text


def _members(text: str, at: int, depth: int) -> tuple[Any, int]:
    closing = "}" if text[at] == "{" else "]"
    members: dict[str, Any] = {}
    items: list[Any] = []
    at = _after_space(text, at + 1)
    while text[at : at + 1] != closing:
        if closing == "}":
            key = _KEY.match(text, at)
            if not key:
                raise Malformed
            name = next(part for part in key.groups() if part is not None)
            if name in members:
                raise Malformed
            members[name], at = _value(text, key.end(), depth + 1)
        else:
            item, at = _value(text, at, depth + 1)
            items.append(item)
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != closing:
            raise Malformed
    return (members if closing == "}" else items), at + 1


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _write(calls: Sequence[Call]) -> str:
    return "".join(f"{_OPENING}call:{call['name']}{_written(call['arguments'], True)}{_CLOSING}" for call in calls)


def _written(value: Any, bare_keys: bool = False) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        keys = {key: key if bare_keys else f"{_QUOTE}{key}{_QUOTE}" for key in value}
        return "{" + ",".join(f"{keys[key]}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """Strings in Gemma's quotes, everything else as JSON, which `_value` reads too."""
    calls = []
    for tool in tools:

        def value(schema: Any, tool: Tool = tool) -> str:
            if is_text(schema):
                return f"{lark.literal(_QUOTE)} {text_until(lark, schema, _QUOTE)}"
            return tool.argument(lark, schema)

        members = tool.members(lark, value, ",", ":", sort=True)
        calls.append(f"{lark.literal(f'{_OPENING}call:{tool.name}{{')} {members} {lark.literal('}' + _CLOSING)}")
    return repeated(lark.one_of(calls), "", many)


GEMMA = ToolFormat("gemma", {_OPENING: _called, "<tool_call>": tagged}, _force, _write)
