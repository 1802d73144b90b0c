"""Find the place of a key in an order, up to a few dozen entries, with a sparse sample of the order.

Without it a search of a segment that is not in memory reads some 25 pages one after another, with it about 8. The file
is made when a segment is written, and mapped. Only one key of each of its pages is held in memory. Knows nothing about
segments.

    a top: the first key of each block | the keys, BLOCK to a block

A key is the first KEY bytes of the stored text at every STEP-th entry of the order.
"""

from __future__ import annotations

from collections.abc import Iterable
from mmap import MADV_WILLNEED, PAGESIZE, mmap

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.rows import MAX_DEPTH

# Entries of the order for each key. An entry is compared in 0.2 us if it is in memory, and in 100 us if it is not.
STEP = 64

# Bytes of a key: 5 tokens of 3 bytes, 8 of 2 bytes. If many entries begin alike, all keys among them are equal.
KEY = 16

# Entries of the smallest order with a sample. A smaller one is searched as fast without it, and is soon in memory.
SAMPLED = 1 << 16

BLOCK = 4096 // KEY  # keys in a page of memory

# As numpy reads them, keys lose zero bytes at their end. That keeps their order, because all of them do.
_KEYS = np.dtype(f"S{KEY}")


def sample_size(entries: int) -> int:
    """Return the size of an order's sample in bytes: 0.25 a token."""
    keys = -(-entries // STEP)
    return KEY * (keys + -(-keys // BLOCK))


def make_sample(tokens: bytes | mmap, order: npt.NDArray[np.uint32], width: int) -> bytes:
    """Make the sample of an order over the stored text `tokens`. Takes 1 us a key."""
    first = MAX_DEPTH * width
    window = np.ndarray((len(tokens) - first - KEY) // width + 1, f"V{KEY}", tokens, first, (width,))
    keys = window[order[::STEP]]
    return b"".join((keys[::BLOCK].tobytes(), keys.tobytes()))


Key = npt.NDArray[np.bytes_]  # zero-dimensional


def beginning(key: bytes) -> Key:
    """Return the part of a search key that is compared with a sample."""
    return np.array(key[:KEY], _KEYS)


class Sample:
    """An open sample. Raises ValueError if `data` has another size than `sample_size(entries)`."""

    def __init__(self, data: bytes | mmap, entries: int) -> None:
        if len(data) != sample_size(entries):
            raise ValueError(f"{len(data)} bytes are not the sample of {entries} entries")
        self._data, self._entries = data, entries
        keys = -(-entries // STEP)
        tops = -(-keys // BLOCK)
        self._top = np.frombuffer(data, _KEYS, tops).copy()
        self._keys = np.frombuffer(data, _KEYS, keys, tops * KEY)
        self._at = self._keys.item

    def around(self, key: bytes, sought: Key) -> tuple[int, int]:
        """Return (low, high): the first entry of the order that is not below `key` is one of low..high, inclusive.
        `sought` is `beginning(key)`. Takes 2 us.
        """
        block = int(self._top.searchsorted(sought))
        begin = block * BLOCK - BLOCK if block else 0
        least = begin + int(self._keys[begin : block * BLOCK].searchsorted(sought))
        most = least
        if len(key) > KEY and least < len(self._keys) and self._at(least) == sought.item():  # many keys may begin alike
            block = int(self._top.searchsorted(sought, "right"))
            begin = block * BLOCK - BLOCK
            most = begin + int(self._keys[begin : block * BLOCK].searchsorted(sought, "right"))
        return max((least - 1) * STEP + 1, 0), min(most * STEP, self._entries)

    def advise(self, sought: Key) -> None:
        """Let the system read the page that `around` reads, if it is mapped."""
        begin = KEY * (len(self._top) + max(int(self._top.searchsorted(sought)) - 1, 0) * BLOCK)
        advise(self._data, [(begin, min(begin + KEY * BLOCK, len(self._data)))])

    def release(self) -> None:
        self._data, self._keys = b"", np.empty(0, _KEYS)
        self._at = self._keys.item


def advise(data: object, intervals: Iterable[tuple[int, int]]) -> None:
    """Let the system read these byte intervals of a mapped file. Do nothing for a buffer in memory."""
    if isinstance(data, mmap):
        pages = {(begin // PAGESIZE, (end - 1) // PAGESIZE) for begin, end in intervals if begin < end}
        for first, last in pages:
            data.madvise(MADV_WILLNEED, first * PAGESIZE, (last - first + 1) * PAGESIZE)
