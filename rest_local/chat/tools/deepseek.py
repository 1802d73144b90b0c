"""DeepSeek: calls between markers of its own. R1 writes the arguments in a fenced block, V3.1 does not."""
# ruff: noqa: RUF001 - the markers are DeepSeek's

from __future__ import annotations

import json
from collections.abc import Sequence

from rest_local.chat.tools.format import Call, Tool, ToolFormat, repeated
from rest_local.chat.tools.hermes import tagged
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_BETWEEN = "<｜tool▁sep｜>"


def _all(source: Source) -> Wait[None]:
    yield from source.space()
    yield from source.need(CALL)
    yield from _further(source)


def _further(source: Source) -> Wait[None]:
    """What follows the marker of a call, and further calls."""
    while True:
        yield from _one(source)
        source.begin()
        yield from source.space()
        if not (yield from source.starts(CALL)):
            yield from source.starts(_CALLS_END)
            source.end()
            return


def _one(source: Source) -> Wait[None]:
    name = yield from source.name()
    yield from source.need(_BETWEEN)
    yield from source.space()
    fenced = False
    if name == "function" and (yield from source.peek()) != "{":  # it was the type of the tool
        name = yield from source.name()
        yield from source.space()
        fenced = bool((yield from source.starts("```json")))
        yield from source.space()
    if (yield from source.peek()) != "{":
        raise Malformed
    source.start(name)
    if not (yield from source.value(source.arguments)):
        return
    yield from source.space()
    if fenced:
        yield from source.starts("```")
        yield from source.space()
    yield from source.starts(_CALL_END)


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    closing = lark.literal(f"\n```{_CALL_END}")
    openings = [lark.literal(f"{CALL}function{_BETWEEN}{tool.name}\n```json\n") for tool in tools]
    calls = [f"{opening} {tool.arguments(lark)} {closing}" for opening, tool in zip(openings, tools, strict=True)]
    return (
        f"{lark.literal(_CALLS)} {repeated(lark.one_of(calls), lark.literal(chr(10)), many)} {lark.literal(_CALLS_END)}"
    )


def _write(calls: Sequence[Call]) -> str:
    written = [
        f"{CALL}function{_BETWEEN}{call['name']}\n```json\n{json.dumps(call['arguments'], ensure_ascii=False)}\n```"
        + _CALL_END
        for call in calls
    ]
    return _CALLS + "\n".join(written) + _CALLS_END


DEEPSEEK = ToolFormat("deepseek", {_CALLS: _all, CALL: _further, "<tool_call>": tagged}, _force, _write)
