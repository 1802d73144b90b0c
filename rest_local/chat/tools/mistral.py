"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rest_local.chat.tools.format import Call, Tool, ToolFormat, json_calls, json_objects, repeated, write_list
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

_OPENING = "[TOOL_CALLS]"


def _called(source: Source) -> Wait[None]:
    yield from source.space()
    if (yield from source.peek()) in ("[", "{"):
        yield from json_calls(source)
        return
    name = yield from source.name()
    known = ""
    if (yield from source.starts("[CALL_ID]")):
        known = yield from source.name()
    yield from source.starts("[ARGS]")
    yield from source.space()
    if (yield from source.peek()) != "{":
        raise Malformed
    source.start(name, known)
    yield from source.value(source.arguments)


def _force_list(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    calls = repeated(json_objects(lark, tools), lark.literal(", "), many)
    return f"{lark.literal(_OPENING + '[')} {calls} {lark.literal(']')}"


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    calls = [f"{lark.literal(f'{_OPENING}{tool.name}[ARGS]')} {tool.arguments(lark)}" for tool in tools]
    return repeated(lark.one_of(calls), "", many)


def _write_list(calls: Sequence[Call]) -> str:
    return _OPENING + write_list(calls)


def _write(calls: Sequence[Call]) -> str:
    return "".join(
        f"{_OPENING}{call['name']}[ARGS]{json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls
    )


MISTRAL_LIST = ToolFormat("mistral-list", {_OPENING: _called}, _force_list, _write_list, id_characters=9)
MISTRAL = ToolFormat("mistral", {_OPENING: _called}, _force, _write, id_characters=9)
