"""Lines of a file, tokenized as an answer writes them, and followed.

Contract: lines go in, and how they are written: escaped for a JSON string, marked for a patch. Rows of tokens come out.
The tokens are those that the vocabulary makes of the whole text; they are made as they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np

from rest_local.drafting.conversation_lines import Lines
from rest_local.drafting.prediction import Prediction
from rest_local.retrieval.rows import MAX_DEPTH, Int32Array, Rows

CHUNK = 1024  # bytes that are tokenized when a place is found, and when they are nearly used up
OVERLAP = 48  # bytes that are tokenized again, so that the tokens are those of the whole text


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
