"""gpt-oss (harmony): an answer is a sequence of messages, each in a channel, some addressed to a tool.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json
    <|message|>{...}<|call|>

Analysis is reasoning, final is the answer, commentary to a function is a call, other commentary is text. The prompt
ends with `<|start|>assistant`. The end marker of the last message may be missing, because it ends the generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rest_local.chat.tools.format import Call, Tool, ToolFormat
from rest_local.chat.tools.source import Source, Wait
from rest_local.grammar.grammar import Lark

_MESSAGE = "<|message|>"
FINAL = f"<|channel|>final{_MESSAGE}"  # the header of the answer
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS)
_LONGEST_HEADER = 400
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def messages(source: Source) -> Wait[None]:
    """Reads the whole answer."""
    while (yield from source.peek()):
        header = yield from _header(source)
        if header is None:  # not a message: all of it is text
            end = yield from source.until(_ENDS, source.content)
            if end in _BEGINS:
                source.unread(end)
            continue
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        emit = source.content
        if recipient and recipient[1] != "assistant":
            source.start(recipient[1])
            emit = source.arguments
            yield from source.space()
            if (yield from source.peek()) == "{":  # a string inside may contain markers
                yield from source.value(emit)
        elif channel and channel[1] == "analysis":
            emit = source.reasoning
        end = yield from source.until(_ENDS, emit)
        if end in _BEGINS:  # the end marker before it is missing
            source.unread(end)


def _header(source: Source) -> Wait[str | None]:
    """The text before the next `<|message|>`; None if no header begins here or it does not end."""
    source.begin()
    yield from source.space()
    begun = yield from source.starts("<|start|>assistant", "<|channel|>", "assistant<|channel|>", "to=")
    if begun:
        header: list[str] = [begun]
        while len("".join(header)) < _LONGEST_HEADER:
            step = yield from source.starts(_MESSAGE)
            if step:
                source.end()
                return "".join(header)
            character = yield from source.peek()
            if not character:
                break
            header.append((yield from source.matching(re.compile(r"<?[^<]*"), _LONGEST_HEADER)))
    source.rewind()
    # Consume the first marker, or half of one ("<|start|>assi"): it would end the text at once, again and again.
    source.content((yield from source.space()) + (yield from source.starts(*_BEGINS)))
    return None


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """One call, because the format has no more; reasoning may come first, in its own channel."""
    headers = [lark.literal(f"<|channel|>commentary to=functions.{t.name} <|constrain|>json{_MESSAGE}") for t in tools]
    calls = [f"{header} {tool.arguments(lark)}" for header, tool in zip(headers, tools, strict=True)]
    return f"{after_analysis(lark)} {lark.one_of(calls)}"


def after_analysis(lark: Lark) -> str:
    """Optional reasoning at the beginning."""
    opening = lark.literal(f"<|channel|>analysis{_MESSAGE}")
    return f"({opening} {lark.until('<|end|>')} {lark.literal('<|start|>assistant')})?"


def final(lark: Lark, body: str) -> str:
    """A constrained answer in its channel."""
    return f"{after_analysis(lark)} {lark.literal(FINAL)} {body}"


def _write(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json{_MESSAGE}"
        + json.dumps(call["arguments"], ensure_ascii=False)
        + "<|call|>"
        for call in calls
    )


HARMONY = ToolFormat("harmony", {}, _force, _write, whole=messages)
