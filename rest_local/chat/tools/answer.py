"""A model's answers: text, reasoning and calls told apart as they come, and grammars that force what was asked for.

    form = AnswerFormat.of(template)
    grammar = form.forced(tools, choice, prompt)         # None where the model may say what it likes
    parser = form.parser(tools, prompt)
    for piece in stream: deltas = parser.feed(piece.text)
    deltas = parser.finish()

Contract: nothing a model says is lost, but for a call cut off by a limit before its arguments began. What is not a call
in the model's format is text, to the character; a call that breaks off after its arguments began stays broken off. The
deltas, joined, do not depend on where the text was cut.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rest_local.chat.reasoning import Tags, after_thoughts, tags_of, thoughts
from rest_local.chat.tools.deepseek import CALL, DEEPSEEK
from rest_local.chat.tools.deltas import Content, Delta, joined
from rest_local.chat.tools.format import Tool, ToolFormat, tools_of
from rest_local.chat.tools.gemma import GEMMA
from rest_local.chat.tools.harmony import HARMONY, final
from rest_local.chat.tools.hermes import HERMES, LISTED
from rest_local.chat.tools.llama3 import LLAMA3
from rest_local.chat.tools.mistral import MISTRAL, MISTRAL_LIST
from rest_local.chat.tools.pythonic import PYTHONIC
from rest_local.chat.tools.qwen import QWEN
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.errors import OptionError
from rest_local.grammar import Grammar
from rest_local.grammar.builder import Lark, Special, no_special

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

# What a template has to mention, all of it, for each format; the first that fits.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    ((CALL,), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|tool_call>call:",), GEMMA),
    (("<function=",), QWEN),
    (("<|tool_call_start|>",), PYTHONIC),
    (("List of tools: [", "<|im_start|>"), PYTHONIC),
    (("<|tool_call|>",), LISTED),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
)


def format_of(template: str) -> ToolFormat:
    """How a model with this template calls tools. What names no way is told one: that of Hermes."""
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), HERMES)


@dataclass(frozen=True)
class AnswerFormat:
    """Of one template. `special`: the model's special tokens by their text."""

    template: str
    format: ToolFormat
    special: Special = no_special

    @staticmethod
    def of(template: str, special: Special = no_special) -> AnswerFormat:
        return AnswerFormat(template, format_of(template), special)

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: str,
        *,
        new_id: Callable[[], str] | None = None,
    ) -> AnswerParser:
        """`tools`: none where the model was offered none, or must not call any: then marks of calls are text.
        `prompt`: as rendered; its end tells whether the answer begins with reasoning. Raises OptionError."""
        offered = {tool.name: dict(tool.parameters) for tool in tools_of(tools or ())}
        return AnswerParser(self.format, offered, tags_of(self.template, prompt), new_id or self._new_id)

    def forced(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, prompt: str, *, parallel: bool = True
    ) -> Grammar | None:
        """The grammar for `tool_choice`: at least one call for "required", that of a function for an object that names
        it, None for "auto" and "none". `parallel`: several calls are allowed. Reasoning may come first where the model
        is one that reasons. Raises OptionError: a choice that is none, or a strict schema that cannot be kept."""
        offered = _chosen(tools_of(tools), choice)
        if not offered:
            return None
        lark = Lark(self.special)
        many = parallel and choice == "required" and self.format.whole is None
        body = self.format.force(lark, offered, many)
        return lark.grammar(self._after_reasoning(lark, body, prompt))

    def schema(self, schema: Mapping[str, Any] | bool | None, prompt: str) -> Grammar:
        """The grammar of `response_format`: this JSON schema, None for any object. Raises OptionError."""
        lark = Lark(self.special)
        body = lark.json({"type": "object"} if schema is None else schema, strict="response_format")
        if self.format is HARMONY:
            return lark.grammar(final(lark, body))
        return lark.grammar(self._after_reasoning(lark, body, prompt))

    def _after_reasoning(self, lark: Lark, body: str, prompt: str) -> str:
        return body if self.format.whole else after_thoughts(lark, body, tags_of(self.template, prompt))

    def _new_id(self) -> str:
        length = self.format.id_characters
        if length:
            return "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"


def _chosen(tools: list[Tool], choice: Any) -> list[Tool]:
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise OptionError("tool_choice required: no tools were given")
        return tools
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    chosen = [tool for tool in tools if tool.name == name]
    if not chosen:
        known = ", ".join(tool.name for tool in tools)[:200] or "none"
        raise OptionError(f"tool_choice: give none, auto, required or a function of the tools ({known})")
    return chosen[:1]


class AnswerParser:
    """One answer. `feed` text as it comes, `finish` at its end."""

    def __init__(
        self, form: ToolFormat, tools: dict[str, dict[str, object]], tags: Tags, new_id: Callable[[], str]
    ) -> None:
        self._format = form
        self._tags = tags
        self._source = Source(tools, new_id)
        self._reading = self._read()

    @property
    def calls(self) -> int:
        """Calls begun so far: finish_reason is tool_calls where there is one."""
        return self._source.calls

    def feed(self, text: str) -> list[Delta]:
        """What has become certain."""
        self._source.append(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back: there is no more. `cut`: the model would have gone on. Behind a call, what was held back
        is then the beginning of another, and is left out: as text it would stand beside the calls."""
        called = self._source.calls > 0
        self._source.final = True
        deltas = self._advance()
        return [delta for delta in deltas if not isinstance(delta, Content)] if cut and called else deltas

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        out, self._source.out = self._source.out, []
        return joined(out)

    def _read(self) -> Wait[None]:
        source, form = self._source, self._format
        if form.whole:
            yield from form.whole(source)
            return
        yield from thoughts(source, self._tags)
        if not source.tools:
            yield from source.until((), source.content)
            return
        if form.bare:
            source.begin()
            with suppress(Malformed):  # text, then: read again as such
                yield from form.bare(source)
            source.rewind()
        while (yield from self._text_and_call()):
            pass

    def _text_and_call(self) -> Wait[bool]:
        """Text up to a call, and the call; False at the end. White space between text and call, between calls and
        behind the last is dropped."""
        source, before = self._source, self._source.calls
        opening = yield from source.until(self._format.markers, source.content, strip=True)
        space = source.stripped
        if not opening:
            if not before:
                source.content(space)
            return False
        source.begin()
        with suppress(Malformed):  # no call, or no more of it: what follows is read as text
            yield from self._format.readers[opening](source)
        source.rewind()
        if source.calls == before:
            source.content(space + opening)
        return True
