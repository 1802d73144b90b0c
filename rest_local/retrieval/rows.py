"""What a search returns: continuations of earlier text, each with the length of the context that agrees.

Knows nothing about where the text came from, nor about text at all: purely token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_MATCH = 32
"""Context tokens that are compared; a longer agreement counts as this many."""

MAX_DEPTH = 64
"""Longest continuation that can be asked for: no draft of more tokens pays on any cost curve measured so far."""

Context = Sequence[int] | npt.NDArray[np.integer]
"""Token ids, newest last."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Continuations, longest context match first.

    continuations: int32 [rows, depth], -1 from the document's end on
    match: int32 [rows], tokens of context that agree, 1..MAX_MATCH, not increasing
    positions: int64 [rows], index in the forward text of the first continuation token
    """

    continuations: Int32Array
    match: Int32Array
    positions: Int64Array

    def __len__(self) -> int:
        return len(self.match)

    @staticmethod
    def empty(depth: int) -> Rows:
        """No rows."""
        return Rows(np.empty((0, depth), np.int32), np.empty(0, np.int32), np.empty(0, np.int64))

    @staticmethod
    def merge(parts: Sequence[Rows], limit: int, depth: int) -> Rows:
        """The `limit` longest matches of several results; the earlier part first among equals."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return Rows.empty(depth)
        if len(parts) == 1 and len(parts[0]) <= limit:
            return parts[0]
        match = np.concatenate([part.match for part in parts])
        best = np.argsort(-match, kind="stable")[:limit]
        return Rows(
            np.concatenate([part.continuations for part in parts])[best],
            match[best],
            np.concatenate([part.positions for part in parts])[best],
        )


def check_shape(limit: int, depth: int) -> None:
    """ValueError unless limit >= 1 and 1 <= depth <= MAX_DEPTH."""
    if limit < 1 or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"limit {limit} must be at least 1, depth {depth} from 1 to {MAX_DEPTH}")
