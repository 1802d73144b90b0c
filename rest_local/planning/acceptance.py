"""How likely a drafted token is accepted: counts by evidence cell, learned online.

Contract: a cell (see `rest_local.drafting.candidates`) goes in, a probability comes out. Raw shares are over-confident
where a context was seen once (3% of such drafts were accepted, DESIGN.md section 5), so hits are counted per cell, and
a thin cell backs off to the cells of the same source, length and share, and those to the shipped prior. Counts fade so
that the estimate follows the text. Knows nothing about models or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rest_local.drafting.candidates import N_CELLS, N_LENGTHS, N_ROWS, N_SHARES, SOURCES
from rest_local.planning.priors import shipped_rates

CELL_STRENGTH = 8.0  # observations the coarser estimate is worth
MARGINAL_STRENGTH = 12.0  # observations the prior is worth
MOST = 0.99  # what an estimate can be before anything was counted
MEMORY = 400.0  # a cell that has seen this many halves its counts

_N_MARGINALS = len(SOURCES) * N_LENGTHS * N_SHARES


def _marginal_of(cell: int) -> int:
    rest, share = divmod(cell, N_SHARES)
    return (rest // N_ROWS) * N_SHARES + share


def _marginal_priors(rates: Sequence[float]) -> list[float]:
    """The mean rate of the cells of one marginal."""
    sums = [0.0] * _N_MARGINALS
    for cell, rate in enumerate(rates):
        sums[_marginal_of(cell)] += rate / N_ROWS
    return sums


Counts = Mapping[int, tuple[float, float]]  # by cell: how often the model said it, how often it was proposed


class Acceptance:
    """Beta counts per cell with decay. Not thread safe. 4 lists of a few thousand floats."""

    def __init__(self) -> None:
        self._marginal = [_marginal_of(cell) for cell in range(N_CELLS)]
        rates = shipped_rates()
        self._prior = _marginal_priors(rates)
        self._lift = [rate / self._prior[m] for rate, m in zip(rates, self._marginal, strict=True)]
        self._hits = [0.0] * N_CELLS
        self._seen = [0.0] * N_CELLS
        self._new_hits = [0.0] * N_CELLS  # since the last `drain`, without decay
        self._new_seen = [0.0] * N_CELLS
        self._marginal_hits = [0.0] * _N_MARGINALS
        self._marginal_seen = [0.0] * _N_MARGINALS
        self._known: dict[int, float] = {}  # estimates made since something was learned

    def estimate(self, cell: int) -> float:
        """Probability in (0, 1) that a candidate with this evidence is the model's token. Under 1 us, 0.1 us where it
        was asked before.
        """
        known = self._known.get(cell)
        if known is None:
            known = self._known[cell] = self._estimate(cell)
        return known

    def _estimate(self, cell: int) -> float:
        marginal = self._marginal[cell]
        coarse = (self._marginal_hits[marginal] + MARGINAL_STRENGTH * self._prior[marginal]) / (
            self._marginal_seen[marginal] + MARGINAL_STRENGTH
        )
        coarse = min(coarse * self._lift[cell], MOST)
        return (self._hits[cell] + CELL_STRENGTH * coarse) / (self._seen[cell] + CELL_STRENGTH)

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count (cell, was it the model's token) of everything that was proposed, submitted or not."""
        self._known.clear()
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
        self._known.clear()
        for cell, (hits, seen) in counts.items():
            self._hits[cell] += hits
            self._seen[cell] += seen
            self._marginal_hits[self._marginal[cell]] += hits
            self._marginal_seen[self._marginal[cell]] += seen

    def seen(self, cell: int) -> float:
        """Observations that the estimate of a cell rests on."""
        return self._seen[cell]
