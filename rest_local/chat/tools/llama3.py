"""Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, with or without `<|python_tag|>` in front.

Several calls have `;` or white space between them. Built-in tools are called by `name.call(argument="...")`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rest_local.chat.tools.format import Call, Tool, ToolFormat, json_call, json_objects, repeated
from rest_local.chat.tools.hermes import tagged
from rest_local.chat.tools.pythonic import python_calls
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark


def _bare(source: Source) -> Wait[None]:
    """An answer that begins with a bracket: a call if a tool has that name, else text."""
    yield from source.space()
    yield from json_call(source, source.tools)
    yield from _more(source)


def _more(source: Source) -> Wait[None]:
    while True:
        source.begin()
        yield from source.space()
        if (yield from source.starts(";")):
            yield from source.space()
        if (yield from source.peek()) != "{":
            source.rewind()
            return
        try:
            yield from json_call(source, source.tools)
        except Malformed:
            source.rewind()
            return


def _tagged(source: Source) -> Wait[None]:
    yield from source.space()
    if (yield from source.peek()) == "{":
        yield from json_call(source)
        yield from _more(source)
        return
    text: list[str] = []
    yield from source.until((), text.append)
    found = re.fullmatch(r"\s*(\w+)\.call(\(.*\))\s*", "".join(text), re.DOTALL)
    for name, arguments in python_calls(f"[{found[1]}{found[2]}]" if found else ""):
        source.start(name)
        source.arguments(json.dumps(arguments, ensure_ascii=False))


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    return repeated(json_objects(lark, tools, "parameters"), lark.literal("; "), many)


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False) for call in calls
    )


LLAMA3 = ToolFormat("llama3", {"<|python_tag|>": _tagged, "<tool_call>": tagged}, _force, _write, bare=_bare)
