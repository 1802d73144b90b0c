"""The retrieval of REST (He et al. 2023), implemented again from its description, to compare with.

One suffix array of the text in its order; the newest 16 tokens are searched, then 15, down to 2, and the first length
with a match counts: all of its places, up to 5 000, are read, and the prefixes of their continuations that occur most
often are the draft. It is not REST's own program, which is in Rust. Arrays are used where they save time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from rest_local.retrieval.rows import MAX_DEPTH, Int32Array, from_big_endian, order_of, pack, packed, width_of

LONGEST, SHORTEST = 16, 2  # tokens of the context
PLACES = 5_000
DEPTH = 10  # tokens of a continuation
NODES = 64


class RestRetriever:
    """A text and its suffix array, in memory. n (width + 4) bytes."""

    def __init__(self, text: Int32Array, vocab_size: int) -> None:
        self._width, self._vocab_size = width_of(vocab_size), vocab_size
        self._text = pack(text[::-1], vocab_size)  # which stores a text last token first
        order = order_of(self._text, self._width)
        self._order = order.data
        self._entries = order
        self._length = len(text)

    def continuations(self, context: Sequence[int]) -> Int32Array:
        """What follows the places of the longest match, int32 [places, DEPTH]; ends with ids of `vocab_size`."""
        for length in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
            key = packed(list(context[-length:]), self._width)
            view = np.ndarray(self._length, f"S{len(key)}", self._text, MAX_DEPTH * self._width, (self._width,))
            sought = key.rstrip(b"\0")
            low = bisect_left(self._order, sought, key=view.item)
            high = bisect_right(self._order, sought, low, key=view.item)
            if high > low:
                return self._read(self._entries[low : min(high, low + PLACES)], length)
        return np.empty((0, DEPTH), np.int32)

    def draft(self, context: Sequence[int]) -> list[tuple[int, ...]]:
        """The NODES prefixes of continuations that occur most often, as paths."""
        rows = self.continuations(context)
        if not len(rows):
            return []
        rows = rows[np.lexsort(rows.T[::-1])]
        starts = np.ones(rows.shape, np.bool_)  # where a row begins a new prefix of each length
        starts[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
        starts &= np.logical_and.accumulate(rows < self._vocab_size, axis=1)
        depths, first = np.nonzero(starts.T)
        ends = np.append(first[1:], len(rows))
        ends[np.flatnonzero(np.diff(depths, append=-1))] = len(rows)
        best = np.argsort(first - ends, kind="stable")[:NODES]
        return [tuple(rows[first[at], : depths[at] + 1].tolist()) for at in best.tolist()]

    def _read(self, entries: np.typing.NDArray[np.uint32], length: int) -> Int32Array:
        size = DEPTH * self._width
        view = np.ndarray(self._length, f"V{size}", self._text, (MAX_DEPTH + length) * self._width, (self._width,))
        return from_big_endian(view[entries].view(np.uint8), self._width).reshape(-1, DEPTH)


def accepted(paths: Sequence[tuple[int, ...]], following: Sequence[int]) -> int:
    """The length of the longest path that the text follows."""
    return max((len(path) for path in paths if path == tuple(following[: len(path)])), default=0)
