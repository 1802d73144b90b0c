"""Split a model's answer into text, reasoning and calls as it arrives, and force requested forms with grammars.

    form = AnswerFormat.of(template)
    grammar = form.forced(tools, choice, prompt)         # None if the answer is not constrained
    parser = form.parser(tools, prompt)
    for piece in stream: deltas = parser.feed(piece.text)
    deltas = parser.finish()

Contract:

- Nothing of an answer is lost, except a call that is cut off before its arguments begin.
- Everything but a call in the model's format is text, to the character.
- A call that is cut off after its arguments began stays incomplete.
- The joined deltas do not depend on where the text was cut.
- Reasoning is recognized at the beginning of an answer only, so that text about tags stays text. White space around it
  is dropped. Reasoning that is never closed is the whole answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rest_local.chat.tools.format import Tool, ToolFormat
from rest_local.chat.tools.json_formats import CALL, DEEPSEEK, HERMES, LISTED, LLAMA3, MISTRAL, MISTRAL_LIST
from rest_local.chat.tools.source import CallArguments, CallStart, Content, Delta, Malformed, Source, Wait, joined
from rest_local.chat.tools.text_formats import FINAL, GEMMA, HARMONY, PYTHONIC, QWEN, final
from rest_local.errors import OptionError
from rest_local.grammar import Grammar
from rest_local.grammar.grammar import Lark, Special, no_special

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

# A template must contain all of a format's texts. The first format that fits is taken.
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
    """Return the format of a model with this template, or Hermes' if the template mentions none."""
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), HERMES)


_REASONING_TAGS = (("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"), ("<think>", "</think>"))


@dataclass(frozen=True)
class ReasoningTags:
    """The texts around reasoning. `opened`: the prompt ends inside it. `usual`: the model reasons by default."""

    opening: str
    closing: str
    opened: bool
    usual: bool

    @staticmethod
    def of(template: str, prompt: str) -> ReasoningTags:
        """Find the tags in the template's text and the end of the rendered prompt."""
        pairs = ((o, c) for o, c in _REASONING_TAGS if o in template or c in template)
        opening, closing = next(pairs, _REASONING_TAGS[-1])
        end = prompt.rstrip()
        mentioned = opening in template or closing in template
        return ReasoningTags(opening, closing, end.endswith(opening), mentioned and not end.endswith(closing))

    def read(self, source: Source) -> Wait[None]:
        """Read the reasoning at the beginning of an answer, if there is any."""
        if not self.opened:
            source.begin()
            yield from source.space()
            if not (yield from source.starts(self.opening)):
                source.rewind()
                return
            source.end()
        yield from source.space()
        yield from source.until((self.closing,), source.reasoning, strip=True)
        yield from source.space()

    def before(self, lark: Lark, body: str) -> str:
        """Put reasoning of any length before a grammar's body: required if the prompt opened it, else optional."""
        if not self.opened and not self.usual:
            return body
        thought = f"{lark.until(self.closing)} /\\n{{0,2}}/"
        return f"{thought} {body}" if self.opened else f"({lark.literal(self.opening)} {thought})? {body}"


