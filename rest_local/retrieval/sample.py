"""A sparse sample of an order: where a key lies, but for a few dozen entries.

Without it a search of a segment that is not in memory reads some 25 pages one after another, with it about 8. The file
is made when a segment is written, and mapped. Only one key of each of its pages is held in memory. Knows nothing about
segments.

    a top: the first key of each block | the keys, BLOCK to a block

A key is the first KEY bytes of the stored text at every STEP-th entry of the order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from mmap import mmap

import numpy as np
import numpy.typing as npt

STEP = 64
"""Entries of the order for each key. An entry is compared in 0.2 us if it is in memory, and in 100 us if it is not."""

KEY = 16
"""Bytes of a key: 5 tokens of 3 bytes, 8 of 2 bytes. If many entries begin alike, all keys among them are equal."""

BLOCK = 4096 // KEY
"""Keys to a page of memory."""


def sample_size(entries: int) -> int:
    """The size of the sample of an order in bytes: 0.25 a token."""
    keys = -(-entries // STEP)
    return KEY * (keys + -(-keys // BLOCK))


def make_sample(tokens: bytes | mmap, order: npt.NDArray[np.uint32], width: int, first: int) -> bytes:
    """The sample of an order. tokens: the stored text; first: the tokens before position 0 in it. 1 us a key."""
    window = np.ndarray(
        (len(tokens) - first * width - KEY) // width + 1, f"V{KEY}", tokens, first * width, (width,)
    )
    keys = window[order[::STEP]]
    return keys[::BLOCK].tobytes() + keys.tobytes()


class Sample:
    """An open sample. Raises ValueError if `data` has another size than `sample_size(entries)`."""

    def __init__(self, data: bytes | mmap, entries: int) -> None:
        if len(data) != sample_size(entries):
            raise ValueError(f"{len(data)} bytes are not the sample of {entries} entries")
        self._entries = entries
        keys = -(-entries // STEP)
        tops = -(-keys // BLOCK)
        # As numpy reads them, keys lose zero bytes at their end. That keeps their order, if all of them do.
        self._top: list[bytes] = np.frombuffer(data, f"S{KEY}", tops).tolist()
        self._numbers = range(keys)
        self._keys = np.frombuffer(data, f"S{KEY}", keys, tops * KEY)
        self._at = self._keys.item

    def around(self, key: bytes) -> tuple[int, int]:
        """(low, high): the first entry of the order that is not below `key` is one of low..high, inclusive. 2 us."""
        sought = key[:KEY].rstrip(b"\0")
        block = bisect_left(self._top, sought)
        numbers = self._numbers
        least = bisect_left(
            numbers, sought, max(block - 1, 0) * BLOCK, min(block * BLOCK, len(numbers)), key=self._at
        )
        most = least
        if len(key) > KEY and least < len(numbers) and self._at(least) == sought:
            block = bisect_right(self._top, sought, block - 1 if block else 0)
            most = bisect_right(
                numbers, sought, max(max(block - 1, 0) * BLOCK, least), min(block * BLOCK, len(numbers)), key=self._at
            )
        return max((least - 1) * STEP + 1, 0), min(most * STEP, self._entries)

    def page(self, key: bytes) -> int:
        """The offset in the file of the keys that `around` compares."""
        block = bisect_left(self._top, key[:KEY].rstrip(b"\0"))
        return KEY * (len(self._top) + max(block - 1, 0) * BLOCK)

    def release(self) -> None:
        """Release the buffer."""
        self._keys = np.empty(0, f"S{KEY}")
        self._at = self._keys.item
