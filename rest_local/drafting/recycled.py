"""The source `logits`: likely successors of a token, kept from rows of logits that were computed anyway.

Token Recycling (arXiv 2408.08696) keeps a table from each token to the top-k tokens of the newest row of logits that
followed it, and drafts a tree from the table. Here there are two such tables: by the newest token, and by the newest
two in SLOTS slots, which are asked first. Both are bounded, belong to a model, and are shared by its requests.

- `likeliest` finds the top-k of a row without a full sort.
- `SuccessorTable.refresh` takes rows of one step until their time is used up.
- `RecycledRows.join` adds successors to what other sources propose below a node.

The evidence of a candidate is its rank, its share of the probability of the top k when the row was computed, the table
it is from, and what other sources propose at the node. That decides most: where another source has a likely candidate,
a successor of a large share that no other source proposes was right in 7 to 15% of the cases, one that another source
proposes in 50 to 97%. `rest_local.planning.acceptance` counts it. The module knows nothing about planning.

LogitSpec (arXiv 2507.01449) takes the other likely tokens of the row that chose the root as guesses for the token after
the root. Of guesses that no other source proposes 1% were right, and as evidence for those that another one proposes
they gained nothing, nor did lookups below them (docs/LOG.md); so there are none.
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
    N_ROWS,
    N_SHARES,
    NO_CANDIDATE,
    Candidate,
    Merged,
    PrecedingBigram,
    SourceRows,
)

KEPT = 8  # successors of a token
SLOTS = 1 << 18  # pairs of tokens; a pair that falls on another's slot replaces it
SPREAD = 0x237B1  # odd, so that the slots of neighbouring ids lie far apart
LIKELY = 0.4  # probability from which a candidate of another source is likely, and a grammar is asked what follows it:
# JSON answers with lookups take 1 106, 1 118 and 1 128 forward passes with 0.2, 0.4 and 0.6

_LEVELS = np.array((0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.8, 0.93, 0.99))  # upper ends of the buckets of the share
# Rates until anything is counted, as parts of the share: of a token that another source proposes, and by rivals of one
# that none does. As counted with the toy model.
_AGREED = {False: 0.5, True: 0.8}  # by whether it was found by two tokens
_NEW = {False: (0.25, 0.15, 0.07), True: (0.5, 0.25, 0.12)}

LogitsRow = tuple[PrecedingBigram, NDArray[np.float32]]  # a row [n_vocab], and the two tokens that it follows
Successor = tuple[int, int, int, bool]  # token, rank, bucket of its share, and whether two tokens found it


def likeliest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the `k` greatest logits, greatest first, of equal ones any; fewer where the row has not so many above
    -inf. None if the greatest is not finite, or NaN. `row`: float32 [n_vocab], only read.

    The k blocks with the greatest maxima hold them all. 0.034 ms for 152k logits that are in the cache and 0.07 ms for
    others, on one core; `np.argpartition` of the row takes 1.2 ms.
    """
    n = len(row)
    width = 1024 if n >= 16_384 else 128  # 152k logits take twice as long in blocks of 256
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
            return np.zeros(0, np.int64)
    values = row[found]
    if not len(values) or not -np.inf < values.max() < np.inf:
        return np.zeros(0, np.int64)
    order = (-values).argsort()[:k]
    found, values = found[order], values[order]
    return found[values > -np.inf]


def logits_cell(rank: int, level: int, paired: bool, rivals: int, agreed: bool) -> int:
    """The evidence cell of a successor: bucket of its share (`level`) x what other sources propose at the node
    (`rivals`: nothing, nothing likely, something likely), and whether this token is among it x rank and whether it was
    found by two tokens.
    """
    row, share = 2 * rivals + agreed, min(rank, 2) + 3 * paired
    return LOGITS * CELLS_PER_SOURCE + (level * N_ROWS + row) * N_SHARES + share


def logits_rates() -> list[float]:
    """By cell of the source, before anything was counted."""
    rates = [0.0] * CELLS_PER_SOURCE
    means = (np.append(_LEVELS, 1.0) + np.insert(_LEVELS, 0, 0.0)) / 2  # of the buckets
    for (level, share), rank, paired, rivals in product(enumerate(means.tolist()), range(3), _AGREED, range(3)):
        for agreed, worth in ((True, _AGREED[paired]), (False, _NEW[paired][rivals])):
            rates[logits_cell(rank, level, paired, rivals, agreed) - LOGITS * CELLS_PER_SOURCE] = worth * share
    return rates