@dataclass(frozen=True)
class AnswerFormat:
    """The format of answers with one template. `special` maps the texts of special tokens to ids."""

    template: str
    format: ToolFormat
    special: Special = no_special

    @staticmethod
    def of(template: str, special: Special = no_special) -> AnswerFormat:
        return AnswerFormat(template, format_of(template), special)

    def parser(
        self, tools: Sequence[Tool], prompt: str, *, forced: bool = False, new_id: Callable[[], str] | None = None
    ) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            tools: what may be called. Without any, markers of calls are text.
            prompt: the rendered prompt, whose end shows if the answer begins inside reasoning
            forced: the answer is a call
            new_id: makes the ids of the calls; by default random ones that the template accepts
        """
        offered = {tool.name: dict(tool.parameters) for tool in tools}
        tags = ReasoningTags.of(self.template, prompt)
        return AnswerParser(self.format, offered, tags, new_id or self._new_id, forced)

    def opening(self, prompt: str) -> str:
        """Return the text that must stand between a rendered prompt and text that begins the answer.

        It ends reasoning that the prompt opened, or is the header of a message. A parser has to be fed with it first.
        """
        if self.format is HARMONY:
            return FINAL
        tags = ReasoningTags.of(self.template, prompt)
        return f"{tags.closing}\n\n" if tags.opened else ""

    def forced(self, tools: Sequence[Tool], choice: Any, prompt: str, *, parallel: bool = True) -> Grammar | None:
        """Return the grammar that forces calls. Reasoning may come first if the model reasons.

        Args:
            tools: what may be called
            choice: OpenAI's `tool_choice`: "required" forces one call, an object that of the function that it names
            prompt: the rendered prompt
            parallel: "required" forces one call or more

        Returns:
            A grammar, or None for "auto" and "none".

        Raises:
            OptionError: the choice is unknown, or a strict schema cannot be enforced
        """
        offered = _chosen(tools, choice)
        if not offered:
            return None
        lark = Lark(self.special)
        many = parallel and choice == "required" and self.format.whole is None
        body = self.format.force(lark, offered, many)
        return lark.grammar(self._after_reasoning(lark, body, prompt))

    def schema(self, schema: Mapping[str, Any] | bool | None, prompt: str) -> Grammar:
        """Return the grammar for `response_format`: this JSON schema, or any object for None.

        Raises:
            OptionError: the schema cannot be enforced
        """
        lark = Lark(self.special)
        body = lark.json({"type": "object"} if schema is None else schema, strict="response_format")
        if self.format is HARMONY:
            return lark.grammar(final(lark, body))
        return lark.grammar(self._after_reasoning(lark, body, prompt))

    def _after_reasoning(self, lark: Lark, body: str, prompt: str) -> str:
        return body if self.format.whole else ReasoningTags.of(self.template, prompt).before(lark, body)

    def _new_id(self) -> str:
        length = self.format.id_characters
        if length:
            return "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"


def _chosen(tools: Sequence[Tool], choice: Any) -> Sequence[Tool]:
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


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # a JSON string that may lack its end


class AnswerParser:
    """The parser of one answer: `feed` it the text as it arrives, then `finish`."""

    def __init__(
        self,
        form: ToolFormat,
        tools: dict[str, dict[str, object]],
        tags: ReasoningTags,
        new_id: Callable[[], str],
        forced: bool,
    ) -> None:
        self._format = form
        self._tags = tags
        self._forced = forced
        self._source = Source(tools, new_id)
        self._last_arguments: list[str] = []
        self._reading = self._read()

    @property
    def calls(self) -> int:
        return self._source.calls

    @property
    def unfinished(self) -> bool:
        """Return True if the answer has ended inside the arguments of its last call."""
        text = "".join(self._last_arguments)
        outside = _STRING.sub("", text)
        is_open = outside.count("{") + outside.count("[") > outside.count("}") + outside.count("]")
        return self.calls > 0 and (is_open or (self._source.cut and not text))

    @property
    def called(self) -> bool:
        """Return True if the client has to run calls, so that `finish_reason` is `tool_calls`."""
        return self.calls > 0 and not self.unfinished

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that no later text can change."""
        self._source.append(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Return the text that was held back, at the end of the answer.

        Args:
            cut: something other than the model ended the answer. After a call, or if a call is forced, the text held
                back is then the beginning of a call, and is dropped: a client would show it as text.
        """
        only_calls = cut and (self._forced or self.calls > 0)
        self._source.final, self._source.cut = True, cut
        deltas = self._advance()
        return [delta for delta in deltas if not isinstance(delta, Content)] if only_calls else deltas

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        out, self._source.out = joined(self._source.out), []
        for delta in out:
            if isinstance(delta, CallStart):
                self._last_arguments = []
            elif isinstance(delta, CallArguments):
                self._last_arguments.append(delta.text)
        return out

    def _read(self) -> Wait[None]:
        source, form = self._source, self._format
        if form.whole:
            yield from form.whole(source)
            return
        yield from self._tags.read(source)
        if not source.tools:
            yield from source.until((), source.content)
            return
        if form.bare:
            source.begin()
            with suppress(Malformed):
                yield from form.bare(source)
            source.rewind()
        while (yield from self._text_and_call()):
            pass

    def _text_and_call(self) -> Wait[bool]:
        """Read text up to a call, and the call, without the white space around calls. Return False at the end."""
        source, before = self._source, self._source.calls
        opening = yield from source.until(tuple(self._format.readers), source.content, strip=True)
        space = source.stripped
        if not opening:
            if not before:
                source.content(space)
            return False
        source.begin()
        with suppress(Malformed):
            yield from self._format.readers[opening](source)
        if source.rewind() and source.cut:
            return False  # the answer ends with the beginning of a call
        if source.calls == before:
            source.content(space + opening)
        return True
