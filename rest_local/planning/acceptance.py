"""The acceptance rate of drafted tokens by evidence cell, learned online.

A cell (see `rest_local.drafting.candidates`) goes in, a probability comes out. The raw share of rows that agree is
over-confident for a context that was seen once: 3% of such drafts were accepted (docs/DESIGN.md section 5). So hits are
counted per cell, a cell with few counts backs off to the cells of the same source, length and share (its marginal), and
a marginal backs off to the shipped prior. Counts decay, so that the estimate follows the text. The module knows nothing
about models or text.

`priors.json` holds the shipped priors. `python -m benchmarks.priors` writes it from text that no benchmark tests, and
the file says how much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from rest_local.drafting.candidates import (
    CELLS_PER_SOURCE,
    N_CELLS,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    SOURCES,
    grammar_rates,
    model_rates,
)

CELL_STRENGTH = 8.0  # observations that the estimate of the marginal counts for
MARGINAL_STRENGTH = 12.0  # observations that the prior counts for
MAX_PRIOR = 0.99  # the largest estimate of a cell without counts
HALVE_AT = 400.0  # observations at which a cell halves its counts
PRIORS = Path(__file__).with_name("priors.json")
UNKNOWN = 0.2  # prior if the file has another layout: never in a release, only while the layout is being changed

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


Counts = Mapping[int, tuple[float, float]]  # by cell: (hits, proposals)


class Acceptance:
    """Beta counts per cell with decay. Not thread safe. Holds lists of a few thousand floats."""

    def __init__(self) -> None:
        self._marginal, self._prior, self._lift = _shipped_tables()
        self._hits = [0.0] * N_CELLS
        self._seen = [0.0] * N_CELLS
        self._new_hits = [0.0] * N_CELLS  # since the last `drain`, without decay
        self._new_seen = [0.0] * N_CELLS
        self._marginal_hits = [0.0] * _N_MARGINALS
        self._marginal_seen = [0.0] * _N_MARGINALS
        self._known: dict[int, float] = {}  # estimates since the last change

    def estimate(self, cell: int) -> float:
        """Probability in (0, 1) that a candidate with this evidence is the model's token. Takes under 1 us, and 0.1 us
        if the estimate is cached.
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
        coarse = min(coarse * self._lift[cell], MAX_PRIOR)
        return (self._hits[cell] + CELL_STRENGTH * coarse) / (self._seen[cell] + CELL_STRENGTH)

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count (cell, whether it was the model's token) for every proposal, submitted or not."""
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
            if self._seen[cell] >= HALVE_AT:
                self._seen[cell] /= 2
                self._hits[cell] /= 2
            if self._marginal_seen[marginal] >= 4 * HALVE_AT:
                self._marginal_seen[marginal] /= 2
                self._marginal_hits[marginal] /= 2

    def drain(self) -> Counts:
        """The counts since the last call, or since the start, to be stored for another run. They do not decay."""
        new = {cell: (self._new_hits[cell], seen) for cell, seen in enumerate(self._new_seen) if seen}
        self._new_hits, self._new_seen = [0.0] * N_CELLS, [0.0] * N_CELLS
        return new

    def add(self, counts: Counts) -> None:
        """Add counts of earlier runs. They weigh and decay like those of this run, but `drain` does not return them."""
        self._known.clear()
        for cell, (hits, seen) in counts.items():
            self._hits[cell] += hits
            self._seen[cell] += seen
            self._marginal_hits[self._marginal[cell]] += hits
            self._marginal_seen[self._marginal[cell]] += seen

    def seen(self, cell: int) -> float:
        """The number of observations in a cell."""
        return self._seen[cell]


@cache
def _shipped_tables() -> tuple[list[int], list[float], list[float]]:
    """By cell its marginal, by marginal the prior rate, by cell its rate over that prior. All instances share the lists
    and do not change them.
    """
    rates, marginals = shipped_rates(), [_marginal_of(cell) for cell in range(N_CELLS)]
    priors = _marginal_priors(rates)
    return marginals, priors, [rate / priors[m] for rate, m in zip(rates, marginals, strict=True)]


@cache
def shipped_rates() -> tuple[float, ...]:
    """Prior probability by cell, N_CELLS of them. Takes a millisecond, once per process."""
    data = json.loads(PRIORS.read_text("utf-8")) if PRIORS.exists() else {}
    if (data.get("lengths"), data.get("rows"), data.get("shares")) != (N_LENGTHS, N_ROWS, N_SHARES):
        return (UNKNOWN,) * (len(SOURCES) * CELLS_PER_SOURCE)
    rates = {**data["rates"], "model": model_rates(), "grammar": grammar_rates()}
    return tuple(rate for source in SOURCES for rate in rates[source])