class SuccessorTable:
    """Of one model of `n_vocab` tokens; at most `kept` successors of a token, 255 at most. Not thread safe.

    5 bytes for each successor: 6.4 MB at 152k tokens, and 13 MB for pairs. Allocated by the first row; the system maps
    pages as they are written.
    """

    def __init__(self, n_vocab: int, kept: int = KEPT) -> None:
        self.n_vocab, self.kept = n_vocab, min(kept, n_vocab)
        self.row_ms = 0.05  # milliseconds of reading a row, smoothed
        self.rows_read = 0
        self._token: NDArray[np.int32] | None = None

    def _allocate(self) -> NDArray[np.int32]:
        n = self.n_vocab + SLOTS
        self._level = np.zeros((n, self.kept), np.uint8)
        self._count = np.zeros(n, np.uint8)
        self._pair = np.zeros(SLOTS, np.int64)  # the pair that a slot holds
        self._token = np.zeros((n, self.kept), np.int32)
        return self._token

    @property
    def nbytes(self) -> int:
        """Bytes of the tables; 0 before the first row."""
        if self._token is None:
            return 0
        return self._token.nbytes + self._level.nbytes + self._count.nbytes + self._pair.nbytes

    def refresh(self, rows: Iterable[LogitsRow], most_ms: float) -> float:
        """Read rows, each with the two tokens that it follows, while a further one is likely to fit into `most_ms`
        milliseconds. Returns the milliseconds that were taken.
        """
        begun = last = self._now()
        for pair, row in rows:
            if 1e3 * (last - begun) + self.row_ms > most_ms:
                break
            self.read(pair, row)
            now = self._now()
            self.row_ms += 0.05 * (min(1e3 * (now - last), 4 * self.row_ms) - self.row_ms)
            last = now
        return 1e3 * (last - begun)

    def _now(self) -> float:
        """Seconds; replaced where time is simulated."""
        return time.perf_counter()

    def read(self, pair: PrecedingBigram, row: NDArray[np.float32]) -> None:
        """Keep the likeliest tokens of a row, float32 [n_vocab], in place of those that were kept for the same token
        and for the same pair. A row whose greatest logit is not finite is left out. `likeliest` and 15 us.
        """
        self.rows_read += 1
        found = likeliest(row, self.kept)
        before, token = pair
        if not len(found) or token < 0:
            return
        tokens = self._allocate() if self._token is None else self._token
        logits = row[found].astype(np.float64)
        weight = np.exp(logits - logits[0])
        share = weight / weight.sum()
        n = np.count_nonzero(share >= _LEVELS[0])  # smaller ones were right in 2% of the cases
        found, levels = found[:n], _LEVELS.searchsorted(share[:n])
        for place in (token,) if before < 0 else (token, self._place(before, token)):
            tokens[place, :n], self._level[place, :n], self._count[place] = found, levels, n
        if before >= 0:
            self._pair[self._place(before, token) - self.n_vocab] = _number(before, token)

    def _place(self, before: int, token: int) -> int:
        return self.n_vocab + ((before * SPREAD + token) * SPREAD) % SLOTS

    def successors(self, pair: PrecedingBigram) -> list[Successor]:
        """What is kept for two tokens, and then what is kept for the newer one alone, each token once. 2 us."""
        before, token = pair
        if self._token is None or token < 0:
            return []
        found = self._at(token, False)
        if before >= 0:
            place = self._place(before, token)
            if self._pair[place - self.n_vocab] == _number(before, token):
                paired = self._at(place, True)
                known = {each[0] for each in paired}
                found = paired + [each for each in found if each[0] not in known]
        return found

    def _at(self, place: int, paired: bool) -> list[Successor]:
        assert self._token is not None
        n = int(self._count[place])
        tokens, levels = self._token[place, :n].tolist(), self._level[place, :n].tolist()
        return [(token, rank, level, paired) for rank, (token, level) in enumerate(zip(tokens, levels, strict=True))]


def _number(before: int, token: int) -> int:
    """Of a pair; never 0."""
    return ((before << 31) | token) + 1


class RecycledRows(SourceRows):
    """What a table knows. It proposes after all other sources, and below the nodes of all of them."""

    def __init__(self, table: SuccessorTable, newest: PrecedingBigram) -> None:
        self.source, self.store, self.newest = LOGITS, None, newest
        self._table = table

    def __len__(self) -> int:
        return 1

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """None: `join` adds them."""
        return []

    def join(
        self,
        by_source: list[tuple[SourceRows, list[Candidate]]],
        merged: Merged,
        pair: PrecedingBigram,
        estimate: Callable[[int], float],
    ) -> None:
        """Add the successors of two tokens to what other sources propose below a node. 3 us, and 1 us for each."""
        successors = self._table.successors(pair)
        if not successors:
            return
        rivals = 0
        if merged:
            rivals = 2 if max(probability for probability, _, _ in merged.values()) >= LIKELY else 1
        others = set(merged)
        found: list[Candidate] = []
        for token, rank, level, paired in successors:
            cell = logits_cell(rank, level, paired, rivals, token in others)
            found.append((token, cell, ()))
            probability, (best, source, below) = estimate(cell), merged.get(token, NO_CANDIDATE)
            if probability > best:
                best, source = probability, LOGITS
            merged[token] = (best, source, [*below, (self, ())])
        by_source.append((self, found))
