"""An immutable text, sorted by context: one binary search finds the longest matches of a context.

Knows nothing about files and manifests, and only the size of the vocabulary. It reads two buffers, in memory or mapped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from mmap import mmap

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import (
    MAX_DEPTH,
    MAX_MATCH,
    Context,
    Int32Array,
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

_Entries = npt.NDArray[np.uint32]


class Segment:
    """The tokens of some documents, and their positions sorted by the text before them (a reversed suffix array).

    tokens: the content of `tokens.bin` (see `packing`), bytes or a map of the file
    order: the content of `order.bin`, any buffer of 32-bit little-endian positions in the reversed text
    vocab_size: ids at or above it are never returned

    Raises ValueError if `tokens` has another length than `length` tokens. In a damaged file a position may be out of
    range: then `rows` and `positions` raise IndexError. Other damage there only gives useless rows. All results are
    inside the text as long as a separator ends it, as a separator ends every document.
    """

    def __init__(
        self,
        tokens: bytes | mmap,
        order: object,
        *,
        length: int,
        vocab_size: int,
        dead: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.length = length
        self.dead = dead
        self.vocab_size = vocab_size
        self.width = width_of(vocab_size)
        if len(tokens) != (length + MAX_DEPTH + MAX_MATCH) * self.width:
            raise ValueError(f"{len(tokens)} bytes are not the tokens of a text of {length}")
        self._tokens = tokens
        self._order = memoryview(order).cast("B").cast("I")  # type: ignore[arg-type]
        self._entries: _Entries = np.frombuffer(self._order, np.uint32)
        self._windows: dict[tuple[int, int], npt.NDArray[np.void]] = {}
        # Bytes that agree -> tokens that agree, for a whole window. Such small integers sort in linear time.
        self._tokens_in = (np.arange(MAX_MATCH * self.width + 1) // self.width).astype(np.int8)

    @classmethod
    def of(cls, documents: Iterable[npt.NDArray[np.integer]], vocab_size: int) -> Segment:
        """A segment in memory. An id outside the vocabulary ends a document. O(n log n), 6-7 bytes a token."""
        return cls.of_text(join(documents, vocab_size), vocab_size)

    @classmethod
    def of_text(cls, text: Int32Array, vocab_size: int, overlap: int = 0) -> Segment:
        """A segment in memory over one text. Its first `overlap` tokens serve as context but give no rows."""
        packed = pack(text, vocab_size)
        order = order_of(packed, width_of(vocab_size), len(text) - overlap)
        return cls(packed, order, length=len(text), vocab_size=vocab_size)

    def __len__(self) -> int:
        return self.length

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """Up to `limit` continuations of the longest matches of `context` (newest token last), longest first.

        If too many rows share the shortest match, any of them are taken; if the whole context (or MAX_MATCH tokens of
        it) agrees in too many rows, the middle ones. Takes one or two binary searches, 30 to 40 us.
        """
        check_shape(limit, depth)
        return self.search(self.key(context), limit, depth)

    def search(self, key: bytes, limit: int, depth: int, above: int = 0, start: int = 0) -> Rows:
        """`rows` for a context in the form of `key`: only matches longer than `above`. `start`: the offset of this
        segment in the whole text.
        """
        found, match = self.around(key, limit, above)
        windows = self._window(MAX_DEPTH - depth, depth + 1)[found]
        tokens, shift = backwards(windows, depth, self.width)
        positions = np.subtract(start + self.length, found, dtype=np.int64)
        return Rows(tokens, match, positions, shift=shift, limit=self.vocab_size)

    def find(self, context: Context) -> tuple[int, int, int]:
        """(match, low, high): the longest match, 0..MAX_MATCH, and the half-open interval of `order` that has it."""
        key = self.key(context)
        _, match = self.around(key, 1)
        longest = int(match[0]) if len(match) else 0
        key = key[: longest * self.width]
        text = self._text(len(key))
        low = bisect_left(self._order, key, key=text)
        return longest, low, bisect_right(self._order, key, lo=low, key=text)

    def positions(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """The positions of the continuations for entries low..high of the order: int64 indices in the forward text.

        Raises IndexError if one is outside the text: `find` does not compare all entries, and a file may be damaged.
        """
        entries = self._entries[low:high].astype(np.int64)
        if len(entries) and (entries.min() == 0 or entries.max() >= self.length):
            raise IndexError(f"an entry of {low}..{high} lies outside a text of {self.length}")
        return self.length - entries

    def key(self, context: Context) -> bytes:
        """The newest MAX_MATCH tokens of the context, newest first, in stored form. Ends before an unknown id."""
        return packed(newest_of(context, self.vocab_size), self.width)

    def around(self, key: bytes, limit: int, above: int = 0) -> tuple[_Entries, Int32Array]:
        """The best `limit` entries of the order for a key with a match longer than `above`: their positions in the
        reversed text, and their matches.

        Matches get shorter with the distance from the insertion point, so the best `limit` of all entries are among
        the `limit` entries on each side.
        """
        text = self._text(len(key))
        at = bisect_left(self._order, key, key=text)
        low = max(at - limit, 0)
        entries = self._entries[low : at + limit]
        whole = len(key) // self.width
        poor = above and not self._reaches(at, key[: (above + 1) * self.width])
        if poor or whole <= above or not len(entries):
            return entries[:0], np.empty(0, np.int32)
        match = self._match(entries, key)
        if at - low < len(match) and match[at - low] == whole:
            high = bisect_right(self._order, key, lo=at, key=text)
            if high - at > limit:
                middle = (at + high - limit) // 2
                return self._entries[middle : middle + limit], np.full(limit, whole, np.int32)
        best = (-match).argsort(kind="stable")[:limit]
        longest: Int32Array = match[best].astype(np.int32)
        if longest[-1] <= above:
            longest = longest[: np.count_nonzero(longest > above)]
        return entries[best[: len(longest)]], longest

    def slice(self, start: int, stop: int) -> Int32Array:
        """Tokens start..stop of the forward text, 0 <= start <= stop <= length. A separator is `vocab_size`."""
        first = (MAX_DEPTH + self.length - stop) * self.width
        data = self._tokens[first : first + (stop - start) * self.width]
        return from_big_endian(np.frombuffer(data, np.uint8), self.width)[::-1]

    def release(self) -> None:
        """Release the buffers, so that a mapped file can be closed."""
        self._windows.clear()
        self._entries = np.empty(0, np.uint32)
        self._order.release()
        self._tokens = b""

    def _reaches(self, at: int, least: bytes) -> bool:
        """Whether an entry next to `at`, where the longest matches of a key are, begins with the bytes `least`."""
        text = self._text(len(least))
        order = self._order[max(at - 1, 0) : at + 1]
        return any(text(position) == least for position in order)

    def _match(self, entries: _Entries, key: bytes) -> npt.NDArray[np.int8]:
        """For each entry the number of tokens that agree with the key, up to the first byte that differs."""
        windows = np.ndarray(
            (len(entries), len(key)), np.uint8, self._window(MAX_DEPTH, len(key) // self.width)[entries]
        )
        same = np.zeros((len(entries), len(key) + 1), np.bool_)
        np.equal(windows, np.frombuffer(key, np.uint8), out=same[:, :-1])
        tokens: npt.NDArray[np.int8] = self._tokens_in[same.argmin(axis=1)]
        return tokens

    def _window(self, first: int, count: int) -> npt.NDArray[np.void]:
        """A view with one item for each position: `count` tokens, which begin `first` tokens after the position. So
        indexing copies a row at once, without a loop.
        """
        window = self._windows.get((first, count))
        if window is None:
            window = self._windows[first, count] = np.ndarray(
                self.length, f"V{count * self.width}", self._tokens, first * self.width, (self.width,)
            )
        return window

    def _text(self, size: int) -> Callable[[int], bytes]:
        """A function from a position to `size` bytes of the reversed text there, for bisect."""
        tokens, width, first = self._tokens, self.width, MAX_DEPTH * self.width

        def text(position: int) -> bytes:
            begin = position * width + first
            return tokens[begin : begin + size]

        return text


def search_all(segments: Iterable[tuple[int, Segment]], context: Context, limit: int, depth: int) -> Rows:
    """As `Segment.rows`, over several (start in the text, segment) of one vocabulary. Among equal matches the earlier
    segment comes first.

    A segment costs one binary search unless it has better matches than the segments before it.
    """
    check_shape(limit, depth)
    best: Rows | None = None
    key = b""
    for start, segment in segments:
        if best is None:
            key = segment.key(context)
            best = segment.search(key, limit, depth, start=start)
            continue
        above = int(best.match[-1]) if len(best) == limit else 0
        best = Rows.merge([best, segment.search(key, limit, depth, above, start)], limit, depth)
    return Rows.empty(depth) if best is None else best


def join(documents: Iterable[npt.NDArray[np.integer]], vocab_size: int) -> Int32Array:
    """The documents one after another, a separator (`vocab_size`) after each: int32 [tokens + documents]."""
    separator = np.array([vocab_size], np.int32)
    parts = [part for document in documents for part in (np.asarray(document, np.int32), separator)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
