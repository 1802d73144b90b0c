"""The lines of text that a conversation shows, as they stand in the files they come from.

Contract: bytes of a conversation go in, piece by piece; lines come out, and the places of a line. A line is the file's
own: a number before it (`    12→`, `12 | `, `12:` ..., if the lines around it are numbered on) is taken away, and text
inside JSON strings is decoded, since tool results and earlier calls show files that way. `ConversationLines` keeps two
lists of lines, each in the order of the conversation: the lines themselves, and those inside of strings. The module
knows nothing about tokens, nor which client wrote the text.

Memory: the text, and some 250 bytes for each line. Time: 1 us for a line, and 30 ns for a byte of strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

from rest_local.drafting.prediction import MAX_PLACES

KEY = 8  # bytes without indentation by which the places of a line are found

_NUMBERED = re.compile(rb"[ \t]*(\d{1,7})(\xe2\x86\x92|\t| \| ?|\| ?|: ?)")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE_MAY_BELONG = (b"| ", b": ")  # to the number or to the line


class Mark(NamedTuple):
    """How much is kept: lines of both lists, and the line that has begun."""

    lines: int
    strings: int
    rest: bytes


class Lines:
    """A list of lines that is searched by how a line begins. `ENDS`, a line end, stands between two texts."""

    ENDS = b"\n"

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.changed = bytearray()  # for each line: 1 if its number was taken away
        self._places: dict[bytes, list[int]] = {}
        self.forget_numbers()

    def __len__(self) -> int:
        return len(self.lines)

    def forget_numbers(self) -> None:
        """The next line is not numbered on from the last one."""
        self._number, self._sign = -1, b""
        self._plain: bytes | None = None  # the last line without its number, if it was kept with it

    def add(self, line: bytes) -> None:
        """Add a line, without its end."""
        match = _NUMBERED.match(line) if line[:1].isdigit() or line.lstrip()[:1].isdigit() else None
        if match is None:
            self._number = -1
            self._append(line)
            return
        number, sign = int(match[1]), match[2]
        begins = self._number + 1 != number or sign.strip(b" ") != self._sign.strip(b" ")
        if begins:
            plain = line[match.end() :]
            if sign in _SPACE_MAY_BELONG and (len(plain) - len(plain.lstrip(b" "))) % 2:
                sign, plain = sign.strip(b" "), b" " + plain
            self._sign, self._plain = sign, plain
            self._append(line)  # as it is, until a second one follows
        else:
            if self._plain is not None:
                self._pop()
                self._append(self._plain, 1)
                self._plain = None
            at = match.end(1)
            self._append(line[at + len(self._sign) :] if line.startswith(self._sign, at) else line[match.end() :], 1)
        self._number = number

    def _append(self, line: bytes, changed: int = 0) -> None:
        key = line.lstrip()
        if key:
            self._places.setdefault(key[:KEY], []).append(len(self.lines))
        self.lines.append(line)
        self.changed.append(changed)

    def _pop(self) -> None:
        key = self.lines.pop().lstrip()
        del self.changed[-1]
        if key:
            found = self._places[key[:KEY]]
            found.pop()
            if not found:
                del self._places[key[:KEY]]

    def truncate(self, length: int) -> None:
        """Drop all lines but the first `length`."""
        while len(self.lines) > length:
            self._pop()
        self.forget_numbers()

    def beginning_with(self, text: bytes) -> list[int]:
        """The newest places of lines that begin so, without indentation, in order. `text`: KEY bytes or more, or a
        whole line. 1 us, and 0.1 us for each line with the same KEY bytes.
        """
        lines = self.lines
        places = self._places.get(text[:KEY], ())[-8 * MAX_PLACES :]
        return [place for place in places if lines[place].lstrip().startswith(text)][-MAX_PLACES:]


class ConversationLines:
    """The lines of a conversation that grows."""

    def __init__(self) -> None:
        self.lines, self.strings = self.both = (Lines(), Lines())
        self.rest = b""  # the line that has begun

    @property
    def mark(self) -> Mark:
        """For `back_to`."""
        return Mark(len(self.lines), len(self.strings), self.rest)

    def back_to(self, mark: Mark) -> None:
        """Drop what was added since."""
        self.lines.truncate(mark.lines)
        self.strings.truncate(mark.strings)
        self.rest = mark.rest

    def add(self, text: bytes) -> None:
        """Add text."""
        *whole, self.rest = (self.rest + text).split(b"\n")
        for line in whole:
            self.lines.add(line)
            self._add_strings(line)

    def _add_strings(self, line: bytes) -> None:
        for text in strings_of(line):
            for each in text.split(b"\n"):
                self.strings.add(each)
            self.strings.add(Lines.ENDS)
            self.strings.forget_numbers()
            for each in text.split(b"\n"):
                self._add_strings(each)


def strings_of(line: bytes) -> Iterator[bytes]:
    """The JSON strings of several lines in a line, decoded."""
    if len(line) < KEY or b"\\n" not in line:
        return
    for match in _STRING.finditer(line):
        string = match[0]
        if len(string) >= KEY and b"\\n" in string:
            try:
                yield json.loads(string, strict=False).encode("utf-8", "replace")
            except ValueError:  # no JSON, or no UTF-8
                continue


class Place(NamedTuple):
    """A line that the answer may be writing. `run`: lines before it that the answer has written."""

    lines: Lines
    line: int
    run: int


class Reading:
    """One way to read what the answer writes, and where its lines were shown."""

    def __init__(self) -> None:
        self.line = bytearray()  # that is being written
        self.whole: list[bytes] = []  # the lines before it
        self.shown = 0  # lines that were shown
        self.repeats = False  # it repeats an earlier string
        self._is_new = False  # whether no shown line begins as this one
        self._runs: dict[tuple[int, int], int] = {}  # by list and place of the next line: lines before it that agree

    def fork(self) -> Reading:
        """An independent one in the same state."""
        other = copy(self)
        other.line, other.whole = self.line[:], self.whole[:]
        return other

    def end_line(self, shown: ConversationLines) -> bool:
        """The line is complete. Returns whether it was shown. 3 us, and 0.5 us for each place."""
        line = bytes(self.line)
        self.line.clear()
        self._is_new = False
        self.whole.append(line)
        found: dict[tuple[int, int], int] = {}
        for text in _unmarked(line.lstrip()):
            for (store, place), run in self._runs.items():
                if _at(shown.both[store], place, text, True):
                    found[store, place + 1] = run + 1
            if len(text) < KEY:
                continue
            for store, lines in enumerate(shown.both):
                for place in lines.beginning_with(text):
                    if _at(lines, place, text, True):
                        found.setdefault((store, place + 1), 1)
        if len(found) > MAX_PLACES:
            best = sorted(found, key=lambda place: (found[place], place[1]))[-MAX_PLACES:]
            found = {place: found[place] for place in best}
        self._runs = found
        self.shown += bool(found)
        return bool(found)

    def places(self, shown: ConversationLines) -> tuple[list[Place], bytes]:
        """Lines that the answer may be writing, and its beginning without indentation and mark. 2 us where there is
        none, once a line."""
        if self._is_new:
            return [], b""
        variants = _unmarked(bytes(self.line.lstrip()))
        for text in variants:
            found = [
                Place(shown.both[store], place, run)
                for (store, place), run in self._runs.items()
                if _at(shown.both[store], place, text, False)
            ]
            if not found and len(text) >= KEY:
                found = [Place(lines, place, 0) for lines in shown.both for place in lines.beginning_with(text)]
            if found:
                return found, text
        self._is_new = len(variants[-1]) >= KEY
        return [], b""


def _unmarked(key: bytes) -> tuple[bytes, ...]:
    """A line without indentation, and without the mark of a patch if it may have one."""
    return (key, key[1:].lstrip()) if key[:1] in (b"-", b"+") and len(key) > 1 else (key,)


def _at(lines: Lines, place: int, text: bytes, whole: bool) -> bool:
    """Whether the line at a place is `text`, or begins so, without indentation."""
    if place >= len(lines.lines) or lines.lines[place] == Lines.ENDS:
        return False
    key = lines.lines[place].lstrip()
    return key == text if whole else key.startswith(text)
