"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4, SmolLM, and the default.

The tags may also contain Qwen3-Coder's notation, see `qwen`. Granite 3 and Phi 4 mark a list of such objects instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from rest_local.chat.tools.format import (
    Call,
    Tool,
    ToolFormat,
    closed,
    json_call,
    json_calls,
    json_objects,
    repeated,
    write_list,
)
from rest_local.chat.tools.qwen import function_call, function_opened
from rest_local.chat.tools.source import Source, Wait
from rest_local.grammar.grammar import Lark

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def tagged(source: Source) -> Wait[None]:
    """What follows `<tool_call>`."""
    yield from source.space()
    if (yield from source.starts("<function=")):
        yield from function_call(source)
    else:
        yield from json_call(source)
    yield from closed(source, CLOSING)


def _listed(source: Source) -> Wait[None]:
    yield from source.space()
    yield from json_calls(source)
    yield from closed(source, "<|/tool_call|>")


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    opening, closing = lark.literal(f"{OPENING}\n"), lark.literal(f"\n{CLOSING}")
    return repeated(lark.add(f"{opening} {json_objects(lark, tools)} {closing}"), lark.literal("\n"), many)


def _force_list(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    calls = repeated(json_objects(lark, tools), lark.literal(", "), many)
    return f"{lark.literal('<|tool_call|>[')} {calls} {lark.literal(']')} ({lark.literal('<|/tool_call|>')})?"


def _write_list(calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + write_list(calls)


HERMES = ToolFormat("hermes", {OPENING: tagged, "<function=": function_opened}, _force)
LISTED = ToolFormat("listed", {"<|tool_call|>": _listed, OPENING: tagged}, _force_list, _write_list)
