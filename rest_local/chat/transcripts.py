"""The text that an assistant wrote in a conversation, tokenized as the model writes it.

Each turn is rendered twice with the model's own chat template: the messages before it with the generation prompt, and
the messages up to it. The model writes what only the second text has. In front of it stands the end of what the model
read, so that a search right after the header of the turn finds it.

A template spells special tokens as text. The same spelling in a message is no special token, so a character that no
text has is put into it while a template renders the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rest_local.chat.conversation import ChatTemplate, Message, common_beginning

BEFORE = 256  # characters of context in front of a turn; a search looks at 32 tokens

_GUARD, _ESCAPE = "\ue001", "\ue002"  # private-use characters; a text's own are escaped while it is rendered
_DEEPEST = 32  # nesting levels of a message's arguments


class TurnRenderer:
    """Renders the turns of an assistant. `special` has the spellings of the vocabulary's control tokens.

    A turn is a tuple of (text, True if spellings of special tokens in it are special tokens). Tokenize each part on its
    own. Parts end next to special tokens, where a tokenizer divides the text anyway.
    """

    def __init__(self, template: ChatTemplate, special: Sequence[str]) -> None:
        self._template = template
        longest_first = sorted({spelling for spelling in special if len(spelling) > 1}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, bool], ...]]:
        """Return the turns in order. Raises OptionError for an invalid message, TemplateFailed, ServiceClosed.

        Renders each turn with only the messages since the user's last one, so the time is linear in their number.
        """
        guarded = [{key: self._guarded_value(value, 0) for key, value in message.items()} for message in messages]
        return [self._turn(guarded[begin : end + 1]) for begin, end in _turns(guarded)]

    def _turn(self, messages: Sequence[Message]) -> tuple[tuple[str, bool], ...]:
        read = self._template.render(messages[:-1]) if len(messages) > 1 else ""
        whole = self._template.render(messages, add_generation_prompt=False)
        if not whole.startswith(read):  # some templates begin an answer with a thought, and drop it later
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
        """Return the text in parts, with the original spellings of messages."""
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
    """Yield, for each of the assistant's messages, the index of the message to begin with, and its own.

    A turn begins with the user's last message. Up to the user's second message, it begins with the very first message.
    """
    user, users = 0, 0
    for number, message in enumerate(messages):
        if message["role"] == "user":
            users += 1
            user = number if users > 1 else 0
        elif message["role"] in ("assistant", "model"):
            yield user, number


def _end_of(text: str) -> str:
    """Return about the last BEFORE characters, cut at white space, where most tokens begin."""
    if len(text) <= BEFORE:
        return text
    end = text[-BEFORE:]
    space = re.search(r"\s", end)
    return end[space.start() :] if space else end


def _joined(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighbours with special tokens, and remove empty parts."""
    joined: list[tuple[str, bool]] = []
    for text, special in parts:
        if joined and special and joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, True)
        elif text:
            joined.append((text, special))
    return joined
