"""Stored text and the order of its positions: where a context lies, and what stands there.

Knows nothing about files and manifests, and only the size of the vocabulary. It reads two buffers, in memory or mapped.
`rest_local.retrieval.segment` finds the best matches in one or several of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from mmap import mmap

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import (
    MAX_DEPTH,
    MAX_MATCH,
    Context,
    Int32Array,
    Int64Array,
    from_big_endian,
    newest_of,
    packed,
    width_of,
)
from rest_local.retrieval.sparse_index import Key, Sample, advise, beginning

Entries = npt.NDArray[np.uint32]
Windows = npt.NDArray[np.void]

_CHUNK = 1 << 16  # entries that are looked at together where documents are dead


class SortedText:
    """The tokens of some documents, and their positions sorted by the text before them (a reversed suffix array).

    tokens: the content of `tokens.bin` (see `packing`), bytes or a map of the file
    order: the content of `order.bin`, any buffer of 32-bit little-endian positions in the reversed text
    vocab_size: ids at or above it are never returned
    dead: int64 [k, 2], sorted half-open intervals of the forward text, each a document that no search returns
    sample: of `order`; without it a search reads more pages

    Raises ValueError if `tokens` has another length than `length` tokens, or for intervals that are not sorted. In a
    damaged file a position may be out of range: then `rows` and `positions` raise IndexError. Other damage there only
    gives useless rows. All results are inside the text as long as a separator ends it, as a separator ends every
    document.
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

    def __len__(self) -> int:
        return self.length

    @property
    def entries(self) -> int:
        """The number of entries of the order."""
        return len(self._entries)

    @property
    def has_dead(self) -> bool:
        """Whether any document is dead."""
        return self._dead is not None

    def positions(self, low: int, high: int, limit: int | None = None) -> Int64Array:
        """The positions of the first `limit` live continuations for entries low..high of the order: int64 indices in
        the forward text.

        Raises IndexError if one is outside the text: `find` does not compare all entries, and a file may be damaged.
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
        """The number of live entries in low..high of the order. Reads them if documents are dead: 10 ms a million."""
        if self._dead is None:
            return high - low
        return sum(
            int(np.count_nonzero(self.live(self._entries[at : min(at + _CHUNK, high)])))
            for at in range(low, high, _CHUNK)
        )

    def key(self, context: Context) -> bytes:
        """The newest MAX_MATCH tokens of the context, newest first, in stored form. Ends before an unknown id."""
        return packed(newest_of(context, self.vocab_size), self.width)

    def place(self, key: bytes, sought: Key | None = None) -> int:
        """The first entry of the order that is not below a key of at least one token: its best matches are around it.

        sought: `sample.beginning(key)`, if it is known. Raises IndexError for an entry outside the text.
        """
        low, high = self.interval(key, sought)
        return bisect_left(self._order, key.rstrip(b"\0"), low, high, key=self._reader(len(key)))

    def interval(self, key: bytes, sought: Key | None = None) -> tuple[int, int]:
        """(low, high): the place of a key is one of low..high, inclusive."""
        if self._sample is None:
            return 0, len(self._order)
        return self._sample.around(key, beginning(key) if sought is None else sought)

    def below(self, entry: int, key: bytes) -> bool:
        """Whether an entry of the order lies before the place of a key."""
        return self._reader(len(key))(self._order[entry]) < key.rstrip(b"\0")

    def end(self, key: bytes, place: int) -> int:
        """The entry after the last one that begins with the key. place: the first one."""
        return bisect_right(self._order, key.rstrip(b"\0"), place, key=self._reader(len(key)))

    def read(self, low: int, high: int, depth: int, size: int) -> tuple[Entries, Windows]:
        """Entries low..high of the order, and of each the stored text: `depth` tokens of its continuation, last first,
        then `size` bytes of its context, newest first. Raises IndexError for an entry outside the text.
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
        """Whether each entry is of a document that is not dead."""
        if self._dead is None:
            return np.ones(len(entries), np.bool_)
        inside: npt.NDArray[np.bool_] = (self._dead.searchsorted(entries, side="right") & 1) == 0
        return inside

    def slice(self, start: int, stop: int) -> Int32Array:
        """Tokens start..stop of the forward text, 0 <= start <= stop <= length. A separator is `vocab_size`."""
        first = (MAX_DEPTH + self.length - stop) * self.width
        data = self._tokens[first : first + (stop - start) * self.width]
        return from_big_endian(np.frombuffer(data, np.uint8), self.width)[::-1]

    def release(self) -> None:
        """Release the buffers, so that a mapped file can be closed."""
        self._views.clear()
        self._readers.clear()
        self._entries = np.empty(0, np.uint32)
        self._order.release()
        if self._sample:
            self._sample.release()
        self._tokens, self._order_file = b"", None

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """A function from a position to `size` bytes of the reversed text there, less zero bytes at their end. That
        keeps their order if all keys lose such bytes, and takes a third of the time of a function in Python.
        """
        reader = self._readers.get(size)
        if reader is None:
            view = np.ndarray(self.length, f"S{size}", self._tokens, MAX_DEPTH * self.width, (self.width,))
            reader = self._readers[size] = view.item
        return reader

    def _window(self, first: int, size: int) -> Windows:
        """A view with one item for each position: `size` bytes, which begin `first` tokens after the position. So
        indexing copies a row at once, without a loop.
        """
        window = self._views.get((first, size))
        if window is None:
            window = self._views[first, size] = np.ndarray(
                self.length, f"V{size}", self._tokens, first * self.width, (self.width,)
            )
        return window


def _reversed(dead: Int64Array, length: int) -> npt.NDArray[np.uint32]:
    """Intervals of the forward text as bounds in the reversed text, ascending: an entry is dead if the number of bounds
    up to it is odd.
    """
    bounds = np.asarray(dead, np.int64).ravel()
    if bounds[0] < 0 or bounds[-1] > length or (np.diff(bounds) < 0).any():
        raise ValueError(f"the dead intervals are not sorted or not in a text of {length}")
    return (length - bounds[::-1]).astype(np.uint32)
