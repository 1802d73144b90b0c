"""The stored form of tokens, whose byte order equals the token order, and the sort of all positions by context.

The text of a segment is stored reversed and big-endian, in 2 bytes a token if the ids and the separator fit, else in 3.
It lies between two runs of separators, so that a window around any position can be read without a bounds check:

    MAX_DEPTH separators | the tokens, last first | MAX_MATCH separators

The separator is the id `vocab_size`. It is greater than every token and occurs in no context, so no match crosses it.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Context, Int32Array

PADDING = MAX_DEPTH + MAX_MATCH
MAX_VOCABULARY = (1 << 24) - 1
_CHUNK = 1 << 20  # entries filtered at a time, which keeps the temporary arrays of `order_of` at a few MB


def width_of(vocab_size: int) -> int:
    """Bytes per token: 2 if the separator (`vocab_size`) fits, else 3. Raises ValueError for more than 2^24 - 1 ids."""
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} ids: 1 to {MAX_VOCABULARY} can be stored")
    return 2 if vocab_size <= 0xFFFF else 3


def big_endian(tokens: npt.NDArray[np.integer], width: int) -> bytes:
    """`tokens` in the same order, `width` bytes each."""
    if width == 2:
        return tokens.astype(">u2").tobytes()
    return np.ascontiguousarray(tokens.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]).tobytes()


def from_big_endian(data: npt.NDArray[np.uint8], width: int) -> Int32Array:
    """The ids in `data`, a flat uint8 array of `width` bytes a token: int32 [len / width]."""
    if width == 2:
        return data.view(">u2").astype(np.int32)
    parts = data.reshape(-1, 3).astype(np.int32)
    return (parts[:, 0] << 16) | (parts[:, 1] << 8) | parts[:, 2]


def newest_of(context: Context, vocab_size: int) -> list[int]:
    """The newest MAX_MATCH tokens of a context, newest first, up to the first id outside the vocabulary."""
    newest = context[: -MAX_MATCH - 1 : -1]
    ids: list[int] = newest.tolist() if isinstance(newest, np.ndarray) else list(newest)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        ids = ids[: next(at for at, token in enumerate(ids) if not 0 <= token < vocab_size)]
    return ids


def packed(ids: list[int], width: int) -> bytes:
    """A few ids in stored form. Uses `struct`, which is several times faster than numpy when caches are cold."""
    if width == 2:
        return struct.pack(f">{len(ids)}H", *ids)
    wide = bytearray(struct.pack(f">{len(ids)}I", *ids))
    del wide[::4]
    return bytes(wide)


def backwards(windows: npt.NDArray[np.void], count: int, width: int) -> tuple[npt.NDArray[np.unsignedinteger], int]:
    """The first `count` tokens of each window, last first, in stored form: a view [windows, count], and the number of
    bits by which its values have to be shifted right. A window has at least one token more.

    Three bytes are read as four, of which the last belongs to the next token.
    """
    kind, shift = (">u2", 0) if width == 2 else (">u4", 8)
    if not len(windows):
        return np.empty((0, count), kind), shift
    return np.ndarray((len(windows), count), kind, windows, (count - 1) * width, (windows.itemsize, -width)), shift


def pack(forward: Int32Array, vocab_size: int) -> bytes:
    """The content of `tokens.bin` for a text. Ids outside the vocabulary become separators."""
    width = width_of(vocab_size)
    backward = forward[::-1]
    outside = (backward < 0) | (backward >= vocab_size)
    if outside.any():
        backward = np.where(outside, vocab_size, backward)
    separator = vocab_size.to_bytes(width, "big")
    return b"".join((separator * MAX_DEPTH, big_endian(backward, width), separator * MAX_MATCH))


def order_of(packed: bytes, width: int, keep: int | None = None) -> npt.NDArray[np.uint32]:
    """The positions of the reversed text, sorted by the tokens after them there (before them in the forward text).

    packed: the content of `tokens.bin`; keep: only the first `keep` positions (default: all tokens).
    Returns uint32 [positions kept]. The bytes are sorted (divsufsort, O(n log n), 4 bytes of memory for each *byte*
    while it runs), and the entries at token boundaries are kept. Ids are big-endian, so this is the order of the
    tokens. One separator is sorted with the text, so that a separator precedes the first document like every other.
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
