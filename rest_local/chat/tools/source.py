"""An incremental reader of text that arrives in pieces. The readers of all formats use it.

Contract: a reader is a generator that yields when it needs more text. Each method decides only what no later text can
change, so the joined deltas do not depend on where the text was cut. Text read after `begin` is kept until a call
starts, so that a reader that gives up (`Malformed`) can be rewound.

The deltas are the parts of an answer, in the order in which they become certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning before the answer: `reasoning_content`."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call. Its arguments follow in fragments with the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas with neighbours of one kind joined and empty text removed."""
    whole: list[Delta] = []
    for delta in deltas:
        if not isinstance(delta, CallStart) and not delta.text:
            continue
        last = whole[-1] if whole else None
        if isinstance(delta, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.index == delta.index:
            whole[-1] = CallArguments(last.index, last.text + delta.text)
        else:
            whole.append(delta)
    return whole


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the deltas of an answer as one message in OpenAI's form. `content` is None if there are only calls."""
    deltas = list(deltas)
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls[delta.index] = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        elif isinstance(delta, CallArguments):
            calls[delta.index]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


_T = TypeVar("_T")
Wait = Generator[None, None, _T]
Reader = Callable[["Source"], Wait[None]]

_WORD = re.compile(r"[^\s\"'<>{}\[\](),:;=|]*")
_QUIET = re.compile(r'[^"\[\]{}]*')  # JSON outside of strings, up to a quote or bracket
_QUOTED = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")
LONGEST_NAME = 256


def encodable(text: str) -> str:
    """Return the text with a question mark for each lone surrogate, which an escape can spell."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class Malformed(Exception):
    """Raised for text that is not a call in this format."""


class Source:
    """The text so far, and its deltas. `tools` maps their names to parameters, `new_id` makes an id for a call."""

    def __init__(self, tools: dict[str, dict[str, object]], new_id: Callable[[], str]) -> None:
        self.tools = tools
        self.final = False
        self.cut = False  # True if something other than the model ended the text
        self.out: list[Delta] = []
        self.calls = 0
        self._new_id = new_id
        self._text = ""
        self._at = 0
        self._rewind_to: int | None = None
        self.stripped = ""

    def append(self, text: str) -> None:
        done = self._at if self._rewind_to is None else self._rewind_to
        self._text, self._at = self._text[done:] + text, self._at - done
        self._rewind_to = None if self._rewind_to is None else 0

    def begin(self) -> None:
        """Keep the text from here on, until a call starts."""
        self._rewind_to = self._at

    def rewind(self) -> bool:
        """Return to `begin`. Returns False if a call has started since, and what follows is text."""
        if self._rewind_to is None:
            return False
        self._at, self._rewind_to = self._rewind_to, None
        return True

    def end(self) -> None:
        """Stop keeping the text."""
        self._rewind_to = None

    def content(self, text: str) -> None:
        self.out.append(Content(text))

    def reasoning(self, text: str) -> None:
        self.out.append(Reasoning(text))

    def start(self, name: str, known: str = "") -> None:
        """Begin a call, which cannot be rewound. `known` is the id that the model gave it, if any."""
        self._rewind_to = None
        self.out.append(CallStart(self.calls, encodable(known) or self._new_id(), encodable(name)))
        self.calls += 1

    def arguments(self, text: str) -> None:
        self.out.append(CallArguments(self.calls - 1, encodable(text)))

    def rest(self) -> str:
        return self._text[self._at :]

    def unread(self, text: str) -> None:
        """Return to the place before `text`, which was read last."""
        self._at -= len(text)

    def peek(self) -> Wait[str]:
        """Return the next character without reading it, or "" at the end."""
        while self._at >= len(self._text) and not self.final:
            yield
        return self._text[self._at : self._at + 1]

    def starts(self, *options: str) -> Wait[str]:
        """Read the longest of these options that comes next, and return it, or "" for none."""
        longest = max(map(len, options))
        while True:
            ahead = self._text[self._at : self._at + longest]
            if self.final or not any(len(ahead) < len(option) and option.startswith(ahead) for option in options):
                found = max((option for option in options if ahead.startswith(option)), key=len, default="")
                self._at += len(found)
                return found
            yield

    def need(self, *options: str) -> Wait[str]:
        """Read an option as `starts` does. Raises Malformed for none."""
        found = yield from self.starts(*options)
        if not found:
            raise Malformed
        return found

    def matching(self, expression: re.Pattern[str], most: int = LONGEST_NAME) -> Wait[str]:
        """Read the longest match, at most `most` characters. The expression must match every prefix of its matches."""
        while True:
            found = expression.match(self._text, self._at)
            end = min(found.end() if found else self._at, self._at + most)
            if end < len(self._text) or end - self._at >= most or self.final:
                text, self._at = self._text[self._at : end], end
                return text
            yield

    def name(self) -> Wait[str]:
        """Read a function's name without quotes. Raises Malformed for none."""
        name = yield from self.matching(_WORD)
        if not name:
            raise Malformed
        return name

    def space(self) -> Wait[str]:
        return (yield from self.matching(re.compile(r"\s*"), 1 << 30))

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None], strip: bool = False) -> Wait[str]:
        """Emit text as it arrives, up to the first marker. Read and return the marker, or "" at the end.

        With `strip`, white space before the marker or at the end is not emitted but stored in `stripped`.
        """
        self.stripped = ""
        while True:
            place, marker = self._first(markers)
            undecided = 0 if self.final else max(map(self._overlap, markers), default=0)
            end = place if marker else len(self._text) - undecided
            solid = self._at + len(self._text[self._at : end].rstrip()) if strip else end
            emit(self._text[self._at : solid])
            if marker or self.final:
                self.stripped = self._text[solid:end]
                self._at = end + len(marker)
                return marker
            self._at = solid
            yield

    def _first(self, markers: tuple[str, ...]) -> tuple[int, str]:
        """Return place and text of the first marker. No marker is a prefix of another."""
        found = [(place, marker) for marker in markers if (place := self._text.find(marker, self._at)) >= 0]
        return min(found, default=(0, ""))

    def _overlap(self, marker: str) -> int:
        """Return the length of the marker's longest prefix that ends the text."""
        longest = min(len(marker) - 1, len(self._text) - self._at)
        return next((n for n in range(longest, 0, -1) if self._text.endswith(marker[:n])), 0)

    def string(self) -> Wait[str]:
        """Read a JSON string and return it decoded. Raises Malformed for anything else."""
        raw: list[str] = []
        if (yield from self.peek()) != '"':
            raise Malformed
        if not (yield from self.value(raw.append)):
            raise Malformed
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise Malformed from None

    def value(self, emit: Callable[[str], None]) -> Wait[bool]:
        """Emit the text of a JSON value as it arrives. Only strings and brackets are followed, nothing else is checked.

        Returns False if the text ends inside the value. Raises Malformed if no value begins here.
        """
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            scalar = yield from self.matching(_SCALAR)
            if not scalar:
                raise Malformed
            emit(scalar)
            return True
        depth, quoted = 0, False
        while True:
            begin, done = self._at, False
            while self._at < len(self._text) and not done:
                found = (_QUOTED if quoted else _QUIET).match(self._text, self._at)
                self._at = found.end() if found else self._at
                character = self._text[self._at : self._at + 1]
                if character == "\\":
                    if self._at + 1 >= len(self._text) and not self.final:
                        break  # the next piece has the escaped character
                    self._at += 2
                    continue
                if character == '"':
                    quoted = not quoted
                elif character and character in "[{":
                    depth += 1
                elif character:
                    depth -= 1
                self._at += len(character)
                done = bool(character) and not quoted and depth <= 0
            self._at = min(self._at, len(self._text))
            emit(self._text[begin : self._at])
            if done or self.final:
                return done
            yield
