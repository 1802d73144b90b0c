"""Formats of calls whose arguments are JSON objects: Hermes, Llama 3, Mistral, DeepSeek."""
# ruff: noqa: RUF001 - the markers are DeepSeek's

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rest_local.chat.tools.format import (
    Force,
    Tool,
    ToolFormat,
    Wrapped,
    closed,
    json_call,
    json_calls,
    json_objects,
    repeated,
    write_list,
)
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.chat.tools.text_formats import function_opened, tagged
from rest_local.grammar.grammar import Lark

# `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4, SmolLM, and the default. The tags
# may also contain Qwen3-Coder's notation. Granite 3 and Phi 4 mark a list of such objects instead.


def _listed(source: Source) -> Wait[None]:
    yield from source.space()
    yield from json_calls(source)
    yield from closed(source, "<|/tool_call|>")


def _force_hermes(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    opening, closing = lark.literal("<tool_call>\n"), lark.literal("\n</tool_call>")
    return repeated(lark.add(f"{opening} {json_objects(lark, tools)} {closing}"), lark.literal("\n"), many)


def _force(before: str, rule: Callable[[Lark, Sequence[Tool]], str], between: str, after: str = "") -> Force:
    """Force calls by `rule` one after another, with these texts around and between them."""

    def force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        calls = repeated(rule(lark, tools), lark.literal(between) if between else "", many)
        parts = [lark.literal(before) if before else "", calls, lark.literal(after) if after else ""]
        return " ".join(filter(None, parts))

    return force


HERMES = ToolFormat("hermes", {"<tool_call>": tagged, "<function=": function_opened}, _force_hermes)
LISTED = ToolFormat(
    "listed",
    {"<|tool_call|>": _listed, "<tool_call>": tagged},
    lambda lark, tools, many: (
        f"{_force('<|tool_call|>[', json_objects, ', ', ']')(lark, tools, many)} ({lark.literal('<|/tool_call|>')})?"
    ),
    lambda calls: "<|tool_call|>" + write_list(calls),
)


# Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, with or without `<|python_tag|>` in front.
#
# Several calls have `;` or white space between them.


def _llama3_bare(source: Source) -> Wait[None]:
    """Read an answer that begins with a bracket. It is a call if a tool has that name, else text."""
    yield from source.space()
    yield from json_call(source, source.tools)
    yield from _llama3_more(source)


def _llama3_more(source: Source) -> Wait[None]:
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


def _llama3(source: Source) -> Wait[None]:
    yield from source.space()
    yield from json_call(source)
    yield from _llama3_more(source)


LLAMA3 = ToolFormat(
    "llama3",
    {"<|python_tag|>": _llama3, "<tool_call>": tagged},
    _force("", lambda lark, tools: json_objects(lark, tools, "parameters"), "; "),
    lambda calls: "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False) for call in calls
    ),
    bare=_llama3_bare,
)


# Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since 2025 `[TOOL_CALLS]name[ARGS]{...}`.

_MISTRAL = "[TOOL_CALLS]"


def _mistral(source: Source) -> Wait[None]:
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


_ARGS = Wrapped(_MISTRAL, "[ARGS]")
MISTRAL_LIST = ToolFormat(
    "mistral-list",
    {_MISTRAL: _mistral},
    _force(_MISTRAL + "[", json_objects, ", ", "]"),
    lambda calls: _MISTRAL + write_list(calls),
    id_characters=9,
)
MISTRAL = ToolFormat(
    "mistral",
    {_MISTRAL: _mistral},
    _force("", _ARGS.rule, ""),
    lambda calls: "".join(map(_ARGS.write, calls)),
    id_characters=9,
)


# DeepSeek: calls between markers of its own. R1 writes the arguments in a fenced block, V3.1 does not.

_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_BETWEEN = "<｜tool▁sep｜>"


def _deepseek(source: Source) -> Wait[None]:
    yield from source.space()
    yield from source.need(CALL)
    yield from _deepseek_calls(source)


def _deepseek_calls(source: Source) -> Wait[None]:
    """Read the text after the marker of a call, and further calls."""
    while True:
        yield from _deepseek_call(source)
        source.begin()
        yield from source.space()
        if not (yield from source.starts(CALL)):
            yield from source.starts(_DEEPSEEK_END)
            source.end()
            return


def _deepseek_call(source: Source) -> Wait[None]:
    name = yield from source.name()
    yield from source.need(_BETWEEN)
    yield from source.space()
    fenced = False
    if name == "function" and (yield from source.peek()) != "{":  # R1 writes the type of the tool first
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


_FENCED = Wrapped(f"{CALL}function{_BETWEEN}", "\n```json\n", f"\n```{_CALL_END}")


DEEPSEEK = ToolFormat(
    "deepseek",
    {_DEEPSEEK: _deepseek, CALL: _deepseek_calls, "<tool_call>": tagged},
    _force(_DEEPSEEK, _FENCED.rule, "\n", _DEEPSEEK_END),
    lambda calls: _DEEPSEEK + "\n".join(map(_FENCED.write, calls)) + _DEEPSEEK_END,
)
