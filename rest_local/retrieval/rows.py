"""Hold the result of a search, and convert tokens to the stored form that is searched.

`Rows` are continuations of stored text, each with the length of the context that agrees. The module handles token ids
only.

The byte order of the stored form equals the token order, so that positions can be sorted by context. The text of a
segment is stored reversed and big-endian, in 2 bytes a token if the ids and the separator fit, else in 3. It lies
between two runs of separators, so that a window around any position can be read without a bounds check:

    MAX_DEPTH separators | the tokens, last first | MAX_MATCH separators

The separator is the id `vocab_size`. It is greater than every token and occurs in no context, so no match crosses it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_MATCH = 32  # number of context tokens that are compared; a longer match counts as this many
MAX_DEPTH = 64  # maximum length of a continuation: a longer draft pays on no cost curve measured so far

Context = Sequence[int] | npt.NDArray[np.integer]  # token ids, newest last
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_LIMIT = 1 << 31  # above every int32


class Rows:
    """Continuations, longest context match first.

    Tokens are kept in their stored form and decoded on demand: a draft reads all rows at its first depth, and few of
    them further down.

    Attributes:
        match: int32 [rows], number of context tokens that agree, 1..MAX_MATCH, not increasing
        positions: int64 [rows], index of the first continuation token in the forward text
        limit: all ids are below it
    """

    __slots__ = ("_continuations", "_shift", "_tokens", "limit", "match", "positions")

    def __init__(
        self,
        continuations: npt.NDArray[np.integer],
        match: Int32Array,
        positions: Int64Array,
        *,
        shift: int = 0,
        limit: int = _NO_LIMIT,
    ) -> None:
        """Make rows from `continuations`: integers [rows, depth], each an id times 2^shift.

        A document ends at an id below 0 or at `limit` or above.
        """
        self.match = match
        self.positions = positions
        self.limit = limit
        self._tokens = continuations
        self._shift = shift
        self._continuations: Int32Array | None = None

    def __len__(self) -> int:
        return len(self.match)

    @property
    def depth(self) -> int:
        """Return the number of tokens in a continuation."""
        return int(self._tokens.shape[1])

    @property
    def continuations(self) -> Int32Array:
        """Return int32 [rows, depth], -1 after the end of the document."""
        if self._continuations is None:
            stored = self._tokens >> self._shift if self._shift else self._tokens
            tokens = stored.astype(np.int32, order="C")
            known = tokens.view(np.uint32)  # an id below 0 becomes a large number
            if tokens.size and known.max() >= self.limit:
                tokens[np.logical_or.accumulate(known >= self.limit, axis=1)] = -1
            self._continuations = tokens
        return self._continuations

    def matches(self) -> list[int]:
        """Return `match` as a list."""
        matches: list[int] = self.match.tolist()
        return matches

    def column(self, depth: int) -> list[int]:
        """Return the token of every row at `depth`, -1 if the document ends there. Takes about 2 us.

        If a row's document ends at a smaller depth, the value is any token. The same holds for `row`.
        """
        return self._decoded(self._tokens[:, depth])

    def row(self, number: int) -> list[int]:
        """Return the tokens of one row, -1 at the end of the document."""
        return self._decoded(self._tokens[number])

    def _decoded(self, stored: npt.NDArray[np.integer]) -> list[int]:
        tokens: list[int] = (stored >> self._shift if self._shift else stored).tolist()
        if tokens and max(tokens) >= self.limit:
            return [token if token < self.limit else -1 for token in tokens]
        return tokens

    @staticmethod
    def empty(depth: int) -> Rows:
        return Rows(np.empty((0, depth), np.int32), np.empty(0, np.int32), np.empty(0, np.int64))

    @staticmethod
    def merge(parts: Sequence[Rows], limit: int, depth: int) -> Rows:
        """Return the `limit` longest matches of several results. Among equal matches the earlier result comes first."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return Rows.empty(depth)
        if len(parts) == 1 and len(parts[0]) <= limit:
            return parts[0]
        match = np.concatenate([part.match for part in parts])
        best = np.argsort(-match, kind="stable")[:limit]
        positions = np.concatenate([part.positions for part in parts])[best]
        first = parts[0]
        if all((part._shift, part.limit) == (first._shift, first.limit) for part in parts):
            tokens = np.concatenate([part._tokens for part in parts])[best]
            return Rows(tokens, match[best], positions, shift=first._shift, limit=first.limit)
        tokens = np.concatenate([part.continuations for part in parts])[best]
        return Rows(tokens, match[best], positions, limit=max(part.limit for part in parts))


