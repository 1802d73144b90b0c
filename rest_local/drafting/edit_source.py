"""Files that an answer writes or patches are recognised in the conversation and followed, as if a client had sent them
as a prediction.

Contract: token ids of a prompt and of its answer go in; rows that continue the answer come out. What the conversation
shows is kept as lines of files (`rest_local.drafting.conversation_lines`). The line that the answer is writing is read
in two ways: as it stands, and, inside a JSON string, decoded. Where lines of the answer, or the beginning of one, stand
in the conversation in another spelling (numbered, escaped, marked in a patch), the lines after them are written as the
answer writes, tokenized, and followed by `Prediction`, which finds its place again after a change. Text in the same
spelling is left to the source `context`. A string that repeats lines of the conversation is expected to be repeated by
the next one, after the text between the two in earlier calls: the old and the new text of an edit.

No client, tool or key is named here. A wrong guess is a rejected draft, like one of any other source.

Cost: 10 us a token of the answer where nothing is recognised, with a call for each; a lookup in the request's own text
takes 15. Tokenizing is paid from an allowance of `EARNED` bytes for each token of the answer: at most 0.04 ms a token,
and 5 ms more. The conversation is read 8 192 tokens at a time, when rows are asked for: 0.5 us a token, 50 ms for
100 000 tokens of code, of which 1.7 MB are kept.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Protocol

import numpy as np

from rest_local.drafting.conversation_lines import KEY, ConversationLines, Lines, Mark, Place, Reading
from rest_local.drafting.prediction import MAX_PLACES, START, Prediction
from rest_local.retrieval.rows import MAX_DEPTH, Int32Array, Rows

PART = 1024  # tokens of the conversation between two places to which it can be cut back; eight parts are read at once
ALLOWED, EARNED = 16_384, 96  # bytes that may be tokenized at first, and for each token of the answer
CHUNK = 1024  # Bytes that are tokenized when a place is found, and when they are nearly used up.
OVERLAP = 48  # Bytes that are tokenized again, so that the tokens are those of the whole text.
MOST_BETWEEN = 64  # bytes between two values, and of the name of a value

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NEXT_VALUE = re.compile(rb'"\s*,\s*(?:"[^"\\]{1,40}"\s*:|\w{1,40}=)\s*"')
_REST = re.compile(rb".*", re.DOTALL)
_ESCAPES = dict(zip(b"ntrbf", b"\n\t\r\b\f", strict=True))
_LINE_END, _QUOTE, _BACKSLASH, _N = b'\n"\\n'
_BEFORE_VALUE, _SPACE = b":=", b" \t"


class Spelling(Protocol):
    """What of a vocabulary is used: `rest_local.llama.vocabulary.Vocabulary`."""

    def piece(self, token: int) -> bytes: ...
    def tokenize(self, text: bytes) -> Int32Array: ...


class LineCursor:
    """Lines that are followed, in the way the answer writes them. `string`: escaped, for a JSON string. `mark`: before
    each line. `end`: bytes after the last line. `repeated`: the lines are of the answer.
    """

    def __init__(
        self,
        spelling: Spelling,
        lines: Sequence[bytes],
        string: bool,
        mark: bytes = b"",
        end: bytes = b"",
        repeated: bool = False,
    ) -> None:
        self.string, self.mark, self.level, self.repeated = string, mark, 0, repeated
        self.prediction = Prediction(())
        self._spelling, self._lines, self._end = spelling, lines, end
        self._next = 0  # line that is not tokenized yet
        self._text = b""  # the newest bytes that were tokenized
        self._breaks = bytearray()  # by token: 1 if a line ends at it or at the one before

    def fork(self) -> LineCursor:
        """An independent one in the same state."""
        other = copy(self)
        other.prediction, other._breaks = self.prediction.fork(), self._breaks[:]
        return other

    def begin(self, line: int, written: int, level: int, prefix: bytes = b"") -> int:
        """Expect what follows the first `written` bytes of a line without indentation; `prefix` comes before. At least
        CHUNK bytes are tokenized; returns how many were.
        """
        whole = self._lines[line]
        at = min(len(whole) - len(whole.lstrip()) + written, len(whole)) if written else 0
        begun = self._escaped(self.mark + whole[:at]) if written else b""
        rest = prefix + self._escaped(whole[at:] if written else self.mark + whole)
        self._next = line + 1
        rest += self._further(CHUNK)
        text = begun + rest
        tokens = self._spelling.tokenize(text)
        place, remaining = self._from_end(tokens, len(rest))
        if remaining != len(rest):  # a token reaches over the place
            tokens = np.concatenate([tokens[:place], self._spelling.tokenize(rest)])
        self._text = text[-OVERLAP:]
        self.level, self.prediction = level, Prediction(tokens, place, level)
        self._find_breaks(0)
        return len(text)

    def extend(self) -> int:
        """Tokenize more lines if few tokens are left. Returns the bytes."""
        prediction = self.prediction
        if self._is_whole or prediction.left > MAX_DEPTH:
            return 0
        more = self._further(CHUNK)
        text, known = self._text + more, prediction.tokens
        kept = {}  # number of known tokens, by the bytes of `text` after them
        remaining = len(more)
        for number in range(len(known) - 1, prediction.place, -1):
            remaining += len(self._spelling.piece(int(known[number])))
            if remaining > len(text) - 8:
                break
            kept[remaining] = number
        tokens = self._spelling.tokenize(text)
        place, remaining = self._from_end(tokens, len(more) + 1)
        while remaining not in kept and place and remaining < len(text):
            place -= 1
            remaining += len(self._spelling.piece(int(tokens[place])))
        keep = kept.get(remaining, len(known))
        prediction.append(tokens[place:] if remaining in kept else self._spelling.tokenize(more), keep)
        self._find_breaks(keep)
        self._text = text[-OVERLAP:]
        return len(text)

    def rows(self, context: Sequence[int], depth: int) -> tuple[Rows, list[bytes]]:
        """As `EditSource.rows`."""
        rows = self.prediction.rows(context, depth)
        return rows, [bytes(self._breaks[place : place + depth]) for place in rows.positions.tolist()]

    def _from_end(self, tokens: Int32Array, size: int) -> tuple[int, int]:
        """The last place in `tokens` with `size` bytes after it or more, and how many there are."""
        place, remaining = len(tokens), 0
        while place and remaining < size:
            place -= 1
            remaining += len(self._spelling.piece(int(tokens[place])))
        return place, remaining

    def _further(self, size: int) -> bytes:
        """Line ends and whole lines from the next one on, to about `size` bytes; then the end."""
        found: list[bytes] = []
        length = 0
        while length < size and not self._is_whole:
            found.append(self._escaped(b"\n" + self.mark + self._lines[self._next]))
            length += len(found[-1])
            self._next += 1
        if self._is_whole:
            found.append(self._end)
            self._end = b""
        return b"".join(found)

    @property
    def _is_whole(self) -> bool:
        return self._next >= len(self._lines) or self._lines[self._next] == Lines.ENDS

    def _escaped(self, text: bytes) -> bytes:
        if not self.string:
            return text
        return json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False)[1:-1].encode("utf-8", "replace")

    def _find_breaks(self, begin: int) -> None:
        """Note where lines end in the tokens from `begin` on."""
        breaks = self._breaks
        del breaks[begin:]
        before, ended = b"", False
        for token in self.prediction.tokens[begin:].tolist():
            piece = self._spelling.piece(token)
            if self.string:
                ends = b"\\n" in piece or piece[-1:] == b"\\" or (before[-1:] == b"\\" and piece[:1] == b"n")
            else:
                ends = b"\n" in piece
            breaks.append(ends or ended)
            before, ended = piece, ends


class EditSource:
    """The source of one sequence of a model."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._shown = ConversationLines()
        self._marks: list[tuple[int, Mark]] = [(0, self._shown.mark)]
        self._read = 0  # tokens of the conversation that are in `_shown`
        self._waiting = array("i")  # the others
        self._begin()

    def _begin(self) -> None:
        self._pending: list[int] = []  # tokens of the answer that were not read yet
        self._raw, self._string = Reading(), Reading()
        self._own = Lines()  # lines of the answer; forks share them
        self._newest: list[bytes] = []  # that are not in `_own` yet
        self._in_string = self._is_value = self._escaped = False
        self._head = b""  # what stands before the newest value: `"old_string": "`
        self._closed = 0  # bytes of the line up to the end of the newest string
        self._before = 0  # the last byte outside of strings that is not white space
        self._old: list[bytes] | None = None  # the string that the next one may repeat
        self._followed: LineCursor | None = None
        self._others: list[LineCursor] = []  # other marks of the next line of a patch
        self._mark = b""  # of the newest lines of a patch
        self._patched: Place | None = None  # the line after the newest one that it leaves or removes
        self._removed: list[bytes] = []  # the newest lines that a patch removes
        self._allowance = ALLOWED

    def restart(self, tokens: Sequence[int], same: int) -> None:
        """Set the conversation, of which the first `same` tokens are those of the last sequence."""
        same = min(same, self._read)
        while self._marks[-1][0] > same:
            self._marks.pop()
        self._read, mark = self._marks[-1]
        self._shown.back_to(mark)
        self._waiting = array("i", tokens[self._read :])
        self._begin()
        self._raw.line += self._newest_line(tokens)

    def _newest_line(self, tokens: Sequence[int]) -> bytes:
        """The line that the conversation ends with."""
        line = b""
        for token in reversed(tokens[-64:]):
            if token < 0:  # a part of an image
                break
            _, end, piece = self._spelling.piece(token).rpartition(b"\n")
            line = piece + line
            if end:
                break
        return line

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer. They are read when they matter."""
        self._keep_lines()
        self._pending.extend(tokens)

    def _keep_lines(self) -> None:
        for line in self._newest:
            self._own.add(line)
        self._newest = []

    def fork(self) -> EditSource | None:
        """An independent one in the same state, as long as only one of the two is extended from its second `extend` on.
        None while the conversation is not read to its end. 10 us.
        """
        self._read_answer()
        self._keep_lines()
        if self._waiting:
            return None
        other = copy(self)
        other._pending, other._newest, other._removed = [], [], self._removed[:]
        other._raw, other._string = self._raw.fork(), self._string.fork()
        other._followed = self._followed and self._followed.fork()
        other._others = [each.fork() for each in self._others]
        return other

    @property
    def evidence_kind(self) -> int:
        """How the text of the newest rows was found, and is written: a number of evidence, below 4."""
        followed = self._followed
        return 0 if followed is None else 2 * followed.repeated + followed.string

    @property
    def follows(self) -> bool:
        """Whether rows are likely: the answer follows a file, or begins to repeat what it has copied."""
        self._read_answer()
        followed = self._followed
        return (followed is not None and followed.prediction.catch_up()) or self._repeated() is not None

    def rows(self, context: Sequence[int], depth: int) -> tuple[Rows, list[bytes]]:
        """Rows that continue the answer after `context`, the likeliest first; for each its tokens with 1 where a line
        ends, else 0.
        """
        self._read_conversation()
        self._read_answer()
        self._find()
        followed = self._followed
        if followed is None:
            return Rows.empty(depth), []
        if self._allowance > 0:
            self._allowance -= followed.extend()
        rows, breaks = followed.rows(context, depth)
        if not self._others:
            return rows, breaks
        parts = [(rows, breaks), *(other.rows(context, depth) for other in self._others)]
        ends = [each for _, several in parts for each in several]
        match = np.concatenate([part.match for part, _ in parts])
        best = np.argsort(-match, kind="stable")[:MAX_PLACES]
        return Rows.merge([part for part, _ in parts], MAX_PLACES, depth), [ends[number] for number in best.tolist()]

    # What the conversation shows

    def _read_conversation(self) -> None:
        piece = self._spelling.piece
        for _ in range(0, min(8 * PART, len(self._waiting)), PART):
            part, self._waiting = self._waiting[:PART], self._waiting[PART:]
            self._shown.add(b"".join([piece(token) if token >= 0 else b"\n" for token in part]))  # an image ends a line
            self._read += len(part)
            self._marks.append((self._read, self._shown.mark))

    # What the answer writes

    def _read_answer(self) -> None:
        pending = self._pending
        if not pending:
            return
        self._pending = []
        self._allowance = min(self._allowance + EARNED * len(pending), ALLOWED)
        piece = self._spelling.piece
        for token in pending:
            if self._followed is not None:
                self._followed.prediction.extend((token,))
                for other in self._others:
                    other.prediction.extend((token,))
            self._feed(piece(token))

    def _feed(self, piece: bytes) -> None:
        raw, string = self._raw, self._string
        for byte in piece:
            if byte == _LINE_END:
                self._end_raw_line()
                continue
            raw.line.append(byte)
            if not self._in_string:
                if byte == _QUOTE:
                    self._open_string()
                    string = self._string
                elif byte not in _SPACE:
                    self._before = byte
            elif self._escaped:
                self._escaped = False
                if byte == _N:
                    self._end_line(string)
                else:
                    string.line.append(_ESCAPES.get(byte, byte))
            elif byte == _BACKSLASH:
                self._escaped = True
            elif byte == _QUOTE:
                self._end_string()
            else:
                string.line.append(byte)

    def _end_line(self, reading: Reading) -> None:
        """A line is complete, in a string or outside."""
        self._others = []
        mark, line = bytes(reading.line[:1]), bytes(reading.line[1:])
        shown = reading.end_line(self._shown)
        if not self._mark:
            return
        if mark == b"-":
            self._removed.append(line)
        elif mark != b"+":
            self._removed = []
        if shown and mark in (b" ", b"-"):
            self._mark = mark
            self._patched = max(reading.places(self._shown)[0], key=lambda place: (place.run, place.line), default=None)
        self._branch(reading, mark)

    def _end_raw_line(self) -> None:
        line = bytes(self._raw.line)
        self._end_line(self._raw)
        self._newest.append(line)
        if self._in_string:
            self._in_string = False
            self._drop()
        self._old, self._closed = None, 0

    def _open_string(self) -> None:
        line = self._raw.line
        self._in_string, self._escaped, self._string = True, False, Reading()
        self._is_value = bool(self._before) and self._before in _BEFORE_VALUE
        if self._is_value:
            begin = max(line.rfind(sign, 0, len(line) - 1) for sign in (b",", b"{", b"("))
            self._head = bytes(line[begin + 1 :][-MOST_BETWEEN:])

    def _end_string(self) -> None:
        string = self._string
        self._in_string, self._before, self._mark = False, _QUOTE, b""
        self._closed = len(self._raw.line)
        self._drop()
        if not self._is_value:
            return
        shown = string.shown > 0 or (len(string.line) >= KEY and bool(string.places(self._shown)[0]))
        self._old = [*string.whole, bytes(string.line)] if shown and not string.repeats else None

    def _drop(self) -> None:
        """A string has ended: forget what the answer did not follow to there."""
        followed = self._followed
        if followed is not None and followed.string and not followed.prediction.catch_up():
            self._followed, self._others = None, []

    # What is followed

    def _find(self) -> None:
        """Decide what is followed from here on."""
        followed = self._followed
        if followed is not None and followed.prediction.catch_up():
            return
        for other in self._others:
            if other.prediction.catch_up() and other.prediction.level > other.level:
                self._followed, self._others, self._mark = other, [], other.mark
                return
        if self._allowance <= 0:
            return
        if (self._in_string or self._closed) and self._is_shown_line():  # a line of code with quotes is no call
            self._look(self._raw)
        elif old := self._repeated():
            self._repeat(old)
        else:
            self._look(self._string if self._in_string else self._raw)

    def _is_shown_line(self) -> bool:
        """Whether the answer repeats a line of the conversation from its beginning on."""
        key = bytes(self._raw.line.lstrip())
        return len(key) >= KEY and any(lines.beginning_with(key) for lines in self._shown.both)

    def _repeated(self) -> list[bytes] | None:
        """The text that the string which begins here, or is about to begin, is likely to repeat."""
        old = self._old
        if old is None:
            return None
        if self._in_string:
            string = self._string
            fits = self._is_value and not string.whole and not string.repeats and old[0].startswith(string.line)
        else:
            fits = len(self._raw.line) - self._closed < 2
        return old if fits else None

    def _repeat(self, old: list[bytes]) -> None:
        """Follow `old`: from the end of the string that it is, if an earlier call shows what comes between; or from
        the beginning of the next string."""
        if self._in_string:
            string, self._old = self._string, None
            string.repeats = True
            end = b'"' + self._after(self._head, b'"', _REST)
            followed = LineCursor(self._spelling, old, True, end=end, repeated=True)
            self._allowance -= followed.begin(0, len(string.line.lstrip()), START + 2)
        else:
            between = self._after(self._head, bytes(self._raw.line[self._closed - 1 :]), _NEXT_VALUE)
            if not between:
                return
            followed = LineCursor(self._spelling, old, True, end=b'"', repeated=True)
            self._allowance -= followed.begin(0, 0, START + 2, between)
        self._followed = followed

    def _after(self, head: bytes, begun: bytes, pattern: re.Pattern[bytes]) -> bytes:
        """What came after the value of `head` in an earlier call, from its closing quote on, without what has `begun`
        of it; nothing if it does not fit `pattern`.
        """
        line = bytes(self._raw.line)
        at = line.rfind(head, 0, max(line.rfind(head), 0))
        for before, following in self._earlier(line) if at < 0 else ((line, b""),):
            if at < 0 and (found := before.find(head)) < 0:
                continue
            value = _STRING.match(before, (found if at < 0 else at) + len(head) - 1)
            if value is None:
                continue
            rest = (before[value.end() - 1 :] + following)[: 2 * MOST_BETWEEN]
            match = pattern.match(rest)
            return match[0][len(begun) :] if match is not None and match[0].startswith(begun) else b""
        return b""

    def _earlier(self, line: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Earlier lines that begin as the one that is written, newest first, each with the text after it."""
        key = line.lstrip()[: 3 * KEY]
        if len(key) < KEY:
            return
        for place in reversed(range(len(self._newest))):
            if self._newest[place].lstrip().startswith(key):
                yield self._newest[place].lstrip(), b"\n" + b"".join(self._newest[place + 1 : place + 2])
        for index in (self._own, self._shown.lines):
            for place in reversed(index.beginning_with(key)[-4:]):
                following = b"\n" + b"\n".join(index.lines[place + 1 : place + 2])
                yield index.lines[place].lstrip(), following

    def _look(self, reading: Reading) -> None:
        """Look for the line that the answer is writing, and follow it if it was shown in another spelling."""
        places, text = reading.places(self._shown)
        if not places:
            return
        run = max(place.run for place in places)
        equal = [place for place in places if place.run == run]
        best = equal[-1]
        if self._followed is not None and run < 2:
            return
        string, shown = reading is self._string, best.lines.lines[best.line]
        mark = _mark_of(bytes(reading.line), shown, text) if text else self._mark
        if not (string or mark or best.lines.changed[best.line] or best.lines is self._shown.strings):
            return
        followed = LineCursor(self._spelling, best.lines.lines, string, mark)
        self._allowance -= followed.begin(best.line, len(text), START)
        self._followed, self._mark, self._others = followed, mark, []

    def _branch(self, reading: Reading, newest: bytes) -> None:
        """A line of a patch with the mark `newest` has ended: the next one may have another mark."""
        if self._allowance < ALLOWED // 2:
            return
        string, place = reading is self._string, self._patched
        if self._removed and newest == b"-":
            self._add_other(LineCursor(self._spelling, self._removed[:], string, b"+"), 0)
        for mark in (b" ", b"-") if place is not None else ():
            if mark != newest and place is not None:
                self._add_other(LineCursor(self._spelling, place.lines.lines, string, mark), place.line)

    def _add_other(self, other: LineCursor, line: int) -> None:
        self._allowance -= other.begin(line, 0, START)
        self._others.append(other)


def _mark_of(line: bytes, shown: bytes, text: bytes) -> bytes:
    """The mark of a patch at the beginning of a line that was shown; empty if there is none."""
    key = line.lstrip()
    if line[:1] in (b"-", b"+") and (not key.startswith(text) or shown[:1] != line[:1]):
        return line[:1]
    indentation = len(line) - len(key)
    return b" " if line[:1] == b" " and indentation == len(shown) - len(shown.lstrip()) + 1 else b""
