"""Text that is still being written: a prompt and the answer so far, or everything generated before.

The newest tokens lie in a short tail that is searched by brute force; a full tail is folded into an in-memory segment,
and a segment merges with the one before it while that is not larger than twice its size, so there are O(log n) of them
and a token is sorted O(log n) times. Same rows as a segment over the whole text would give.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.packing import MAX_VOCABULARY, width_of
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Int32Array, Int64Array, Rows, check_shape
from rest_local.retrieval.segment import Segment

TAIL = 2048
"""Tokens searched by brute force: comparing them with the newest token takes about a microsecond."""

_END = -1  # no text here (yet), or the end of a document
_FRONT = MAX_MATCH  # cells before the text, so that looking back from the first token needs no test


class GrowingText:
    """A text that grows at its end, searched like a segment.

    vocab_size: ids outside 0..vocab_size-1 end a document; `extend([-1])` separates two texts. The default takes any id
    at 3 bytes a token. 11 bytes a token or less.
    """

    def __init__(self, vocab_size: int = MAX_VOCABULARY, tail: int = TAIL) -> None:
        width_of(vocab_size)
        self._vocab_size = vocab_size
        self._tail = max(tail, 1)
        self._length = 0
        self._segments: list[tuple[int, Segment]] = []  # (end in the text, segment); each starts where the last ends
        self._cells: Int32Array = np.full(_FRONT + 4096 + MAX_DEPTH, _END, np.int32)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Int32Array:
        """The text so far, int32 [len], -1 where a document ends: a view, valid until the next `extend`."""
        return self._cells[_FRONT : _FRONT + self._length]

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Adds tokens at the end. Amortised O(log n) a token; a tail that is full is sorted at once."""
        added = np.asarray(tokens, np.int32).reshape(-1)
        end = self._length + len(added)
        if _FRONT + end + MAX_DEPTH > len(self._cells):
            cells = np.full(_FRONT + 2 * end + MAX_DEPTH, _END, np.int32)
            cells[: _FRONT + self._length] = self._cells[: _FRONT + self._length]
            self._cells = cells
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
        self._fold()

    def rows(self, context: npt.NDArray[np.integer], limit: int = 64, depth: int = 16) -> Rows:
        """As `Segment.rows`, over all text so far; the newer text first among equal matches.

        The end of the text has no continuation and gives no row, so the text can be searched with its own end.
        """
        check_shape(limit, depth)
        newest = np.asarray(context)[: -MAX_MATCH - 1 : -1].astype(np.int32)
        if len(newest) and (newest.min() < 0 or newest.max() >= self._vocab_size):
            newest = newest[: int(((newest < 0) | (newest >= self._vocab_size)).argmax())]
        if not len(newest) or not self._length:
            return Rows.empty(depth)
        positions, match = self._tail_rows(newest, limit)
        if not self._segments:
            return Rows(self._continuations(positions, depth), match, positions)
        for end, segment in self._segments:
            # One more than asked for: the end of the text may be among them, and is dropped below.
            found, agree = segment.around(segment.key(newest[::-1]), limit + 1)
            positions = np.concatenate([positions, end - found.astype(np.int64)])
            match = np.concatenate([match, agree])
        inside = positions < self._length
        positions, match = positions[inside], match[inside]
        best = np.lexsort((-positions, -match))[:limit]
        positions = positions[best]
        return Rows(self._continuations(positions, depth), match[best], positions)

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

    def _tail_rows(self, newest: Int32Array, limit: int) -> tuple[Int64Array, Int32Array]:
        """The best matches in the tail. newest: the context, newest first, int32 [1..MAX_MATCH]."""
        cells = self._cells
        tail = cells[_FRONT + self._folded : _FRONT + max(self._length - 1, 0)]
        at = np.flatnonzero(tail == newest[0]) + (_FRONT + self._folded)
        for back, token in enumerate(newest.tolist()[1:], 1):
            if len(at) <= limit:
                break
            closer = at[cells[at - back] == token]
            if len(closer) < limit:  # the others are needed to fill up
                break
            at = closer
        if len(at) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        window = np.ndarray(len(cells) - MAX_MATCH, f"V{4 * MAX_MATCH}", cells, 0, (4,))  # cells i .. i + MAX_MATCH - 1
        before = window[at - (MAX_MATCH - 1)].view(np.int32).reshape(-1, MAX_MATCH)[:, ::-1]
        same = np.zeros((len(at), len(newest) + 1), np.bool_)
        np.equal(before[:, : len(newest)], newest, out=same[:, : len(newest)])
        match = same.argmin(axis=1).astype(np.int32)
        best = np.argsort(-match[::-1], kind="stable")[:limit]  # from the back: newer text first among equals
        return (at[::-1][best] - _FRONT + 1).astype(np.int64), match[::-1][best]

    def _continuations(self, positions: Int64Array, depth: int) -> Int32Array:
        window = np.ndarray(len(self._cells) - _FRONT - depth + 1, f"V{4 * depth}", self._cells, 4 * _FRONT, (4,))
        tokens: Int32Array = window[positions].view(np.int32).reshape(-1, depth)
        end = tokens < 0
        if end.any():
            tokens[np.logical_or.accumulate(end, axis=1)] = _END
        return tokens
