"""A `llama_batch` over numpy arrays whose addresses do not change.

Contract: the arrays are filled by slicing, without a Python loop over tokens. More tokens than the capacity are refused
here, because llama.cpp would abort the process (DESIGN.md section 4). Every token has a contiguous range of sequence
ids: a tree in depth first order numbers its leaves in order, so the leaves below a node are a range. Knows nothing
about models.
"""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rest_local.llama.loaded import llama_cpp

Int32 = NDArray[np.int32]

MOST_IDS = 256  # llama_max_parallel_sequences()


class Batch:
    """Up to `capacity` tokens with up to `max_ids` sequence ids each. 8 * capacity * (max_ids / 2 + 4) bytes.

    Attributes: `token`, `pos`, `n_ids` int32 [capacity]; `ids` int32 [capacity, max_ids]; `output` int8 [capacity];
    `n_tokens`: the number of tokens that the next decode submits.
    """

    def __init__(self, capacity: int, max_ids: int, n_features: int = 0) -> None:
        """`n_features`: width of `features`, float32 [capacity, n_features], which go with the tokens; 0: none."""
        self.capacity = capacity
        self.max_ids = max_ids
        self.features = np.zeros((capacity, n_features), np.float32)
        self.n_tokens = 0
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.n_ids = np.zeros(capacity, np.int32)
        self.ids = np.zeros((capacity, max_ids), np.int32)
        self.output = np.zeros(capacity, np.int8)
        # views of the same memory, for assignment from Python's own arrays
        self._token, self._pos, self._n_ids = self.token.data, self.pos.data, self.n_ids.data
        self._ids, self._output = self.ids.reshape(-1).data.cast("B"), self.output.data
        self._id_rows = [np.arange(first, first + max_ids, dtype=np.int32).tobytes() for first in range(MOST_IDS)]
        self._row_bytes = self.ids.strides[0]
        self._rows = self.ids.ctypes.data + self._row_bytes * np.arange(capacity, dtype=np.uint64)
        self.struct = llama_cpp.llama_batch(
            0,
            self.token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            self.features.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if n_features else None,
            self.pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            self.n_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.cast(self._rows.ctypes.data, ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, tokens: ArrayLike, pos: ArrayLike, first_id: ArrayLike, n_ids: ArrayLike, output: ArrayLike) -> None:
        """Replace the content. `tokens`: int [n]; the others: [n], or one value for all tokens.

        Token i belongs to the sequences `first_id[i] .. first_id[i] + n_ids[i] - 1`; it attends to the first of them.
        Raises ValueError if n exceeds the capacity, or a number of ids `max_ids`.
        """
        n = len(np.asarray(tokens))
        columns = (
            np.broadcast_to(np.asarray(column, np.int32), n).tolist() for column in (pos, first_id, n_ids, output)
        )
        self.load(np.asarray(tokens, np.int32).tolist(), *columns)

    def load(self, tokens: list[int], pos: list[int], first_id: list[int], n_ids: list[int], output: list[int]) -> None:
        """`fill` from lists of one length. Takes 20 us for 16 tokens right after a forward pass, when caches are cold;
        numpy took 66 us there.
        """
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise ValueError(f"{n} tokens do not fit a batch of {self.capacity}")
        if min(n_ids) < 1 or max(n_ids) > self.max_ids:
            raise ValueError(f"a token has 1 to {self.max_ids} sequence ids")
        self._token[:n] = array("i", tokens)
        self._pos[:n] = array("i", pos)
        self._n_ids[:n] = array("i", n_ids)
        rows = self._id_rows
        self._ids[: n * self._row_bytes] = b"".join([rows[first] for first in first_id])
        self._output[:n] = array("b", output)
        self.n_tokens = self.struct.n_tokens = n
