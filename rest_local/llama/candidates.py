"""The tokens that llama.cpp's samplers choose from, in one buffer that is used again for every token."""

from __future__ import annotations

import ctypes

import numpy as np
from llama_cpp import llama_cpp as bindings
from numpy.typing import NDArray

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Candidates:
    """A reused llama_token_data_array over one numpy buffer."""

    def __init__(self, size: int) -> None:
        self.rows = np.zeros(size, _CANDIDATE)
        self._ids = np.arange(size, dtype=np.int32)
        self._first = self.rows.ctypes.data_as(bindings.llama_token_data_p)
        self.array = bindings.llama_token_data_array(self._first, size, -1, False)
        self.reference = ctypes.byref(self.array)

    def fill(self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> None:
        """Candidates in order of their ids, all or these; samplers reorder and shorten, so the array is set anew."""
        count = len(self.rows) if ids is None else len(ids)
        self.rows["id"][:count] = self._ids if ids is None else ids
        self.rows["logit"][:count] = logits if ids is None else logits[ids]
        self._rewind(count)

    def fill_dummies(self) -> None:
        """Two equal candidates, to draw a number for nothing."""
        self.rows[:2] = [(0, 0.0, 0.0), (1, 0.0, 0.0)]
        self._rewind(2)

    def _rewind(self, size: int) -> None:
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._first, size, -1, False

    @property
    def selected(self) -> int:
        """The id of the selected candidate. Read through the array: a sampler may have put another buffer there."""
        return int(self.array.data[self.array.selected].id)
