"""The result of a search: continuations of stored text, each with the length of the context that agrees.

Knows nothing about the origin of the text, nor about text at all: it handles token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_MATCH = 32
"""Number of context tokens that are compared. A longer match counts as this many."""

MAX_DEPTH = 64
"""Maximum length of a continuation: a longer draft pays on no cost curve measured so far."""

Context = Sequence[int] | npt.NDArray[np.integer]
"""Token ids, newest last."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


_NO_LIMIT = 1 << 31  # above every int32


class Rows:
    """Continuations, longest context match first.

    match: int32 [rows], number of context tokens that agree, 1..MAX_MATCH, not increasing
    positions: int64 [rows], index of the first continuation token in the forward text
    limit: all ids are below it

    Tokens are kept in their stored form and decoded on demand: a draft reads all rows at its first depth, and few of
    them further down.
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
        """continuations: integers [rows, depth], each an id times 2^shift. A document ends at an id below 0 or at
        `limit` or above.
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
        """Number of tokens in a continuation."""
        return int(self._tokens.shape[1])

    @property
    def continuations(self) -> Int32Array:
        """int32 [rows, depth], -1 after the end of the document."""
        if self._continuations is None:
            stored = self._tokens >> self._shift if self._shift else self._tokens
            tokens = stored.astype(np.int32, order="C")
            known = tokens.view(np.uint32)  # an id below 0 becomes a large number
            if tokens.size and known.max() >= self.limit:
                tokens[np.logical_or.accumulate(known >= self.limit, axis=1)] = -1
            self._continuations = tokens
        return self._continuations

    def matches(self) -> list[int]:
        """`match` as a list."""
        matches: list[int] = self.match.tolist()
        return matches

    def column(self, depth: int) -> list[int]:
        """The token of every row at `depth`, -1 if the document ends there. Takes about 2 us.

        If a row's document ends at a smaller depth, the value is any token. The same holds for `row`.
        """
        return self._decoded(self._tokens[:, depth])

    def row(self, number: int) -> list[int]:
        """The tokens of one row, -1 at the end of the document."""
        return self._decoded(self._tokens[number])

    def _decoded(self, stored: npt.NDArray[np.integer]) -> list[int]:
        tokens: list[int] = (stored >> self._shift if self._shift else stored).tolist()
        if tokens and max(tokens) >= self.limit:
            return [token if token < self.limit else -1 for token in tokens]
        return tokens

    @staticmethod
    def empty(depth: int) -> Rows:
        """No rows."""
        return Rows(np.empty((0, depth), np.int32), np.empty(0, np.int32), np.empty(0, np.int64))

    @staticmethod
    def merge(parts: Sequence[Rows], limit: int, depth: int) -> Rows:
        """The `limit` longest matches of several results. Among equal matches the earlier result comes first."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return Rows.empty(depth)
        if len(parts) == 1 and len(parts[0]) <= limit:
            return parts[0]
        match = np.concatenate([part.match for part in parts])
        best = np.argsort(-match, kind="stable")[:limit]
        positions = np.concatenate([part.positions for part in parts])[best]
        first = parts[0]
        if all((part._shift, part.limit) == (first._shift, first.limit) for part in parts):  # one store
            tokens = np.concatenate([part._tokens for part in parts])[best]
            return Rows(tokens, match[best], positions, shift=first._shift, limit=first.limit)
        tokens = np.concatenate([part.continuations for part in parts])[best]
        return Rows(tokens, match[best], positions, limit=max(part.limit for part in parts))


def check_shape(limit: int, depth: int) -> None:
    """Raise ValueError unless limit >= 1 and 1 <= depth <= MAX_DEPTH."""
    if limit < 1 or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"limit {limit} must be at least 1, depth {depth} from 1 to {MAX_DEPTH}")