def check_shape(limit: int, depth: int) -> None:
    """Raise ValueError unless limit >= 1 and 1 <= depth <= MAX_DEPTH."""
    if limit < 1 or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"limit {limit} must be at least 1, depth {depth} from 1 to {MAX_DEPTH}")


PADDING = MAX_DEPTH + MAX_MATCH
MAX_VOCABULARY = (1 << 24) - 1
_CHUNK = 1 << 20  # entries filtered at a time, which keeps the temporary arrays of `order_of` at a few MB


def width_of(vocab_size: int) -> int:
    """Return the bytes of a token: 2 if the separator (`vocab_size`) fits, else 3. Raises ValueError above 2^24 - 1
    ids.
    """
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} ids: 1 to {MAX_VOCABULARY} can be stored")
    return 2 if vocab_size <= 0xFFFF else 3


def big_endian(tokens: npt.NDArray[np.integer], width: int) -> bytes:
    """Encode `tokens` in the same order, `width` bytes each."""
    if width == 2:
        return tokens.astype(">u2").tobytes()
    return np.ascontiguousarray(tokens.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]).tobytes()


def from_big_endian(data: npt.NDArray[np.uint8], width: int) -> Int32Array:
    """Decode a flat uint8 array of `width` bytes a token: int32 [len / width]."""
    if width == 2:
        return data.view(">u2").astype(np.int32)
    parts = data.reshape(-1, 3).astype(np.int32)
    return (parts[:, 0] << 16) | (parts[:, 1] << 8) | parts[:, 2]


def newest_of(context: Context, vocab_size: int) -> list[int]:
    """Return the newest MAX_MATCH tokens of a context, newest first, up to the first id outside the vocabulary."""
    newest = context[: -MAX_MATCH - 1 : -1]
    ids: list[int] = newest.tolist() if isinstance(newest, np.ndarray) else list(newest)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        ids = ids[: next(at for at, token in enumerate(ids) if not 0 <= token < vocab_size)]
    return ids


def packed(ids: list[int], width: int) -> bytes:
    """Encode a few ids in stored form. `struct` is several times faster than numpy when caches are cold."""
    if width == 2:
        return struct.pack(f">{len(ids)}H", *ids)
    wide = bytearray(struct.pack(f">{len(ids)}I", *ids))
    del wide[::4]
    return bytes(wide)


def backwards(windows: npt.NDArray[np.void], count: int, width: int) -> tuple[npt.NDArray[np.unsignedinteger], int]:
    """Return a view of the first `count` tokens of each window, last first, in stored form: [windows, count], and the
    number of bits to shift its values right. A window has at least one token more, because three bytes are read as
    four, and the last one belongs to the next token.
    """
    kind, shift = (">u2", 0) if width == 2 else (">u4", 8)
    if not len(windows):
        return np.empty((0, count), kind), shift
    return np.ndarray((len(windows), count), kind, windows, (count - 1) * width, (windows.itemsize, -width)), shift


def pack(forward: Int32Array, vocab_size: int) -> bytes:
    """Make the content of `tokens.bin` for a text. Ids outside the vocabulary become separators."""
    width = width_of(vocab_size)
    backward = forward[::-1]
    outside = (backward < 0) | (backward >= vocab_size)
    if outside.any():
        backward = np.where(outside, vocab_size, backward)
    separator = vocab_size.to_bytes(width, "big")
    return b"".join((separator * MAX_DEPTH, big_endian(backward, width), separator * MAX_MATCH))


def order_of(packed: bytes, width: int, keep: int | None = None) -> npt.NDArray[np.uint32]:
    """Sort the positions of the reversed text by the tokens after them there (before them in the forward text).

    `packed` is the content of `tokens.bin`. Only the first `keep` positions are kept (default: all tokens). Returns
    uint32 [positions kept]. The bytes are sorted (divsufsort, O(n log n), 4 bytes of memory for each *byte* while it
    runs), and the entries at token boundaries are kept. Ids are big-endian, so this is the order of the tokens. One
    separator is sorted with the text, so that a separator precedes the first document like every other.
    """
    from pydivsufsort import divsufsort

    count = len(packed) // width - PADDING
    keep = count if keep is None else keep
    text = np.frombuffer(packed, np.uint8)[MAX_DEPTH * width : (MAX_DEPTH + count + 1) * width].copy()
    everything = divsufsort(text)
    order = np.empty(keep, np.uint32)
    filled = 0
    for start in range(0, len(everything), _CHUNK):
        chunk = everything[start : start + _CHUNK]
        whole = chunk // width
        whole = whole[(whole * width == chunk) & (whole < keep)]
        order[filled : filled + len(whole)] = whole
        filled += len(whole)
    return order
