"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4, SmolLM, and whatever knows none.

Also inside these tags: Qwen3-Coder's notation, see `qwen`. Granite 3 and Phi 4 mark a list of such objects differently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rest_local.llama.conversation import Call
from rest_local.llama.grammar import Rules, literal
from rest_local.server.tools.call import closed, json_call, json_calls
from rest_local.server.tools.format import Tool, ToolFormat, one_of, quoted, repeated
from rest_local.server.tools.qwen import function_call, function_opened
from rest_local.server.tools.source import Source, Wait

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


def _force(rules: Rules, tools: Sequence[Tool], many: bool) -> str:
    objects = one_of(
        rules, [f'"{{\\"name\\": " {quoted(t.name)} ", \\"arguments\\": " {t.arguments(rules)} "}}"' for t in tools]
    )
    call = rules.add(f"{literal(OPENING + chr(10))} {objects} {literal(chr(10) + CLOSING)}")
    return repeated(rules, call, '"\\n"', many)


def _force_list(rules: Rules, tools: Sequence[Tool], many: bool) -> str:
    objects = one_of(
        rules, [f'"{{\\"name\\": " {quoted(t.name)} ", \\"arguments\\": " {t.arguments(rules)} "}}"' for t in tools]
    )
    return f'"<|tool_call|>[" {repeated(rules, objects, chr(34) + ", " + chr(34), many)} "]" "<|/tool_call|>"?'


def _write_list(calls: Sequence[Call]) -> str:
    listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return "<|tool_call|>" + json.dumps(listed, ensure_ascii=False)


HERMES = ToolFormat("hermes", {OPENING: tagged, "<function=": function_opened}, _force)
LISTED = ToolFormat("listed", {"<|tool_call|>": _listed, OPENING: tagged}, _force_list, _write_list)
