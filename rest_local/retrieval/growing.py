"""Text that is still being written: a prompt and the answer so far, or everything generated before.

The newest tokens lie in a short tail that is searched by brute force; a full tail is folded into an in-memory segment,
and a segment merges with the one before it while that is not larger than twice its size, so there are O(log n) of them
and a token is sorted O(log n) times. Same rows as a segment over the whole text would give.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.packing import MAX_VOCABULARY, newest_of, packed, width_of
from rest_local.retrieval.places import CellRows, Places
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Context, Int32Array, Int64Array, Rows, check_shape
from rest_local.retrieval.segment import Segment

TAIL = 2048
"""Tokens searched by brute force: comparing them with the newest token takes about a microsecond."""

_FEW = 64  # tokens are added one by one: numpy's ways took 25 us behind a forward pass for the two of a step, these 3
_MANY = 8  # times as many places of the newest token as rows are wanted are compared at once, without sieving

_END = -1  # no text here (yet), or the end of a document
_NOTHING = -2  # in no cell
_FRONT = MAX_MATCH  # cells before the text, so that looking back from the first token needs no test


class GrowingText:
    """A text that grows at its end, searched like a segment.

    vocab_size: ids outside 0..vocab_size-1 end a document; `extend([-1])` separates two texts. The default takes any id
    at 3 bytes a token. 11 bytes a token or less.
    """

    def __init__(self, vocab_size: int = MAX_VOCABULARY, tail: int = TAIL) -> None:
        self._width = width_of(vocab_size)
        self._vocab_size = vocab_size
        self._tail = max(tail, 1)
        self._length = 0
        self._segments: list[tuple[int, Segment]] = []  # (end in the text, segment); each starts where the last ends
        self._cells: Int32Array = np.full(_FRONT + 4096 + MAX_DEPTH, _END, np.int32)
        self._cell = self._cells.data  # the same
        self._places = Places()  # of the tokens in the tail, but for the last

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Int32Array:
        """The text so far, int32 [len], -1 where a document ends: a view, valid until the next `extend`."""
        return self._cells[_FRONT : _FRONT + self._length]

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Adds tokens at the end. Amortised O(log n) a token; a tail that is full is sorted at once."""
        if isinstance(tokens, list) and len(tokens) < _FEW and self._reach + len(tokens) <= len(self._cells):
            for place, token in enumerate(tokens, _FRONT + self._length):
                self._cell[place] = token if 0 <= token < self._vocab_size else _END
            self._length += len(tokens)
            self._fold()
            return
        added = np.asarray(tokens, np.int32).reshape(-1)
        end = self._length + len(added)
        if self._reach + len(added) > len(self._cells):
            cells = np.full(_FRONT + 2 * end + MAX_DEPTH, _END, np.int32)
            cells[: _FRONT + self._length] = self._cells[: _FRONT + self._length]
            self._cells, self._cell = cells, cells.data
        if len(added) and (added.min() < 0 or added.max() >= self._vocab_size):
            added = np.where((added >= 0) & (added < self._vocab_size), added, _END)
        self._cells[_FRONT + self._length : _FRONT + end] = added
        self._length = end
        self._fold()

    def truncate(self, length: int) -> None:
        """Drops everything after the first `length` tokens (a rewind). Cost: sorting the segment that is cut again."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate a text of {self._length} tokens to {length}")
        while self._segments and self._segments[-1][0] > length:
            self._segments.pop()
        self._cells[_FRONT + length : _FRONT + self._length] = _END
        self._length = length
        self._places = Places()
        self._fold()

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """As `Segment.rows`, over all text so far; the newer text first among equal matches.

        The end of the text has no continuation and gives no row, so the text can be searched with its own end.
        """
        check_shape(limit, depth)
        newest = newest_of(context, self._vocab_size)
        if not newest or not self._length:
            return Rows.empty(depth)
        begin, end = _FRONT + self._folded, _FRONT + self._length - 1
        found = self._places.best(self._cell, begin, end, newest, limit)
        if found is not None and not self._segments:
            return CellRows(self._cell, _FRONT, found, depth, self._vocab_size)
        if found is None:
            positions, match = self._tail_rows(newest, limit)
        else:
            positions = np.array([place - (_FRONT - 1) for _, place in found], np.int64)
            match = np.array([match for match, _ in found], np.int32)
        if self._segments:
            positions, match = self._with_segments(positions, match, packed(newest, self._width), limit)
        return Rows(self._following(positions, depth), match, positions, limit=self._vocab_size)

    @property
    def _reach(self) -> int:
        """Cells that have to be there."""
        return _FRONT + self._length + MAX_DEPTH

    @property
    def _folded(self) -> int:
        return self._segments[-1][0] if self._segments else 0

    def _fold(self) -> None:
        """Sorts the tail once it is full, together with segments before it that are not larger than twice its size."""
        if self._length - self._folded < self._tail:
            return
        while self._segments:
            start = self._segments[-2][0] if len(self._segments) > 1 else 0
            if self._segments[-1][0] - start > 2 * (self._length - self._segments[-1][0]):
                break
            self._segments.pop()
        start = self._folded
        overlap = min(start, MAX_MATCH)  # the context of the first tokens lies in the segment before
        text = self._cells[_FRONT + start - overlap : _FRONT + self._length]
        self._segments.append((self._length, Segment.of_text(text, self._vocab_size, overlap)))

    def _tail_rows(self, newest: list[int], limit: int) -> tuple[Int64Array, Int32Array]:
        """The best matches in the tail. newest: the context, newest first, 1..MAX_MATCH tokens."""
        cells, begin = self._cells, _FRONT + self._folded
        at = (cells[begin : _FRONT + self._length - 1] == newest[0]).nonzero()[0]  # from `begin` on
        for back in range(1, len(newest)):
            if len(at) <= _MANY * limit:
                break
            closer = at[cells[at + (begin - back)] == newest[back]]
            if len(closer) < limit:  # the others are needed to fill up
                break
            at = closer
        if not len(at):
            return np.empty(0, np.int64), np.empty(0, np.int32)
        sought = np.array([*newest, _NOTHING], np.int32)
        size = 4 * len(sought)
        windows = np.ndarray(len(cells) - begin, f"V{size}", cells, 4 * (begin - len(newest)), (4,))[at]
        before = np.ndarray((len(at), len(sought)), np.int32, windows, size - 4, (size, -4))
        match = (before != sought).argmax(axis=1)
        best = match.argsort(kind="stable")[: -limit - 1 : -1]  # newer text first among equals
        return at[best] + (begin - _FRONT + 1), match[best].astype(np.int32)

    def _with_segments(
        self, positions: Int64Array, match: Int32Array, key: bytes, limit: int
    ) -> tuple[Int64Array, Int32Array]:
        """The best of these rows of the tail and of all segments. Newer text comes first, so that an older segment is
        left after one search unless it holds a longer match than the last row so far."""
        for end, segment in reversed(self._segments):
            least = int(match[limit - 1]) if len(match) >= limit else 0
            last = end == self._length  # the end of the text may be among its rows, and is dropped
            found, agree = segment.around(key, limit + last, above=least)
            if not len(found):
                continue
            following = np.subtract(end, found, dtype=np.int64)
            if last:
                inside = following < end
                following, agree = following[inside], agree[inside]
            positions, match = np.concatenate([positions, following]), np.concatenate([match, agree])
            best = np.lexsort((-positions, -match))[:limit]
            positions, match = positions[best], match[best]
        return positions, match

    def _following(self, positions: Int64Array, depth: int) -> Int32Array:
        window = np.ndarray(len(self._cells) - _FRONT - depth + 1, f"V{4 * depth}", self._cells, 4 * _FRONT, (4,))
        tokens: Int32Array = np.ndarray((len(positions), depth), np.int32, window[positions])
        return tokens
