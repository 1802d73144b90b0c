"""How likely a drafted token is accepted: counts by evidence cell, learned online.

Contract: a cell (see `rest_local.drafting.candidates`) goes in, a probability comes out. Raw shares are over-confident
where a context was seen once (3% of such drafts were accepted, DESIGN.md section 5), so hits are counted per cell, and
a thin cell backs off to the cells of the same source, length and share, and those to a prior. Counts fade so that
the estimate follows the text. Knows nothing about models or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rest_local.drafting.candidates import N_CELLS, N_LENGTHS, N_ROWS, N_SHARES, SOURCES

CELL_STRENGTH = 8.0  # observations the coarser estimate is worth
MARGINAL_STRENGTH = 12.0  # observations the prior is worth
MEMORY = 400.0  # a cell that has seen this many halves its counts

_N_MARGINALS = len(SOURCES) * N_LENGTHS * N_SHARES


def _marginal_of(cell: int) -> int:
    rest, share = divmod(cell, N_SHARES)
    return (rest // N_ROWS) * N_SHARES + share


# Hits over proposals from the context of 655 recorded answers of Llama-3-8B-Instruct, about 390 000 proposals: by
# length bucket where all rows agree, by share bucket where they do not (there the length hardly matters).
_ALL_AGREE = (0.34, 0.50, 0.58, 0.61, 0.67, 0.73, 0.78, 0.84, 0.88, 0.95)
_SOME_AGREE = (0.02, 0.05, 0.13, 0.37, 0.64)
_STORED = 0.6  # text of others predicts less than the request's own, until it has shown otherwise


def _prior(marginal: int) -> float:
    """Before anything is counted here."""
    rest, share = divmod(marginal, N_SHARES)
    source, length = divmod(rest, N_LENGTHS)
    prior = _ALL_AGREE[length] if share == N_SHARES - 1 else _SOME_AGREE[share]
    return prior * _STORED if SOURCES[source] in ("datastore", "history") else prior


Counts = Mapping[int, tuple[float, float]]  # by cell: how often the model said it, how often it was proposed


class Acceptance:
    """Beta counts per cell with decay. Not thread safe. 4 lists of a few thousand floats."""

    def __init__(self) -> None:
        self._marginal = [_marginal_of(cell) for cell in range(N_CELLS)]
        self._prior = [_prior(marginal) for marginal in range(_N_MARGINALS)]
        self._hits = [0.0] * N_CELLS
        self._seen = [0.0] * N_CELLS
        self._new_hits = [0.0] * N_CELLS  # since the last `drain`, without decay
        self._new_seen = [0.0] * N_CELLS
        self._marginal_hits = [0.0] * _N_MARGINALS
        self._marginal_seen = [0.0] * _N_MARGINALS

    def estimate(self, cell: int) -> float:
        """Probability in (0, 1) that a candidate with this evidence is the model's token. Under 1 us."""
        marginal = self._marginal[cell]
        coarse = (self._marginal_hits[marginal] + MARGINAL_STRENGTH * self._prior[marginal]) / (
            self._marginal_seen[marginal] + MARGINAL_STRENGTH
        )
        return (self._hits[cell] + CELL_STRENGTH * coarse) / (self._seen[cell] + CELL_STRENGTH)

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count (cell, was it the model's token) of everything that was proposed, submitted or not."""
        for cell, hit in outcomes:
            marginal = self._marginal[cell]
            self._seen[cell] += 1.0
            self._marginal_seen[marginal] += 1.0
            self._new_seen[cell] += 1.0
            if hit:
                self._hits[cell] += 1.0
                self._new_hits[cell] += 1.0
                self._marginal_hits[marginal] += 1.0
            if self._seen[cell] >= MEMORY:
                self._seen[cell] /= 2
                self._hits[cell] /= 2
            if self._marginal_seen[marginal] >= 4 * MEMORY:
                self._marginal_seen[marginal] /= 2
                self._marginal_hits[marginal] /= 2

    def drain(self) -> Counts:
        """What was learned since the last call (or the beginning), to be kept for another run."""
        new = {cell: (self._new_hits[cell], seen) for cell, seen in enumerate(self._new_seen) if seen}
        self._new_hits, self._new_seen = [0.0] * N_CELLS, [0.0] * N_CELLS
        return new

    def add(self, counts: Counts) -> None:
        """Counts of earlier runs: they weigh and fade as if learned here, and are not drained again."""
        for cell, (hits, seen) in counts.items():
            self._hits[cell] += hits
            self._seen[cell] += seen
            self._marginal_hits[self._marginal[cell]] += hits
            self._marginal_seen[self._marginal[cell]] += seen

    def seen(self, cell: int) -> float:
        """Observations that the estimate of a cell rests on."""
        return self._seen[cell]
