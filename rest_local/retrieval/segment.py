"""Search an immutable text that is sorted by context: one binary search finds the longest matches of a context.

Several segments are searched together. A search reads the entries around the place of the context in each of them, few
of each if there are many segments, and compares all at once. Matches get shorter with the distance from the place. So
only a segment whose outermost entry matches longer than the worst row so far can have better ones, and more of it is
read.

If files are not in memory, a search reads pages one after another, and each takes about 0.1 ms from a disk. A disk
answers many requests in little more time than one. So the search is made beforehand, in all segments in step: the
system is told the next page of each segment before the first of them is used, and at the end the pages of all rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import (
    MAX_DEPTH,
    MAX_MATCH,
    Context,
    Int32Array,
    Int64Array,
    Rows,
    backwards,
    check_shape,
    from_big_endian,
    newest_of,
    order_of,
    pack,
    packed,
    width_of,
)
from rest_local.retrieval.sparse_index import Key, Sample, advise, beginning

Entries = npt.NDArray[np.uint32]
Windows = npt.NDArray[np.void]
Match = npt.NDArray[np.int8]
Numbers = npt.NDArray[np.intp]

LEAST = 6  # entries read at first on each side of a place
MOST = 1 << 15  # maximum entries read from a segment if the rows belong to dead documents: about 10 ms

# Bytes that agree -> tokens that agree, by width. Such small integers sort in linear time.
_TOKENS_IN = {width: (np.arange(MAX_MATCH * width + 1) // width).astype(np.int8) for width in (2, 3)}

# A place that took longer to find was not in memory. It takes 3 to 20 us if it is, and 500 us or more if not.
SLOW_NS = 200_000

_CHUNK = 1 << 16  # entries to look at together if documents are dead
_NEAR = 4096  # a larger interval of the order is not read at once


class Segment:
    """The tokens of some documents, and their positions sorted by the text before them (a reversed suffix array).

    In a damaged file a position may be out of range: then `rows` and `positions` raise IndexError. Other damage there
    only gives useless rows. All results are inside the text as long as a separator ends it, as a separator ends every
    document.

    Args:
        tokens: the content of `tokens.bin` (`retrieval.rows`), bytes or a map of the file
        order: the content of `order.bin`, any buffer of 32-bit little-endian positions in the reversed text
        length: number of tokens in the text
        vocab_size: ids at or above it are never returned
        dead: int64 [k, 2], sorted half-open intervals of the forward text, each a document that no search returns
        sample: the sample of `order`; without it a search reads more pages

    Raises:
        ValueError: `tokens` has another length, or the intervals are not sorted
    """

    def __init__(
        self,
        tokens: bytes | mmap,
        order: object,
        *,
        length: int,
        vocab_size: int,
        dead: Int64Array | None = None,
        sample: Sample | None = None,
    ) -> None:
        self.length = length
        self.vocab_size = vocab_size
        self.width = width_of(vocab_size)
        if len(tokens) != (length + MAX_DEPTH + MAX_MATCH) * self.width:
            raise ValueError(f"{len(tokens)} bytes are not the tokens of a text of {length}")
        self._tokens, self._order_file = tokens, order
        self._order = memoryview(order).cast("B").cast("I")  # type: ignore[arg-type]
        self._entries: Entries = np.frombuffer(self._order, np.uint32)
        self._sample = sample
        self._dead = None if dead is None or not len(dead) else _reversed(dead, length)
        self._views: dict[tuple[int, int], Windows] = {}
        self._readers: dict[int, Callable[[int], bytes]] = {}

    @classmethod
    def of(cls, documents: Iterable[npt.NDArray[np.integer]], vocab_size: int) -> Segment:
        """Make a segment in memory. An id outside the vocabulary ends a document. O(n log n), 6-7 bytes a token."""
        return cls.of_text(join(documents, vocab_size), vocab_size)

    @classmethod
    def of_text(cls, text: Int32Array, vocab_size: int, overlap: int = 0) -> Segment:
        """Make a segment in memory over one text. Its first `overlap` tokens serve as context but give no rows."""
        packed = pack(text, vocab_size)
        order = order_of(packed, width_of(vocab_size), len(text) - overlap)
        return cls(packed, order, length=len(text), vocab_size=vocab_size)

    def __len__(self) -> int:
        return self.length

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def has_dead(self) -> bool:
        return self._dead is not None

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """Return up to `limit` continuations of the longest matches of `context` (newest token last), longest first.

        If too many rows share the shortest match, any of them are taken; if the whole context (or MAX_MATCH tokens of
        it) agrees in too many rows, the middle ones. Takes one or two binary searches, about 30 us.

        Raises:
            IndexError: a position in a damaged file is outside the text
        """
        return search_all([(0, self)], context, limit, depth)

    def find(self, context: Context) -> tuple[int, int, int]:
        """Return (match, low, high): the longest match, 0..MAX_MATCH, and its half-open interval of `order`.

        Entries of dead documents can lie in the interval; `positions` and `count` leave them out.
        """
        key = self.key(context)
        match = self.around(key, 1)[1]
        key = key[: (int(match[0]) if len(match) else 0) * self.width]
        if not key:
            return 0, 0, len(self._entries)
        low = self.place(key)
        return len(key) // self.width, low, self.end(key, low)

    def around(self, key: bytes, limit: int, above: int = 0) -> tuple[Entries, Int32Array]:
        """Return the best `limit` entries of the order that match a key longer than `above`, and their matches."""
        least = key[: (above + 1) * self.width]
        if len(key) <= above * self.width or not len(self._entries):
            return self._entries[:0], np.empty(0, np.int32)
        at = self.place(key)
        if above and not self._reaches(at, least):
            return self._entries[:0], np.empty(0, np.int32)
        found = nearest([self], key, limit, 0, [at])
        count = np.count_nonzero(found.match > above) if above else len(found.match)
        return found.entries[:count], found.match[:count].astype(np.int32)

    def _reaches(self, at: int, least: bytes) -> bool:
        """Return True if an entry next to `at`, the place of a key's longest matches, begins with the bytes `least`."""
        read, sought = self._reader(len(least)), least.rstrip(b"\0")
        return any(read(position) == sought for position in self._order[max(at - 1, 0) : at + 1])

    def positions(self, low: int, high: int, limit: int | None = None) -> Int64Array:
        """Return where in the forward text the first `limit` live continuations among entries low..high lie, int64.

        Raises:
            IndexError: one is outside the text: `find` does not compare all entries, and a file may be damaged
        """
        found = np.empty(0, np.int64)
        while low < high and (limit is None or len(found) < limit):
            upto = high if limit is None else min(high, low + max(limit, _CHUNK if self.has_dead else 0))
            entries = self._entries[low:upto].astype(np.int64)
            if entries.min() == 0 or entries.max() >= self.length:
                raise IndexError(f"an entry of {low}..{upto} lies outside a text of {self.length}")
            found = np.concatenate([found, self.length - entries[self.live(entries)]])
            low = upto
        return found[:limit]

    def count(self, low: int, high: int) -> int:
        """Count the live entries low..high of the order. Reads them if documents are dead: 10 ms a million."""
        if self._dead is None:
            return high - low
        return sum(
            int(np.count_nonzero(self.live(self._entries[at : min(at + _CHUNK, high)])))
            for at in range(low, high, _CHUNK)
        )

    def key(self, context: Context) -> bytes:
        """Return the newest MAX_MATCH tokens of the context, newest first, in stored form, up to an unknown id."""
        return packed(newest_of(context, self.vocab_size), self.width)

    def place(self, key: bytes, sought: Key | None = None) -> int:
        """Return the first entry of the order that is not below a key of at least one token. Its best matches are near.

        `sought` is `sparse_index.beginning(key)`, if it is known. Raises IndexError for an entry outside the text.
        """
        low, high = self.interval(key, sought)
        return bisect_left(self._order, key.rstrip(b"\0"), low, high, key=self._reader(len(key)))

    def interval(self, key: bytes, sought: Key | None = None) -> tuple[int, int]:
        """Return (low, high): the place of a key is one of low..high, inclusive."""
        if self._sample is None:
            return 0, len(self._order)
        return self._sample.around(key, beginning(key) if sought is None else sought)

    def below(self, entry: int, key: bytes) -> bool:
        """Return True if an entry of the order lies before the place of a key."""
        return self._reader(len(key))(self._order[entry]) < key.rstrip(b"\0")

    def end(self, key: bytes, place: int) -> int:
        """Return the entry after the last one that begins with the key. `place` is the first one."""
        return bisect_right(self._order, key.rstrip(b"\0"), place, key=self._reader(len(key)))

    def read(self, low: int, high: int, depth: int, size: int) -> tuple[Entries, Windows]:
        """Return entries low..high of the order, and the stored text of each: `depth` tokens of its continuation, last
        first, then `size` bytes of its context, newest first. Raises IndexError for an entry outside the text.
        """
        entries = self._entries[low:high]
        return entries, self._window(MAX_DEPTH - depth, depth * self.width + size)[entries]

    def advise_sample(self, key: bytes) -> None:
        """Let the system read what `interval` reads, if it is mapped."""
        if self._sample is not None:
            self._sample.advise(beginning(key))

    def advise_order(self, low: int, high: int) -> None:
        """Let the system read entries low..high of the order, if they are mapped."""
        advise(self._order_file, [(4 * low, 4 * high)])

    def advise_text(self, low: int, high: int, depth: int, size: int) -> None:
        """Let the system read what `read` reads, if it is mapped, except the order itself."""
        before, after = (MAX_DEPTH - depth) * self.width, MAX_DEPTH * self.width + size
        starts = [entry * self.width for entry in self._order[low:high].tolist()]
        advise(self._tokens, [(start + before, start + after) for start in starts])

    def live(self, entries: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask of the entries whose document is not dead."""
        if self._dead is None:
            return np.ones(len(entries), np.bool_)
        inside: npt.NDArray[np.bool_] = (self._dead.searchsorted(entries, side="right") & 1) == 0
        return inside

    def slice(self, start: int, stop: int) -> Int32Array:
        """Return tokens start..stop of the forward text, 0 <= start <= stop <= length. A separator is `vocab_size`."""
        first = (MAX_DEPTH + self.length - stop) * self.width
        data = self._tokens[first : first + (stop - start) * self.width]
        return from_big_endian(np.frombuffer(data, np.uint8), self.width)[::-1]

    def release(self) -> None:
        self._views.clear()
        self._readers.clear()
        self._entries = np.empty(0, np.uint32)
        self._order.release()
        if self._sample:
            self._sample.release()
        self._tokens, self._order_file = b"", None

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """Return a function from a position to `size` bytes of the reversed text there, less zero bytes at their end.
        That keeps their order if all keys lose such bytes, and takes a third of the time of a function in Python.
        """
        reader = self._readers.get(size)
        if reader is None:
            view = np.ndarray(self.length, f"S{size}", self._tokens, MAX_DEPTH * self.width, (self.width,))
            reader = self._readers[size] = view.item
        return reader

    def _window(self, first: int, size: int) -> Windows:
        """Return a view with one item for each position: `size` bytes, which begin `first` tokens after the position.
        So indexing copies a row at once, without a loop.
        """
        window = self._views.get((first, size))
        if window is None:
            window = self._views[first, size] = np.ndarray(
                self.length, f"V{size}", self._tokens, first * self.width, (self.width,)
            )
        return window


def _reversed(dead: Int64Array, length: int) -> npt.NDArray[np.uint32]:
    """Turn intervals into ascending bounds in the reversed text. An odd number of bounds up to an entry means dead."""
    bounds = np.asarray(dead, np.int64).ravel()
    if bounds[0] < 0 or bounds[-1] > length or (np.diff(bounds) < 0).any():
        raise ValueError(f"the dead intervals are not sorted or not in a text of {length}")
    return (length - bounds[::-1]).astype(np.uint32)


def join(documents: Iterable[npt.NDArray[np.integer]], vocab_size: int) -> Int32Array:
    """Concatenate the documents, each followed by a separator (`vocab_size`): int32 [tokens + documents]."""
    separator = np.array([vocab_size], np.int32)
    parts = [part for document in documents for part in (np.asarray(document, np.int32), separator)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


class Nearest(NamedTuple):
    """Entries of the orders of several segments."""

    entries: Entries  # positions in the reversed text of their segment
    windows: Windows  # their stored text
    match: Match  # tokens that agree, 0 for a dead entry
    owners: Numbers  # number of each entry's segment

    def joined(self, other: Nearest) -> Nearest:
        """Append the other entries."""
        return Nearest(
            np.concatenate([self.entries, other.entries]),
            np.concatenate([self.windows, other.windows]),
            np.concatenate([self.match, other.match]),
            np.concatenate([self.owners, other.owners]),
        )

    def only(self, numbers: Numbers) -> Nearest:
        """Select the entries of these numbers, in their order."""
        return Nearest(self.entries[numbers], self.windows[numbers], self.match[numbers], self.owners[numbers])


def search_all(segments: Iterable[tuple[int, Segment]], context: Context, limit: int, depth: int) -> Rows:
    """Search several (start in the text, segment) of one vocabulary as `Segment.rows` does. Among equal matches the
    earlier segment comes first. The first segment takes about 40 us, each other one about 10 us.
    """
    check_shape(limit, depth)
    placed = [(start, segment) for start, segment in segments if segment.entries]
    key = placed[0][1].key(context) if placed else b""
    if not key:
        return Rows.empty(depth)
    first = placed[0][1]
    found = nearest([segment for _, segment in placed], key, limit, depth)
    tokens, shift = backwards(found.windows, depth, first.width)
    if len(placed) == 1:
        positions = np.subtract(placed[0][0] + first.length, found.entries, dtype=np.int64)
    else:
        positions = np.array([start + segment.length for start, segment in placed])[found.owners] - found.entries
    return Rows(tokens, found.match.astype(np.int32), positions, shift=shift, limit=first.vocab_size)


def nearest(
    segments: Sequence[Segment], key: bytes, limit: int, depth: int, places: Sequence[int] | None = None
) -> Nearest:
    """Return the best `limit` entries of segments with entries, longest match first, for a key of at least one token.

    The windows have `depth` continuation tokens. `places` is the key's place in each segment, if known. Raises
    IndexError for an entry outside the text.
    """
    reads, ends, sides, cold = _around_places(segments, key, limit, depth, places)
    entries, windows = map(np.concatenate, zip(*reads, strict=True)) if len(reads) > 1 else reads[0]
    match = matches(windows, key, segments[0].width)
    outermost = match[[side[3] for side in sides]] if sides else match[:0]
    masked = _without_dead(segments, entries, match, ends)
    best = (-masked).argsort(kind="stable")[:limit]
    worst = masked[best[-1]] if len(best) == limit else 0
    longest = outermost.max(initial=0)
    if longest > worst or longest * segments[0].width == len(key):
        found = Nearest(entries, windows, masked, np.array(ends).searchsorted(np.arange(len(match)), "right"))
        more = [_Side(segments[number], number, side, edge, int(match[at])) for number, side, edge, at in sides]
        return _Wider(segments, key, limit, depth, cold).search(found, more, int(worst))
    if not worst:
        best = best[: np.count_nonzero(masked[best])]
    owners = np.array(ends).searchsorted(best, "right") if len(segments) > 1 else best
    return Nearest(entries[best], windows[best], masked[best], owners)


def _around_places(
    segments: Sequence[Segment], key: bytes, limit: int, depth: int, places: Sequence[int] | None
) -> tuple[list[tuple[Entries, Windows]], list[int], list[tuple[int, int, int, int]], bool]:
    """Read the first entries of each segment. Return these; the number of entries up to the end of each segment; the
    sides on which a segment has more (its number, 0 for low, the edge, the entry next to it); and whether it was not in
    memory.
    """
    share, sought, size, cold = _share(limit, len(segments)), beginning(key), len(key), False
    reads, ends, sides, total = [], [], [], 0
    began = perf_counter_ns()
    for number, segment in enumerate(segments):
        at = segment.place(key, sought) if places is None else places[number]
        if not number and perf_counter_ns() - began > SLOW_NS:
            cold, share = True, max(limit // (2 * len(segments)), LEAST)  # a row costs more than a second read
            read_ahead(segments, key, share, depth)
        low = at - share if at > share else 0
        read = segment.read(low, at + share, depth, size)
        if low:
            sides.append((number, 0, low, total))
        total += len(read[0])
        if at + share < segment.entries:
            sides.append((number, 1, at + share, total - 1))
        reads.append(read)
        ends.append(total)
    return reads, ends, sides, cold


def matches(windows: Windows, key: bytes, width: int) -> Match:
    """Count the tokens at the end of each window that agree with the key, up to the first byte that differs."""
    count, size = len(windows), len(key)
    text = np.ndarray((count, size), np.uint8, windows, windows.itemsize - size, (windows.itemsize, 1))
    same = np.zeros((count, size + 1), np.bool_)
    np.equal(text, np.frombuffer(key, np.uint8), out=same[:, :-1])
    tokens: Match = _TOKENS_IN[width][same.argmin(axis=1)]
    return tokens


def _share(limit: int, segments: int) -> int:
    """Return the number of entries to read at first on each side of a place. One segment never has to be read again, 16
    have to be in half of all searches: 289, 273, 261, 263, 300 us with 6, 8, 12, 16, 24 entries (best times, busy
    machine).
    """
    return min(limit, max(3 * limit // segments, LEAST))


def _without_dead(segments: Sequence[Segment], entries: Entries, match: Match, ends: Sequence[int]) -> Match:
    """Return the matches with 0 for dead entries. `ends` is where the entries of each segment end."""
    begin, masked = 0, match
    for segment, end in zip(segments, ends, strict=True):
        if segment.has_dead:
            masked = match.copy() if masked is match else masked
            masked[begin:end] *= segment.live(entries[begin:end])
        begin = end
    return masked


class _Side:
    """The entries of a segment on one side of a place. `edge` is where the next ones begin."""

    __slots__ = ("edge", "match", "number", "read", "segment", "side")

    def __init__(self, segment: Segment, number: int, side: int, edge: int, match: int) -> None:
        self.segment, self.number, self.side, self.edge = segment, number, side, edge
        self.match = match  # the outermost entry's
        self.read = 0

    def next(self, count: int) -> tuple[int, int]:
        """Return the interval of the next `count` entries, or of fewer at the end of the order."""
        edge, self.read = self.edge, self.read + count
        self.edge = min(edge + count, self.segment.entries) if self.side else max(edge - count, 0)
        return (edge, self.edge) if self.side else (self.edge, edge)

    def better(self, worst: int) -> bool:
        """Return True if the next entries can match longer than `worst`."""
        end = self.segment.entries if self.side else 0
        return self.match > worst and self.edge != end and self.read < MOST


class _Wider:
    """A search that reads more and more of the segments that can still have better entries."""

    def __init__(self, segments: Sequence[Segment], key: bytes, limit: int, depth: int, cold: bool) -> None:
        self._segments, self._key, self._limit, self._depth, self._cold = segments, key, limit, depth, cold
        self._width = segments[0].width

    def search(self, found: Nearest, sides: list[_Side], worst: int) -> Nearest:
        """Search on from the entries that were found first. The last of these rows has a match of `worst`."""
        whole = len(self._key) // self._width
        for number in [side.number for side in sides if side.side and side.match == whole]:
            if middle := self._middle(number):
                sides = [side for side in sides if side.number != number] + middle
                found.match[found.owners == number] = 0
                worst = 0
        count = -(-_share(self._limit, len(self._segments)) // 2)
        while wider := [side for side in sides if side.better(worst)]:
            found = found.joined(self._read(wider, count))
            if len(found.match) >= self._limit:
                worst = int(np.sort(found.match)[-self._limit])
            count = min(2 * count, MOST >> 3)
        rank = found.owners - found.match.astype(np.intp) * len(self._segments)
        best = rank.argsort(kind="stable")[: self._limit]
        best = best[: np.count_nonzero(found.match[best])]
        return found.only(best)

    def _middle(self, number: int) -> list[_Side]:
        """Return two sides of the middle if more than `limit` entries agree with all of the key, else nothing."""
        segment, whole = self._segments[number], len(self._key) // self._width
        at = segment.place(self._key)
        end = segment.end(self._key, at)
        if end - at <= self._limit:
            return []
        return [_Side(segment, number, side, (at + end + 1) // 2, whole) for side in (0, 1)]

    def _read(self, sides: Sequence[_Side], count: int) -> Nearest:
        """Read the next entries of each side."""
        intervals = [side.next(count) for side in sides]
        size = len(self._key)
        if self._cold:
            for side, (low, high) in zip(sides, intervals, strict=True):
                side.segment.advise_text(low, high, self._depth, size)
        reads = [
            side.segment.read(low, high, self._depth, size) for side, (low, high) in zip(sides, intervals, strict=True)
        ]
        entries, windows = map(np.concatenate, zip(*reads, strict=True))
        match = matches(windows, self._key, self._width)
        begin = 0
        for side, (low, high) in zip(sides, intervals, strict=True):
            end = begin + high - low
            side.match = int(match[end - 1 if side.side else begin])
            if side.segment.has_dead:
                match[begin:end] *= side.segment.live(entries[begin:end])
            begin = end
        owners = np.array([side.number for side in sides]).repeat([high - low for low, high in intervals])
        return Nearest(entries, windows, match, owners)


def read_ahead(segments: Sequence[Segment], key: bytes, share: int, depth: int) -> None:
    """Read the pages of `share` entries on each side of a key's place in each segment. Changes no result. Raises
    IndexError for an entry outside the text.
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
    """Find the place of a key in each interval: a binary search of all in step."""
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
