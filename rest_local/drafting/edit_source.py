"""Recognise files that an answer writes or patches, and follow them as if a client had sent them as a prediction.

Token ids of a prompt and of its answer go in; rows that continue the answer come out. What the conversation shows is
kept as lines of files, and what the answer writes is read in two ways (`rest_local.drafting.conversation_lines`): as it
stands, and, inside a JSON string, decoded. Where lines of the answer, or the beginning of one, stand in the
conversation in another spelling (numbered, escaped, marked in a patch), a `LineCursor` writes the lines after them as
the answer does, tokenizes them, and follows them with `Prediction`, which finds its place again after a change. Text in
the same spelling is left to the source `context`. A string that repeats lines of the conversation is expected to be
repeated by the next one, after the text between the two in earlier calls: the old and the new text of an edit.

No client, tool or key is named here. A wrong guess is a rejected draft, like one of any other source.

A token of the answer costs 10 us where nothing is recognised, with a call for each; a lookup in the request's own text
costs 15. Tokenizing is paid from an allowance of `EARNED` bytes for each token of the answer: at most 0.04 ms a token,
and 5 ms more. The conversation is read 8 192 tokens at a time, when rows are asked for: 0.5 us a token, 50 ms for
100 000 tokens of code, of which 1.7 MB are kept.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np

from rest_local.drafting.conversation_lines import KEY, ConversationLines, Lines, Place, Reading, Writing
from rest_local.drafting.prediction import MAX_PLACES, START, Prediction
from rest_local.retrieval.rows import MAX_DEPTH, Int32Array, Rows

PART = 1024  # Tokens of the conversation between two places to which it can be cut back. Eight parts are read at once.
ALLOWED, EARNED = 16_384, 96  # Bytes that may be tokenized at first, and for each token of the answer.
CHUNK = 1024  # Bytes that are tokenized when a place is found, and when they are nearly used up.
OVERLAP = 48  # Bytes that are tokenized again, so that the tokens are those of the whole text.


class Spelling(Protocol):
    """Lets an edit source turn text into tokens and back: `rest_local.llama.vocabulary.Vocabulary`, or a fake."""

    def piece(self, token: int) -> bytes: ...
    def tokenize(self, text: bytes) -> Int32Array: ...


class LineCursor:
    """Lines that are followed, in the way the answer writes them.

    The tokens are those that the vocabulary makes of the whole text. They are made as they are needed.
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
        """Follow `lines`, escaped if they are in a JSON `string`, with `mark` before each and `end` after the last.

        `repeated` says that the lines are of the answer itself.
        """
        self.string, self.mark, self.level, self.repeated = string, mark, 0, repeated
        self.prediction = Prediction(())
        self._spelling, self._lines, self._end = spelling, lines, end
        self._next = 0  # The first line that is not tokenized yet.
        self._text = b""  # The newest bytes that were tokenized.
        self._breaks = bytearray()  # For each token 1 if a line ends at it or at the one before.

    def fork(self) -> LineCursor:
        """Make an independent one in the same state."""
        other = copy(self)
        other.prediction, other._breaks = self.prediction.fork(), self._breaks[:]
        return other

    def begin(self, line: int, written: int, level: int, prefix: bytes = b"") -> int:
        """Expect what follows the first `written` bytes of a line without indentation, after `prefix`.

        At least CHUNK bytes are tokenized. Returns how many were.
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
        if remaining != len(rest):  # A token reaches over the place.
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
        kept = {}  # The number of known tokens, by the bytes of `text` after them.
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
        """Return rows that continue the answer, as `EditSource.rows` does."""
        rows = self.prediction.rows(context, depth)
        return rows, [bytes(self._breaks[place : place + depth]) for place in rows.positions.tolist()]

    def _from_end(self, tokens: Int32Array, size: int) -> tuple[int, int]:
        """Return the last place in `tokens` with `size` bytes after it or more, and how many there are."""
        place, remaining = len(tokens), 0
        while place and remaining < size:
            place -= 1
            remaining += len(self._spelling.piece(int(tokens[place])))
        return place, remaining

    def _further(self, size: int) -> bytes:
        """Take line ends and whole lines from the next one on, to about `size` bytes, and then the end."""
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
        """Return True if all lines are tokenized."""
        return self._next >= len(self._lines) or self._lines[self._next] == Lines.ENDS

    def _escaped(self, text: bytes) -> bytes:
        """Spell text as the answer does."""
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
        """Begin with an empty conversation, in the vocabulary `spelling`."""
        self._spelling = spelling
        self._shown = ConversationLines()
        self.restart((), 0)

    def restart(self, tokens: Sequence[int], same: int) -> None:
        """Set the conversation, whose first `same` tokens are those of the last sequence."""
        piece = self._spelling.piece
        self._waiting = array("i", tokens[self._shown.cut(same) :])  # Tokens that are not in `_shown` yet.
        self._pending: list[int] = []  # Tokens of the answer that were not read yet.
        self._writing = Writing()
        self._old: list[bytes] | None = None  # The string that the next one may repeat.
        self._followed: LineCursor | None = None
        self._others: list[LineCursor] = []  # Other marks of the next line of a patch.
        self._mark = b""  # The mark of the newest lines of a patch.
        self._patched: Place | None = None  # The line after the newest one that the patch leaves or removes.
        self._removed: list[bytes] = []  # The newest lines that a patch removes.
        self._allowance = ALLOWED
        line = b""
        for token in reversed(tokens[-64:]):  # The answer goes on with the line that the conversation ends with.
            if token < 0:  # A part of an image.
                break
            _, end, text = piece(token).rpartition(b"\n")
            line = text + line
            if end:
                break
        self._writing.raw.line += line

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer. They are read when they matter."""
        self._writing.keep_lines()
        self._pending.extend(tokens)

    def fork(self) -> EditSource | None:
        """Make an independent one in the same state, as long as only one of the two is extended from its second
        `extend` on. It is None while the conversation is not read to its end. 10 us.
        """
        self._read_answer()
        self._writing.keep_lines()
        if self._waiting:
            return None
        other = copy(self)
        other._pending, other._removed = [], self._removed[:]
        other._writing = self._writing.fork()
        other._followed = self._followed and self._followed.fork()
        other._others = [each.fork() for each in self._others]
        return other

    @property
    def evidence_kind(self) -> int:
        """Return a number below 4 for how the text of the newest rows was found and is written."""
        followed = self._followed
        return 0 if followed is None else 2 * followed.repeated + followed.string

    @property
    def follows(self) -> bool:
        """Return True if rows are likely: the answer follows a file, or begins to repeat what it has copied."""
        self._read_answer()
        followed = self._followed
        return (followed is not None and followed.prediction.catch_up()) or self._repeated() is not None

    def rows(self, context: Sequence[int], depth: int) -> tuple[Rows, list[bytes]]:
        """Return rows that continue the answer after `context`, the likeliest first, and for each its tokens with 1
        where a line ends, else 0.
        """
        piece = self._spelling.piece
        for _ in range(0, min(8 * PART, len(self._waiting)), PART):
            part, self._waiting = self._waiting[:PART], self._waiting[PART:]
            text = b"".join([piece(token) if token >= 0 else b"\n" for token in part])  # An image ends a line.
            self._shown.add(text, len(part))
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

    def _read_answer(self) -> None:
        """Read what the answer writes, and let what is followed follow it."""
        pending = self._pending
        if not pending:
            return
        self._pending = []
        self._allowance = min(self._allowance + EARNED * len(pending), ALLOWED)
        piece, writing = self._spelling.piece, self._writing
        for token in pending:
            if self._followed is not None:
                self._followed.prediction.extend((token,))
                for other in self._others:
                    other.prediction.extend((token,))
            for ended in writing.feed(piece(token)):
                string = writing.string
                if ended is not None:
                    self._end_line(ended)
                if ended is None or (ended is not string and writing.in_string):  # A string has ended.
                    followed = self._followed
                    if followed is not None and followed.string and not followed.prediction.catch_up():
                        self._followed, self._others = None, []
                if ended is None:
                    self._mark = b""
                    if writing.is_value:
                        long = len(string.line) >= KEY
                        shown = string.shown > 0 or (long and bool(string.places(self._shown)[0]))
                        self._old = [*string.whole, bytes(string.line)] if shown and not string.repeats else None
                elif ended is not string:
                    self._old = None

    def _end_line(self, reading: Reading) -> None:
        """Take a line that is complete, in a string or outside. In a patch, the next line may have another mark."""
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
        if self._allowance < ALLOWED // 2:
            return
        expected: list[tuple[list[bytes], int, bytes]] = []
        if self._removed and mark == b"-":
            expected.append((self._removed[:], 0, b"+"))
        if (place := self._patched) is not None:
            expected += [(place.lines.lines, place.line, other) for other in (b" ", b"-") if other != mark]
        for lines, number, other in expected:
            cursor = LineCursor(self._spelling, lines, reading is self._writing.string, other)
            self._allowance -= cursor.begin(number, 0, START)
            self._others.append(cursor)

    def _find(self) -> None:
        """Decide what is followed from here on."""
        followed, writing = self._followed, self._writing
        if followed is not None and followed.prediction.catch_up():
            return
        for other in self._others:
            if other.prediction.catch_up() and other.prediction.level > other.level:
                self._followed, self._others, self._mark = other, [], other.mark
                return
        if self._allowance <= 0:
            return
        if writing.in_string or writing.closed:
            key = bytes(writing.raw.line.lstrip())
            if len(key) >= KEY and any(lines.beginning_with(key) for lines in self._shown.both):
                self._look(writing.raw)  # A line of code with quotes is no call.
                return
        if old := self._repeated():
            self._repeat(old)
        else:
            self._look(writing.string if writing.in_string else writing.raw)

    def _repeated(self) -> list[bytes] | None:
        """Return the text that the string which begins here, or is about to begin, is likely to repeat."""
        old, writing = self._old, self._writing
        if old is None:
            return None
        if writing.in_string:
            string = writing.string
            fits = writing.is_value and not string.whole and not string.repeats and old[0].startswith(string.line)
        else:
            fits = len(writing.raw.line) - writing.closed < 2
        return old if fits else None

    def _repeat(self, old: list[bytes]) -> None:
        """Follow `old`: from the end of the string that it is, if an earlier call shows what comes between; or from
        the beginning of the next string.
        """
        writing = self._writing
        if writing.in_string:
            string, self._old = writing.string, None
            string.repeats = True
            followed = LineCursor(self._spelling, old, True, end=writing.after_string(self._shown), repeated=True)
            self._allowance -= followed.begin(0, len(string.line.lstrip()), START + 2)
        else:
            between = writing.before_next(self._shown)
            if not between:
                return
            followed = LineCursor(self._spelling, old, True, end=b'"', repeated=True)
            self._allowance -= followed.begin(0, 0, START + 2, between)
        self._followed = followed

    def _look(self, reading: Reading) -> None:
        """Look for the line that the answer is writing, and follow it if it was shown in another spelling."""
        places, text = reading.places(self._shown)
        if not places:
            return
        run = max(place.run for place in places)
        best = [place for place in places if place.run == run][-1]
        if self._followed is not None and run < 2:
            return
        string, shown = reading is self._writing.string, best.lines.lines[best.line]
        mark = _mark_of(bytes(reading.line), shown, text) if text else self._mark
        if not (string or mark or best.lines.changed[best.line] or best.lines is self._shown.strings):
            return
        followed = LineCursor(self._spelling, best.lines.lines, string, mark)
        self._allowance -= followed.begin(best.line, len(text), START)
        self._followed, self._mark, self._others = followed, mark, []


def _mark_of(line: bytes, shown: bytes, text: bytes) -> bytes:
    """Return the mark of a patch at the beginning of a line that was shown; empty if there is none."""
    key = line.lstrip()
    if line[:1] in (b"-", b"+") and (not key.startswith(text) or shown[:1] != line[:1]):
        return line[:1]
    indentation = len(line) - len(key)
    return b" " if line[:1] == b" " and indentation == len(shown) - len(shown.lstrip()) + 1 else b""
