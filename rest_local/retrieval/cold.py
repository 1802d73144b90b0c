"""Reads what a search will touch, for files that are not in memory.

A search reads pages one after another, and each takes about 0.1 ms from a disk. A disk answers many requests in little
more time than one. So the search is made beforehand, in all segments in step: the system is told the next page of each
segment before the first of them is used, and at the end the pages of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from mmap import MADV_WILLNEED, PAGESIZE, mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rest_local.retrieval.segment import Segment

SLOW_NS = 200_000
"""A place that took longer to find was not in memory. It takes 3 to 20 us if it is, and 500 us or more if not."""

_NEAR = 4096  # entries: a larger interval of the order is not read at once


def read_ahead(segments: Sequence[Segment], key: bytes, share: int, depth: int) -> None:
    """Read the pages of `share` entries on each side of the place of a key in each segment. Changes no result.

    Raises IndexError for an entry outside the text.
    """
    for segment in segments:
        segment.advise_sample(key)
    intervals = []
    for segment in segments:
        low, high = segment.interval(key)
        if high - low <= _NEAR:
            segment.advise_order(max(low - share, 0), min(high + share, segment.entries))
        intervals.append((segment, low, high))
    places = _places(intervals, key)
    for segment, at in places:
        segment.advise_order(max(at - share, 0), min(at + share, segment.entries))
    for segment, at in places:
        segment.advise_text(max(at - share, 0), min(at + share, segment.entries), depth, len(key))


def _places(intervals: list[tuple[Segment, int, int]], key: bytes) -> list[tuple[Segment, int]]:
    """The place of a key in each interval: a binary search of all in step."""
    found = []
    while intervals:
        for segment, low, high in intervals:
            if low < high:
                middle = (low + high) // 2
                segment.advise_text(middle, middle + 1, 0, len(key))
        narrower = []
        for segment, low, high in intervals:
            middle = (low + high) // 2
            if low == high:
                found.append((segment, low))
            elif segment.below(middle, key):
                narrower.append((segment, middle + 1, high))
            else:
                narrower.append((segment, low, middle))
        intervals = narrower
    return found


def advise(data: object, intervals: Iterable[tuple[int, int]]) -> None:
    """Let the system read these intervals of a mapped file, in bytes. Nothing for a buffer in memory."""
    if isinstance(data, mmap):
        pages = {(begin // PAGESIZE, (end - 1) // PAGESIZE) for begin, end in intervals if begin < end}
        for first, last in pages:
            data.madvise(MADV_WILLNEED, first * PAGESIZE, (last - first + 1) * PAGESIZE)
