"""The source `logits`: likely successors of a token, kept from rows of logits that were computed anyway.

Token Recycling (arXiv 2408.08696) keeps a table from each token to the top-k tokens of the newest row of logits that
followed it, and drafts a tree from the table. Here there are two such tables: by the newest token, and by the newest
two in SLOTS slots, which are asked first. Both are bounded, belong to a model, and are shared by its requests.

- `likeliest` finds the top-k of a row without a full sort.
- `SuccessorTable.refresh` takes rows of one step until their time is used up.
- `RecycledRows` gives the successors as candidates below any node, whatever source has drafted the node.

The evidence of a candidate is its rank, its share of the probability of the top k when the row was computed, the table
it is from, and the depth; `rest_local.planning.acceptance` counts what that is worth. The module knows nothing about
planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.candidates import (
    CELLS_PER_SOURCE,
    LOGITS,
    MAX_CANDIDATES,
    N_ROWS,
    N_SHARES,
    Candidate,
    PrecedingBigram,
    SourceRows,
)

KEPT = 8  # successors of a token
SLOTS = 1 << 16  # pairs of tokens; a pair that falls on another's slot replaces it
LEAST_SHARE = 0.03  # of the top k, that a successor needs to be kept
RIVAL = 0.3  # estimate from which a candidate of another source is likely
ROW_MS = 0.05  # milliseconds of a row before any is measured
SMOOTHING = 0.05

_LARGE, _SMALL = 1024, 128  # logits in a block: 0.034 ms for 152k logits; 2 048 take as long, 256 twice that
_LARGE_FROM = 16_384  # logits; 4k take 10 us in small blocks
_RANKS = 2  # buckets: first, further
SINGLE, PAIR, GUESS = range(N_SHARES // _RANKS)  # found by one token, by two, or among the alternatives to the root
_LEVELS = np.array((0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.8, 0.93, 0.99))  # upper ends of the buckets of the share
_MEANS = (0.02, 0.045, 0.09, 0.18, 0.32, 0.5, 0.7, 0.87, 0.96, 0.995)
_SPREAD = 0x9E3779B1

Successor = tuple[int, int, int, int]  # token, rank, bucket of its share, and SINGLE, PAIR or GUESS

_NONE = np.zeros(0, np.int64)

def likeliest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the `k` greatest logits, greatest first, of equal ones any; fewer where the row has not so many above
    -inf. None if the greatest is not finite or NaN is found. `row`: float32 [n_vocab], only read.

    The k blocks with the greatest maxima hold them all. 0.034 ms for 152k logits that are in the cache and 0.07 ms for
    others, on one core; `np.argpartition` of the row takes 1.2 ms.
    """
    n, width = len(row), _LARGE if len(row) >= _LARGE_FROM else _SMALL
    n_blocks = n // width
    if n_blocks <= k:
        found = np.arange(n)
    else:
        whole = n_blocks * width
        blocks = row[:whole].reshape(n_blocks, width)
        greatest = blocks.max(axis=1)
        chosen = greatest.argsort()[n_blocks - k :]  # NaN comes last
        part, least = blocks[chosen].ravel(), greatest[chosen[0]]
        places = (part >= least).nonzero()[0]
        found = chosen[places // width] * width + places % width
        if whole < n:
            found = np.concatenate((found, whole + (row[whole:] >= least).nonzero()[0]))
        if not greatest[chosen[-1]] < np.inf:
            return _NONE
    values = row[found]
    order = (-values).argsort()[:k]
    found, values = found[order], values[order]
    if not (len(values) and -np.inf < values[0] < np.inf):
        return _NONE
    return found[values > -np.inf]


def logits_cell(rank: int, level: int, table: int, rivals: int, agreed: bool) -> int:
    """The evidence cell of a recycled successor: bucket of its share (`level`) x whether other sources propose
    something there (`rivals`: nothing, nothing likely, something likely) and this token among it x whether it is the first x
    `table`: SINGLE, PAIR or GUESS.
    """
    row, share = 2 * rivals + agreed, min(rank, _RANKS - 1) + _RANKS * table
    return LOGITS * CELLS_PER_SOURCE + (level * N_ROWS + row) * N_SHARES + share


def logits_rates() -> list[float]:
    """By cell of the source, before anything was counted."""
    rates = [0.05] * CELLS_PER_SOURCE
    for level, probability in enumerate(_MEANS):
        for table, worth in ((SINGLE, 0.5), (PAIR, 0.8), (GUESS, 0.3)):
            for rank in range(_RANKS):
                for rivals, agreed in product(range(3), (False, True)):
                    cell = logits_cell(rank, level, table, rivals, agreed)
                    new = (0.3, 0.12, 0.06)[rivals] if table != GUESS else 0.02
                    rates[cell - LOGITS * CELLS_PER_SOURCE] = probability * (worth if agreed else new)
    return rates


class SuccessorTable:
    """Of one model of `n_vocab` tokens; `kept` successors of a token at most. Not thread safe.

    5 bytes for each successor: 6 MB at 152k tokens, and 3 MB for pairs. The system maps pages as they are written.
    """

    def __init__(self, n_vocab: int, kept: int = KEPT) -> None:
        self.n_vocab, self.kept = n_vocab, kept
        self.row_ms = ROW_MS  # smoothed
        self.rows_read = 0
        self._token: NDArray[np.int32] | None = None

    def _allocate(self) -> None:
        n = self.n_vocab + SLOTS
        self._token = np.zeros((n, self.kept), np.int32)
        self._level = np.zeros((n, self.kept), np.uint8)
        self._count = np.zeros((n, 2), np.uint8)  # of all, and of those with LEAST_SHARE
        self._pair = np.zeros(SLOTS, np.int64)  # the pair that a slot holds, plus 1

    @property
    def nbytes(self) -> int:
        """Bytes that the tables may take in memory; 0 before the first row."""
        if self._token is None:
            return 0
        return self._token.nbytes + self._level.nbytes + self._count.nbytes + self._pair.nbytes

    def refresh(self, rows: Iterable[tuple[PrecedingBigram, NDArray[np.float32]]], most_ms: float) -> float:
        """Read rows, each with the two tokens before its distribution, while another one is likely to take no more than
        what is left of `most_ms` milliseconds. Returns the milliseconds that were taken. 0.05 ms for a row of 152k.
        """
        begun = last = self._now()
        for pair, row in rows:
            if 1e3 * (last - begun) + self.row_ms > most_ms:
                break
            self.read(pair, row)
            now = self._now()
            self.row_ms += SMOOTHING * (min(1e3 * (now - last), 4 * self.row_ms) - self.row_ms)
            last = now
        return 1e3 * (last - begun)

    def read(self, pair: PrecedingBigram, row: NDArray[np.float32]) -> None:
        """Keep the likeliest tokens of a row, float32 [n_vocab], in place of those that were kept for the same token
        and for the same pair. A row without a finite greatest logit is left out.
        """
        found = likeliest(row, self.kept)
        n = len(found)
        if not n:
            return
        self.rows_read += 1
        if self._token is None:
            self._allocate()
        assert self._token is not None
        values = row[found].astype(np.float64)
        weight = np.exp(values - values[0])
        share = weight / weight.sum()
        level, likely = np.searchsorted(_LEVELS, share), int((share >= LEAST_SHARE).sum())
        before, token = pair
        places = [token] if token >= 0 else []
        if before >= 0:
            slot = self._slot(before, token)
            self._pair[slot] = (before << 32) + token + 1
            places.append(self.n_vocab + slot)
        for place in places:
            self._token[place, :n], self._level[place, :n] = found, level
            self._count[place] = n, likely

    def _now(self) -> float:
        """Seconds; tests replace it."""
        return time.perf_counter()

    def _slot(self, before: int, token: int) -> int:
        return ((before * _SPREAD + token) * _SPREAD >> 16) % SLOTS

    def successors(self, pair: PrecedingBigram) -> list[Successor]:
        """(token, rank, level, whether it was found by the pair) of all that is kept for two tokens and for the newer
        one alone, likeliest first, each token once. 1 us.
        """
        if self._token is None:
            return []
        before, token = pair
        found: list[Successor] = []
        if before >= 0:
            slot = self._slot(before, token)
            if self._pair[slot] == (before << 32) + token + 1:
                found = self._at(self.n_vocab + slot, PAIR)
        known = {each[0] for each in found}
        if token >= 0:
            found += [each for each in self._at(token, SINGLE) if each[0] not in known]
        return found

    def guesses(self, pair: PrecedingBigram) -> list[Successor]:
        """What else could have come in place of the newer of two tokens."""
        before, token = pair
        if self._token is None or before < 0:
            return []
        return [each for each in self._at(before, GUESS) if each[0] != token]

    def _at(self, place: int, table: int) -> list[Successor]:
        assert self._token is not None
        n = int(self._count[place, int(table != GUESS)])
        tokens, levels = self._token[place, :n].tolist(), self._level[place, :n].tolist()
        return [(token, rank, level, table) for rank, (token, level) in enumerate(zip(tokens, levels, strict=True))]


class RecycledRows(SourceRows):
    """What a table knows. It proposes after all other sources, and below the nodes of all of them."""

    def __init__(self, table: SuccessorTable, newest: PrecedingBigram) -> None:
        self.source, self.store, self.newest = LOGITS, None, newest
        self._table = table

    guesses = False

    def __len__(self) -> int:
        return 1

    def candidates(self, members: Sequence[int], depth: int, most: int = MAX_CANDIDATES) -> list[Candidate]:
        """None: see `join`."""
        return []

    def join(
        self,
        by_source: list[tuple[SourceRows, list[Candidate]]],
        merged: dict[int, tuple[float, int, list[tuple[SourceRows, Sequence[int]]]]],
        pair: PrecedingBigram,
        estimate: Callable[[int], float],
        root: bool = False,
    ) -> None:
        """Add the successors of two tokens to what other sources propose below a node. 1 us, and 1 us for each."""
        successors = self._table.successors(pair)
        if root and self.guesses:
            known_already = {each[0] for each in successors}
            successors += [each for each in self._table.guesses(self.newest) if each[0] not in known_already or True]
        if not successors:
            return
        best = max([probability for probability, _, _ in merged.values()], default=0.0)
        rivals = 0 if not merged else 1 if best < RIVAL else 2
        found: list[Candidate] = []
        for token, rank, level, table in successors:
            known = merged.get(token)
            cell = logits_cell(rank, level, table, rivals, known is not None)
            found.append((token, cell, ()))
            probability = estimate(cell)
            if known is None:
                merged[token] = (probability, LOGITS, [(self, (table,))])
            elif probability > known[0]:
                merged[token] = (probability, LOGITS, [*known[2], (self, ())])
            else:
                merged[token] = (known[0], known[1], [*known[2], (self, ())])
        by_source.append((self, found))
