"""What an assistant wrote in a conversation, in the tokens in which the model writes it.

Each turn is rendered twice with the model's own chat template: the messages before it with the generation prompt, and
the messages up to it. What the second text has in addition is what the model writes. In front of it stands the end of
what the model read, so that a search right after the header of the turn finds it.

A template writes special tokens by their spelling. Text of a message that has such a spelling is no special token. So
while a template renders it, a character that no text has stands in the spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rest_local.chat.conversation import ChatTemplate, Message, common_beginning

BEFORE = 256  # characters of what was read that stand in front of a turn; a search looks at 32 tokens

_GUARD, _ESCAPE = "\ue001", "\ue002"  # private-use characters; a text's own are escaped while it is rendered
_DEEPEST = 32  # levels of a message's arguments


class TurnRenderer:
    """Renders the turns of an assistant. template: the model's; special: spellings of the vocabulary's control tokens.

    A turn is a tuple of (text, whether spellings of special tokens in it are special tokens). Each part is to be
    tokenized on its own. Parts end next to special tokens, where a tokenizer divides the text anyway.
    """

    def __init__(self, template: ChatTemplate, special: Sequence[str]) -> None:
        self._template = template
        longest_first = sorted({spelling for spelling in special if len(spelling) > 1}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, bool], ...]]:
        """The turns in order. Raises OptionError for an invalid message, TemplateFailed, ServiceClosed.

        Renders each turn with the messages since the last one of a user alone, so the time is linear in their number.
        """
        guarded = [{key: self._guarded_value(value, 0) for key, value in message.items()} for message in messages]
        return [self._turn(guarded[begin : end + 1]) for begin, end in _turns(guarded)]

    def _turn(self, messages: Sequence[Message]) -> tuple[tuple[str, bool], ...]:
        read = self._template.render(messages[:-1]) if len(messages) > 1 else ""
        whole = self._template.render(messages, add_generation_prompt=False)
        if not whole.startswith(read):  # such as templates that begin an answer with a thought, and drop it later
            read = common_beginning(read, whole)
        written = whole[len(read) :]
        ends = [found.end() for found in self._special.finditer(written)]
        if ends and not written[ends[-1] :].strip():
            written = written[: ends[-1]]  # the model stops there; line feeds between turns are the template's
        return self._parts(_end_of(read) + written)

    def _guarded_value(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            text = value.replace(_ESCAPE, f"{_ESCAPE}b").replace(_GUARD, f"{_ESCAPE}a")
            return self._special.sub(lambda found: found[0][0] + _GUARD + found[0][1:], text)
        if isinstance(value, list) and depth < _DEEPEST:
            return [self._guarded_value(item, depth + 1) for item in value]
        if isinstance(value, dict) and depth < _DEEPEST:
            return {key: self._guarded_value(item, depth + 1) for key, item in value.items()}
        return value

    def _parts(self, text: str) -> tuple[tuple[str, bool], ...]:
        """The text in parts, with the spellings of messages as they were."""
        parts: list[tuple[str, bool]] = []
        begin = 0
        for found in self._special.finditer(text):
            parts += [(text[begin : found.start()], _GUARD not in text[begin : found.start()]), (found[0], True)]
            begin = found.end()
        parts.append((text[begin:], _GUARD not in text[begin:]))
        plain = [
            (part.replace(_GUARD, "").replace(f"{_ESCAPE}a", _GUARD).replace(f"{_ESCAPE}b", _ESCAPE), special)
            for part, special in parts
        ]
        return tuple(_joined(plain))


def _turns(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """For each message of the assistant the number of the message to begin with, and its own: from the last message of
    a user on, up to the second one from the very first message on.
    """
    user, users = 0, 0
    for number, message in enumerate(messages):
        if message["role"] == "user":
            users += 1
            user = number if users > 1 else 0
        elif message["role"] in ("assistant", "model"):
            yield user, number


def _end_of(text: str) -> str:
    """The last BEFORE characters, or a little less: cut at white space, where most tokens begin."""
    if len(text) <= BEFORE:
        return text
    end = text[-BEFORE:]
    space = re.search(r"\s", end)
    return end[space.start() :] if space else end


def _joined(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours with special tokens as one part, and no empty part."""
    joined: list[tuple[str, bool]] = []
    for text, special in parts:
        if joined and special and joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, True)
        elif text:
            joined.append((text, special))
    return joined
