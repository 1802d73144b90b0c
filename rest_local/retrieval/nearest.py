"""The best matches of a context in several segments, found together.

In each segment the entries around the place of the context are read, few of each if there are many segments, and all of
them are compared at once. Matches get shorter with the distance from the place. So only a segment whose outermost entry
matches longer than the worst row so far can have better ones, and more of it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import MAX_MATCH, Context, Int64Array, Rows, backwards, check_shape

if TYPE_CHECKING:
    from rest_local.retrieval.segment import Entries, Segment, Windows

Match = npt.NDArray[np.int8]

LEAST = 4  # entries read on each side of a place
MOST = 1 << 15  # entries of a segment that are read in a search where the rows are of dead documents: 10 ms

# Bytes that agree -> tokens that agree, by width. Such small integers sort in linear time.
_TOKENS_IN = {width: (np.arange(MAX_MATCH * width + 1) // width).astype(np.int8) for width in (2, 3)}


class Nearest(NamedTuple):
    """entries: those that were read, as positions in the reversed text of their segment; windows: their stored text;
    match: int8, 0 for dead ones; owners: the number of the segment of each, None if there is only one segment; best:
    the numbers of the best entries, longest match first.
    """

    entries: Entries
    windows: Windows
    match: Match
    owners: npt.NDArray[np.integer] | None
    best: npt.NDArray[np.intp]


def search_all(segments: Iterable[tuple[int, Segment]], context: Context, limit: int, depth: int) -> Rows:
    """As `Segment.rows`, over several (start in the text, segment) of one vocabulary. Among equal matches the earlier
    segment comes first.

    The first segment takes about 30 us, each other one about 5 us.
    """
    check_shape(limit, depth)
    placed = [(start, segment) for start, segment in segments if segment.entries]
    key = placed[0][1].key(context) if placed else b""
    if not key:
        return Rows.empty(depth)
    first = placed[0][1]
    found = nearest([segment for _, segment in placed], key, limit, depth)
    best = found.best
    tokens, shift = backwards(found.windows[best], depth, first.width)
    if found.owners is None:
        positions = np.subtract(placed[0][0] + first.length, found.entries[best], dtype=np.int64)
    else:
        ends = np.array([start + segment.length for start, segment in placed], np.int64)
        positions = ends[found.owners[best]] - found.entries[best]
    return Rows(tokens, found.match[best].astype(np.int32), positions, shift=shift, limit=first.vocab_size)


def nearest(
    segments: Sequence[Segment], key: bytes, limit: int, depth: int, places: Sequence[int] | None = None
) -> Nearest:
    """The best `limit` entries of segments with entries, for a key of at least one token.

    depth: continuation tokens in the windows. places: of the key in each segment, where they are known. Raises
    IndexError for an entry outside the text.
    """
    several = len(segments) > 1
    share = _share(limit, len(segments))
    if places is None:
        places = [segment.place(key) for segment in segments]
    reads, spans, edges, total = [], [], [], 0
    for segment, at in zip(segments, places, strict=True):
        low, high = max(at - share, 0), min(at + share, segment.entries)
        reads.append(segment.read(low, high, depth, len(key)))
        spans.append((low, high))
        edges.append(total)
        total += high - low
        edges.append(total - 1)
    entries, windows = map(np.concatenate, zip(*reads, strict=True)) if several else reads[0]
    match = matches(windows, key, segments[0].width)
    outermost = match[edges]
    owners = np.arange(len(segments)).repeat([high - low for low, high in spans]) if several else None
    if any([segment.has_dead for segment in segments]):
        match = _without_dead(segments, entries, match, owners)
    best = (-match).argsort(kind="stable")[:limit]
    worst = match[best[-1]] if len(best) == limit else 0
    longest = outermost.max()
    if longest > worst or longest * segments[0].width == len(key):
        search = _Wider(segments, key, depth, places, spans, outermost.tolist())
        return search.best(Nearest(entries, windows, match, owners, best), limit, int(worst))
    if not worst:
        best = best[: np.count_nonzero(match[best])]
    return Nearest(entries, windows, match, owners, best)


def _share(limit: int, segments: int) -> int:
    """The number of entries to read at first on each side of a place."""
    return limit if segments == 1 else max(3 * limit // (2 * segments), LEAST)


def matches(windows: Windows, key: bytes, width: int) -> Match:
    """For each window the number of tokens at its end that agree with the key, up to the first byte that differs."""
    count, size = len(windows), len(key)
    text = np.ndarray((count, size), np.uint8, windows, windows.itemsize - size, (windows.itemsize, 1))
    same = np.zeros((count, size + 1), np.bool_)
    np.equal(text, np.frombuffer(key, np.uint8), out=same[:, :-1])
    tokens: Match = _TOKENS_IN[width][same.argmin(axis=1)]
    return tokens


def _without_dead(
    segments: Sequence[Segment], entries: Entries, match: Match, owners: npt.NDArray[np.integer] | None
) -> Match:
    """The matches, 0 for dead entries."""
    if owners is None:
        return match * segments[0].live(entries)
    match = match.copy()
    for number, segment in enumerate(segments):
        if segment.has_dead:
            of_segment = owners == number
            match[of_segment] *= segment.live(entries[of_segment])
    return match


class _Span:
    """What was read of one segment: entries low..high of its order. edges: the matches of the outermost two."""

    __slots__ = ("edges", "high", "low", "number", "segment")

    def __init__(self, number: int, segment: Segment, low: int, high: int, edges: list[int]) -> None:
        self.number, self.segment, self.low, self.high, self.edges = number, segment, low, high, edges

    def wider(self, by: int, worst: int) -> list[_Part]:
        """The next `by` entries on each side whose outermost entry matches longer than `worst`."""
        low, high, parts = self.low, self.high, list[_Part]()
        if high - low >= MOST:
            return parts
        if self.edges[0] > worst and low:
            self.low = max(low - by, 0)
            parts.append((self, 0, self.low, low))
        if self.edges[1] > worst and high < self.segment.entries:
            self.high = min(high + by, self.segment.entries)
            parts.append((self, 1, high, self.high))
        return parts


_Part = tuple[_Span, int, int, int]  # entries to read: of which span, on which side (0: low), from, to


class _Wider:
    """A search that reads more and more of those segments that can still have better entries."""

    def __init__(
        self,
        segments: Sequence[Segment],
        key: bytes,
        depth: int,
        places: Sequence[int],
        spans: Sequence[tuple[int, int]],
        edges: Sequence[int],
    ) -> None:
        self._key, self._depth, self._places = key, depth, places
        self._width = segments[0].width
        self._whole = len(key) // self._width
        self._spans = [
            _Span(number, segment, low, high, list(edges[2 * number : 2 * number + 2]))
            for number, (segment, (low, high)) in enumerate(zip(segments, spans, strict=True))
        ]

    def best(self, found: Nearest, limit: int, worst: int) -> Nearest:
        """The result of a search that began with `found` and whose last row has a match of `worst`."""
        by = share = -(-_share(limit, len(self._spans)) // 2)
        entries, windows, match, owners, _ = found
        if owners is None:
            owners = np.zeros(len(entries), np.intp)
        if self._to_the_middle(limit):
            anew = [span.number for span in self._spans if span.low == span.high]
            match = np.where(np.isin(owners, anew), np.int8(0), match)
            worst = 0
        while wanted := [part for span in self._spans for part in span.wider(by, worst)]:
            more = self._read(wanted)
            entries, windows, match, owners = map(np.concatenate, zip((entries, windows, match, owners), more, strict=True))
            if len(match) >= limit:
                worst = int(np.sort(match)[-limit])
            by += share
        rank = owners - match.astype(np.intp) * len(self._spans)  # among equal matches the earlier segment first
        best = rank.argsort(kind="stable")[:limit]
        return Nearest(entries, windows, match, owners, best[: np.count_nonzero(match[best])])

    def _to_the_middle(self, limit: int) -> bool:
        """Begin in the middle of the entries that agree with all of the key, where a segment has more than `limit` of
        them. False if there is no such segment.
        """
        found = False
        for span in self._spans:
            if span.edges[1] == self._whole and span.high < span.segment.entries:
                at = self._places[span.number]
                end = span.segment.end(self._key, at)
                if end - at > limit:
                    span.low = span.high = (at + end + 1) // 2
                    span.edges[0] = self._whole
                    found = True
        return found

    def _read(self, wanted: Sequence[_Part]) -> tuple[Entries, Windows, Match, npt.NDArray[np.integer]]:
        """Read parts of the order, and set the edges of their spans."""
        size = len(self._key)
        reads = [span.segment.read(low, high, self._depth, size) for span, _, low, high in wanted]
        entries, windows = map(np.concatenate, zip(*reads, strict=True))
        match = matches(windows, self._key, self._width)
        owners = np.array([span.number for span, *_ in wanted]).repeat([len(part) for part, _ in reads])
        begin = 0
        for (span, side, low, high) in wanted:
            end = begin + high - low
            span.edges[side] = int(match[end - 1 if side else begin])
            if span.segment.has_dead:
                match[begin:end] *= span.segment.live(entries[begin:end])
            begin = end
        return entries, windows, match, owners
