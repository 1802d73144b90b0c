"""Search text that still grows: a prompt and the answer so far, or all earlier output.

The newest tokens are in a short tail. A full tail is folded into an in-memory segment, and a segment merges with the
one before it while that is not larger than twice its size. So there are O(log n) segments and a token is sorted
O(log n) times. The rows are those that one segment over the whole text would give.

The tail is searched in one of two ways with the same result: by `TailIndex`, a plain dictionary, or with numpy if a
token occurs too often for that. A step makes one lookup right after a forward pass, when caches are cold: there the
dozen numpy calls took 100 us and the dictionary 45 us (25 and 17 us with warm caches).
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import (
    MAX_DEPTH,
    MAX_MATCH,
    MAX_VOCABULARY,
    Context,
    Int32Array,
    Int64Array,
    Rows,
    check_shape,
    newest_of,
    packed,
    width_of,
)
from rest_local.retrieval.segment import Segment

# Size of a full tail in tokens. Comparing so many with the newest token takes about a microsecond.
TAIL = 2048

# Numpy is faster than the index if the newest token has more places in the tail, or more at which the token before it
# agrees too.
MAX_PLACES = 256
MAX_LONGER = 64

_FEW = 64  # fewer tokens are added one by one: after a forward pass numpy took 25 us for two tokens, a loop takes 3 us
_MANY = 8  # numpy compares up to so many times `limit` places without narrowing them first
_PROMISING = 4  # With this many agreeing tokens, one comparison of the whole context is worth trying.

_END = -1  # the end of a document, or no text yet
_NO_TOKEN = -2  # differs from every entry of the buffer
_FRONT = MAX_MATCH  # entries before the text, so that looking back from the first token needs no bounds check

Found = list[tuple[int, int]]  # (number of agreeing tokens, buffer index of the last of them), best first


class GrowingText:
    """A text that grows at its end and is searched like a segment. Takes at most 11 bytes a token.

    Args:
        vocab_size: ids outside 0..vocab_size-1 end a document, and `extend([-1])` separates two texts. The default
            allows any id at 3 bytes a token.
        tail: size of a full tail in tokens
    """

    def __init__(self, vocab_size: int = MAX_VOCABULARY, tail: int = TAIL) -> None:
        self._width = width_of(vocab_size)
        self._vocab_size = vocab_size
        self._tail = max(tail, 1)
        self._length = 0
        self._segments: list[tuple[int, Segment]] = []  # (end in the text, segment); each starts where the last ends
        self._buffer: Int32Array = np.full(_FRONT + 4096 + MAX_DEPTH, _END, np.int32)
        self._view = self._buffer.data  # the same memory; Python reads single entries of it faster
        self._index = TailIndex()  # lacks the last token

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Int32Array:
        """Return the text so far, int32 [len], -1 at the end of a document: a view, valid until the next `extend`."""
        return self._buffer[_FRONT : _FRONT + self._length]

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Add tokens at the end. Amortised O(log n) for each token; a full tail is sorted at once."""
        if isinstance(tokens, list) and len(tokens) < _FEW and self._needed + len(tokens) <= len(self._buffer):
            for place, token in enumerate(tokens, _FRONT + self._length):
                self._view[place] = token if 0 <= token < self._vocab_size else _END
            self._length += len(tokens)
            self._fold()
            return
        added = np.asarray(tokens, np.int32).reshape(-1)
        end = self._length + len(added)
        if self._needed + len(added) > len(self._buffer):
            larger = np.full(_FRONT + 2 * end + MAX_DEPTH, _END, np.int32)
            larger[: _FRONT + self._length] = self._buffer[: _FRONT + self._length]
            self._buffer, self._view = larger, larger.data
        if len(added) and (added.min() < 0 or added.max() >= self._vocab_size):
            added = np.where((added >= 0) & (added < self._vocab_size), added, _END)
        self._buffer[_FRONT + self._length : _FRONT + end] = added
        self._length = end
        self._fold()

    def truncate(self, length: int) -> None:
        """Drop everything after the first `length` tokens (a rewind).

        Sorts a segment that is cut again. If none is, it takes 1 us, and 0.2 us for each token.

        Raises:
            ValueError: the text is shorter
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate a text of {self._length} tokens to {length}")
        if length >= self._folded:
            self._index.shorten(self._view, _FRONT + length - 1)
        else:
            self._index = TailIndex()
        while self._segments and self._segments[-1][0] > length:
            self._segments.pop()
        self._buffer[_FRONT + length : _FRONT + self._length] = _END
        self._length = length
        self._fold()

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """Return rows as `Segment.rows` does, over all text so far. Among equal matches the newer text comes first.

        The end of the text has no continuation and gives no row, so the text can be searched with its own end.
        """
        check_shape(limit, depth)
        newest = newest_of(context, self._vocab_size)
        if not newest or not self._length:
            return Rows.empty(depth)
        begin, end = _FRONT + self._folded, _FRONT + self._length - 1
        found = self._index.best(self._view, begin, end, newest, limit)
        if found is not None and not self._segments:
            return TailRows(self._view, found, depth, self._vocab_size)
        if found is None:
            positions, match = self._tail_rows(newest, limit)
        else:
            positions = np.array([place - (_FRONT - 1) for _, place in found], np.int64)
            match = np.array([match for match, _ in found], np.int32)
        if self._segments:
            positions, match = self._with_segments(positions, match, packed(newest, self._width), limit)
        window = np.ndarray(len(self._buffer) - _FRONT - depth + 1, f"V{4 * depth}", self._buffer, 4 * _FRONT, (4,))
        tokens: Int32Array = np.ndarray((len(positions), depth), np.int32, window[positions])
        return Rows(tokens, match, positions, limit=self._vocab_size)

    @property
    def room(self) -> int:
        """Return the number of tokens that can be added before any are sorted."""
        return self._tail - 1 - (self._length - self._folded)

    @property
    def _needed(self) -> int:
        return _FRONT + self._length + MAX_DEPTH

    @property
    def _folded(self) -> int:
        return self._segments[-1][0] if self._segments else 0

    def _fold(self) -> None:
        """Sort a full tail, together with the segments before it that are not larger than twice its size."""
        if self._length - self._folded < self._tail:
            return
        while self._segments:
            start = self._segments[-2][0] if len(self._segments) > 1 else 0
            if self._segments[-1][0] - start > 2 * (self._length - self._segments[-1][0]):
                break
            self._segments.pop()
        start = self._folded
        overlap = min(start, MAX_MATCH)  # the previous segment holds the context of the first tokens
        text = self._buffer[_FRONT + start - overlap : _FRONT + self._length]
        self._segments.append((self._length, Segment.of_text(text, self._vocab_size, overlap)))

    def _tail_rows(self, newest: list[int], limit: int) -> tuple[Int64Array, Int32Array]:
        """Find the best matches in the tail. `newest` is the context, newest first, 1..MAX_MATCH tokens."""
        buffer, begin = self._buffer, _FRONT + self._folded
        at = (buffer[begin : _FRONT + self._length - 1] == newest[0]).nonzero()[0]  # counted from `begin`
        for back in range(1, len(newest)):
            if len(at) <= _MANY * limit:
                break
            closer = at[buffer[at + (begin - back)] == newest[back]]
            if len(closer) < limit:  # too few, so the others are needed as well
                break
            at = closer
        if not len(at):
            return np.empty(0, np.int64), np.empty(0, np.int32)
        sought = np.array([*newest, _NO_TOKEN], np.int32)
        size = 4 * len(sought)
        windows = np.ndarray(len(buffer) - begin, f"V{size}", buffer, 4 * (begin - len(newest)), (4,))[at]
        before = np.ndarray((len(at), len(sought)), np.int32, windows, size - 4, (size, -4))
        match = (before != sought).argmax(axis=1)
        best = match.argsort(kind="stable")[: -limit - 1 : -1]  # newer text first among equal matches
        return at[best] + (begin - _FRONT + 1), match[best].astype(np.int32)

    def _with_segments(
        self, positions: Int64Array, match: Int32Array, key: bytes, limit: int
    ) -> tuple[Int64Array, Int32Array]:
        """Merge these rows of the tail with those of all segments, and keep the best. Newer segments are searched
        first; an older one ends after one binary search unless it has a longer match than the last row so far.
        """
        for end, segment in reversed(self._segments):
            least = int(match[limit - 1]) if len(match) >= limit else 0
            last = end == self._length  # Its rows may contain the end of the text, which is dropped.
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


class TailIndex:
    """The places of each token in the buffer, ascending. `shorten` it before the text is truncated."""

    def __init__(self) -> None:
        self._by_token: dict[int, list[int]] = {}
        self._begin = self._end = 0

    def best(self, view: memoryview, begin: int, end: int, newest: list[int], limit: int) -> Found | None:
        """Return the `limit` best matches of `newest` (newest first, at least one token) at the buffer indices
        begin..end-1, or None if there are too many places. Among equal matches the later comes first. Adds new tokens
        to the index.
        """
        self._update(view, begin, end)
        places = self._by_token.get(newest[0], [])
        if len(places) > MAX_PLACES:
            return None
        longest = len(newest)
        before = newest[1] if longest > 1 else None
        longer = [place for place in places if view[place - 1] == before]
        if len(longer) > MAX_LONGER:
            return None
        found: Found = []
        whole = array("i", newest[::-1])
        for place in longer:
            match = 2
            while match < longest and view[place - match] == newest[match]:
                match += 1
                if match == _PROMISING and view[place - longest + 1 : place + 1] == whole:
                    match = longest
            found.append((match, place))
        found.sort(reverse=True)
        del found[limit:]
        if len(found) < limit:
            single = [place for place in reversed(places) if view[place - 1] != before]
            found += [(1, place) for place in single[: limit - len(found)]]
        return found

    def shorten(self, view: memoryview, end: int) -> None:
        """Drop the places from `end` on."""
        for place in range(self._end - 1, max(end, self._begin) - 1, -1):
            token = view[place]
            self._by_token[token].pop()
            if not self._by_token[token]:
                del self._by_token[token]
        self._end = min(self._end, max(end, self._begin))

    def _update(self, view: memoryview, begin: int, end: int) -> None:
        by_token = self._by_token
        if begin != self._begin:
            by_token.clear()
            self._begin = self._end = begin
        for place in range(self._end, end):
            token = view[place]
            if token in by_token:
                by_token[token].append(place)
            else:
                by_token[token] = [place]
        self._end = max(end, begin)


class TailRows(Rows):
    """Rows that are read from the buffer on demand, so they are valid only until the text changes. The arrays of `Rows`
    are made when they are first used.
    """

    __slots__ = ("_depth", "_found", "_view")

    def __init__(self, view: memoryview, found: Found, depth: int, limit: int) -> None:
        self._view, self._found, self._depth = view, found, depth
        self.limit, self._shift, self._continuations = limit, 0, None

    def __getattr__(self, name: str) -> Any:
        """Make an array of `Rows` on its first use."""
        if name == "match":
            self.match = np.array([match for match, _ in self._found], np.int32)
        elif name == "positions":
            self.positions = np.array([place + 1 - _FRONT for _, place in self._found], np.int64)
        elif name == "_tokens":
            rows = [self.row(number) for number in range(len(self))]
            self._tokens = np.array(rows, np.int32).reshape(len(rows), self._depth)
        else:
            raise AttributeError(name)
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def depth(self) -> int:
        return self._depth

    def matches(self) -> list[int]:
        return [match for match, _ in self._found]

    def column(self, depth: int) -> list[int]:
        view, beyond = self._view, depth + 1
        return [view[place + beyond] for _, place in self._found]

    def row(self, number: int) -> list[int]:
        first = self._found[number][1] + 1
        tokens: list[int] = self._view[first : first + self._depth].tolist()
        return tokens
