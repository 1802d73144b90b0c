"""Read a conversation and an answer as lines of the files that they show and write.

Bytes go in, piece by piece; lines come out, and the places of a line. A line is the file's own: a number before it
(`    12→`, `12 | `, `12:` ..., if the lines around it are numbered on) is taken away, and text inside JSON strings is
decoded, since tool results and earlier calls show files that way. `ConversationLines` keeps two lists of lines, each in
the order of the conversation: the lines themselves, and those inside of strings. `Writing` reads the line that the
answer is writing in the same two ways. The module knows no tokens, nor which client wrote the text.

It keeps the text, and some 250 bytes for each line. It takes 1 us for a line, and 30 ns for a byte of strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from copy import copy
from typing import NamedTuple

from rest_local.drafting.prediction import MAX_PLACES

KEY = 8  # Bytes without indentation by which the places of a line are found.
MOST_BETWEEN = 64  # Bytes between two values, and of the name of a value.

_NUMBERED = re.compile(rb"[ \t]*(\d{1,7})(\xe2\x86\x92|\t| \| ?|\| ?|: ?)")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE_MAY_BELONG = (b"| ", b": ")  # The space after these may belong to the line.
_NEXT_VALUE = re.compile(rb'"\s*,\s*(?:"[^"\\]{1,40}"\s*:|\w{1,40}=)\s*"')
_REST = re.compile(rb".*", re.DOTALL)
_SPECIAL = re.compile(rb'[\n"\\]')
_ESCAPES = dict(zip(b"ntrbf", b"\n\t\r\b\f", strict=True))
_LINE_END, _QUOTE, _BACKSLASH, _N = b'\n"\\n'
_BEFORE_VALUE, _SPACE = b":=", b" \t"


class Mark(NamedTuple):
    """The amount that is kept: tokens, lines of both lists, and the line that has begun."""

    length: int
    lines: int
    strings: int
    unfinished: bytes


class Lines:
    """A list of lines that is searched by how a line begins. `ENDS`, a line end, stands between two texts."""

    ENDS = b"\n"

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.changed = bytearray()  # For each line 1 if its number was taken away.
        self._places: dict[bytes, list[int]] = {}
        self.forget_numbers()

    def __len__(self) -> int:
        return len(self.lines)

    def forget_numbers(self) -> None:
        """Take the next line as not numbered on from the last one."""
        self._number, self._sign = -1, b""
        self._plain: bytes | None = None  # The last line without its number, if it was kept with it.

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
            self._append(line)  # As it is, until a second one follows.
        else:
            if self._plain is not None:
                self._pop()
                self._append(self._plain, 1)
                self._plain = None
            at = match.end(1)
            self._append(line[at + len(self._sign) :] if line.startswith(self._sign, at) else line[match.end() :], 1)
        self._number = number

    def _append(self, line: bytes, changed: int = 0) -> None:
        """Keep a line."""
        key = line.lstrip()
        if key:
            self._places.setdefault(key[:KEY], []).append(len(self.lines))
        self.lines.append(line)
        self.changed.append(changed)

    def _pop(self) -> None:
        """Drop the last line."""
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
        """Return the newest places of lines that begin so, without indentation, in order.

        `text` has KEY bytes or more, or is a whole line. It takes 1 us, and 0.1 us for each line with the same KEY
        bytes.
        """
        lines = self.lines
        places = self._places.get(text[:KEY], ())[-8 * MAX_PLACES :]
        return [place for place in places if lines[place].lstrip().startswith(text)][-MAX_PLACES:]


class ConversationLines:
    """The lines of a conversation that grows."""

    def __init__(self) -> None:
        self.lines, self.strings = self.both = (Lines(), Lines())
        self.unfinished = b""  # The line that has begun.
        self._marks = [Mark(0, 0, 0, b"")]  # Where it can be cut back to.

    def cut(self, length: int) -> int:
        """Drop what was added beyond `length` tokens or fewer. Returns how many tokens are left."""
        while self._marks[-1].length > length:
            self._marks.pop()
        mark = self._marks[-1]
        self.lines.truncate(mark.lines)
        self.strings.truncate(mark.strings)
        self.unfinished = mark.unfinished
        return mark.length

    def add(self, text: bytes, length: int) -> None:
        """Add text, which is `length` tokens long."""
        *whole, self.unfinished = (self.unfinished + text).split(b"\n")
        for line in whole:
            self.lines.add(line)
            self._add_strings(line)
        mark = Mark(self._marks[-1].length + length, len(self.lines), len(self.strings), self.unfinished)
        self._marks.append(mark)

    def _add_strings(self, line: bytes) -> None:
        """Keep the lines of the strings in a line, and of strings inside those."""
        for text in strings_of(line):
            for each in text.split(b"\n"):
                self.strings.add(each)
            self.strings.add(Lines.ENDS)
            self.strings.forget_numbers()
            for each in text.split(b"\n"):
                self._add_strings(each)


def strings_of(line: bytes) -> Iterator[bytes]:
    """Yield the JSON strings of several lines in a line, decoded."""
    if len(line) < KEY or b"\\n" not in line:
        return
    for match in _STRING.finditer(line):
        string = match[0]
        if len(string) >= KEY and b"\\n" in string:
            try:
                yield json.loads(string, strict=False).encode("utf-8", "replace")
            except ValueError:  # It is no JSON, or no UTF-8.
                continue


class Place(NamedTuple):
    """A line that the answer may be writing, after `run` lines before it that the answer has written."""

    lines: Lines
    line: int
    run: int


class Reading:
    """One way to read what the answer writes, and where its lines were shown."""

    def __init__(self) -> None:
        self.line = bytearray()  # The line that is being written.
        self.whole: list[bytes] = []  # The lines before it.
        self.shown = 0  # How many of them were shown.
        self.repeats = False  # It repeats an earlier string.
        self._is_new = False  # No shown line begins as this one.
        self._runs: dict[tuple[int, int], int] = {}  # How many lines agree before a list and place of the next line.

    def fork(self) -> Reading:
        """Make an independent one in the same state."""
        other = copy(self)
        other.line, other.whole = self.line[:], self.whole[:]
        return other

    def end_line(self, shown: ConversationLines) -> bool:
        """End the line. Returns True if it was shown. It takes 3 us, and 0.5 us for each place."""
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
        """Return lines that the answer may be writing, and its beginning without indentation and mark.

        It takes 2 us where there is none, once a line.
        """
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


class Writing:
    """The newest line of an answer: as it stands, and decoded if it is inside a JSON string."""

    def __init__(self) -> None:
        self.raw, self.string = Reading(), Reading()
        self.in_string = self.is_value = False
        self.closed = 0  # Bytes of the line up to the end of the newest string.
        self._escaped = False
        self._head = b""  # What stands before the newest value: `"old_string": "`.
        self._before = 0  # The last byte outside of strings that is not white space.
        self._lines = Lines()  # Lines of the answer; forks share them.
        self._newest: list[bytes] = []  # Lines that are not in `_lines` yet.

    def fork(self) -> Writing:
        """Make an independent one in the same state, except for lines that are kept. Call `keep_lines` before."""
        other = copy(self)
        other.raw, other.string, other._newest = self.raw.fork(), self.string.fork(), []
        return other

    def keep_lines(self) -> None:
        """Put the newest lines where earlier calls are looked for."""
        for line in self._newest:
            self._lines.add(line)
        self._newest = []

    def feed(self, piece: bytes) -> Iterable[Reading | None]:
        """Read the next bytes. Yields each reading whose line is complete, for the caller to end it, and None where a
        string ends.
        """
        if self._escaped or _SPECIAL.search(piece):
            return self._feed_bytes(piece)
        self.raw.line += piece
        if self.in_string:
            self.string.line += piece
        elif text := piece.rstrip(_SPACE):
            self._before = text[-1]
        return ()

    def _feed_bytes(self, piece: bytes) -> Iterator[Reading | None]:
        """Read the next bytes one by one."""
        raw = self.raw
        for byte in piece:
            if byte == _LINE_END:
                line = bytes(raw.line)
                yield raw
                self._newest.append(line)
                self.in_string, self.closed = False, 0
                continue
            raw.line.append(byte)
            if not self.in_string:
                if byte == _QUOTE:
                    self._open_string()
                elif byte not in _SPACE:
                    self._before = byte
            elif self._escaped:
                self._escaped = False
                if byte == _N:
                    yield self.string
                else:
                    self.string.line.append(_ESCAPES.get(byte, byte))
            elif byte == _BACKSLASH:
                self._escaped = True
            elif byte == _QUOTE:
                self.in_string, self._before, self.closed = False, _QUOTE, len(raw.line)
                yield None
            else:
                self.string.line.append(byte)

    def _open_string(self) -> None:
        """Begin to read a string, and note what stands before it."""
        line = self.raw.line
        self.in_string, self._escaped, self.string = True, False, Reading()
        self.is_value = bool(self._before) and self._before in _BEFORE_VALUE
        if self.is_value:
            begin = max(line.rfind(sign, 0, len(line) - 1) for sign in (b",", b"{", b"("))
            self._head = bytes(line[begin + 1 :][-MOST_BETWEEN:])

    def after_string(self, shown: ConversationLines) -> bytes:
        """Return what is likely to come after the value that is being written, from its closing quote on."""
        return b'"' + self._after(b'"', _REST, shown)

    def before_next(self, shown: ConversationLines) -> bytes:
        """Return what is likely to come between the newest value and the next one; nothing if that is unknown."""
        return self._after(bytes(self.raw.line[self.closed - 1 :]), _NEXT_VALUE, shown)

    def _after(self, begun: bytes, pattern: re.Pattern[bytes], shown: ConversationLines) -> bytes:
        """Return what came after the value of this name in an earlier call, from its closing quote on, without what
        has `begun` of it; nothing if it does not fit `pattern`.
        """
        line, head = bytes(self.raw.line), self._head
        at = line.rfind(head, 0, max(line.rfind(head), 0))
        for before, following in self._earlier(line, shown) if at < 0 else ((line, b""),):
            if at < 0 and (found := before.find(head)) < 0:
                continue
            value = _STRING.match(before, (found if at < 0 else at) + len(head) - 1)
            if value is None:
                continue
            rest = (before[value.end() - 1 :] + following)[: 2 * MOST_BETWEEN]
            match = pattern.match(rest)
            return match[0][len(begun) :] if match is not None and match[0].startswith(begun) else b""
        return b""

    def _earlier(self, line: bytes, shown: ConversationLines) -> Iterator[tuple[bytes, bytes]]:
        """Yield earlier lines that begin as the one that is written, newest first, each with the text after it."""
        key = line.lstrip()[: 3 * KEY]
        if len(key) < KEY:
            return
        for place in reversed(range(len(self._newest))):
            if self._newest[place].lstrip().startswith(key):
                yield self._newest[place].lstrip(), b"\n" + b"".join(self._newest[place + 1 : place + 2])
        for index in (self._lines, shown.lines):
            for place in reversed(index.beginning_with(key)[-4:]):
                following = b"\n" + b"\n".join(index.lines[place + 1 : place + 2])
                yield index.lines[place].lstrip(), following


def _unmarked(key: bytes) -> tuple[bytes, ...]:
    """Return a line without indentation, and without the mark of a patch if it may have one."""
    return (key, key[1:].lstrip()) if key[:1] in (b"-", b"+") and len(key) > 1 else (key,)


def _at(lines: Lines, place: int, text: bytes, whole: bool) -> bool:
    """Return True if the line at a place is `text`, or begins so, without indentation."""
    if place >= len(lines.lines) or lines.lines[place] == Lines.ENDS:
        return False
    key = lines.lines[place].lstrip()
    return key == text if whole else key.startswith(text)
