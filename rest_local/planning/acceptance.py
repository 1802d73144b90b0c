"""Estimate what is likely: the acceptance rate of drafted tokens, learned by evidence cell and corrected by token.

- `Acceptance` maps a cell (`rest_local.drafting.sources`) to a probability. The raw share of rows that agree is
  over-confident for a context that was seen once: 3% of such drafts were accepted (docs/DESIGN.md section 5). So hits
  are counted per cell, a cell with few counts backs off to the cells of the same source, length and share (its
  marginal), and a marginal backs off to the shipped prior. Counts decay, so that the estimate follows the text.
- `priors.json` holds the shipped priors. `python -m benchmarks priors` writes it from text that no benchmark tests, and
  the file says how much.
- `TokenCalibrator` corrects these estimates by the tokens themselves: a logistic regression that is learned online, of
  the candidates below a node and the model's token there, whether they were submitted or not. It adds five weights to
  the log-odds of the evidence, each with its own step size (AdaGrad): of the token; of the token after the last token;
  of the token after the last but one; of the last token, whatever follows; and of the odds in halves of a nat, the sum
  of all estimates at the node in quarters (above 1 if sources propose different tokens), and the number of sources that
  propose the token. Log loss on recorded answers from a cold start, for the first and the second half of the answers,
  without and with it: HumanEval with a datastore 0.221 and 0.210, with 0.183 and 0.168; chat with history 0.175 and
  0.178, with 0.161 and 0.157; MT-Bench 0.336 and 0.346, with 0.310 and 0.311. Tokens that a drafting model proposes
  have weights of their own, because wrong text is likely after the same tokens and what the model proposes is not:
  with common weights a block drafter and text together lost 2 to 4% in chat and agents' steps (docs/LOG.md).

The module knows nothing about models or text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from math import exp, log, sqrt
from pathlib import Path

from rest_local.drafting.sources import (
    CELLS_PER_SOURCE,
    GRAMMAR,
    MODEL,
    N_CELLS,
    N_CONFIDENCES,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    SOURCES,
    Merged,
    PrecedingBigram,
    grammar_cell,
    model_cell,
)
from rest_local.drafting.tree import Calibrated

STRENGTH = 8.0  # The marginal counts for so many observations in a cell, and the prior in a marginal.
HALVE_AT = 400.0  # A cell halves its counts at so many observations.
# The rates of forced text until it was counted, by whether the text before it is split otherwise than the vocabulary
# does, and by kind. In JSON answers the toy model had 0.80, 0.95, 0.91, 0.74, 0.11 and 0.54, 0.42, 0.00, 0.83, 0.52;
# text of Qwen's vocabulary, split as it splits it, 1.00, 1.00, 0.73, 0.70, 0.00.
FORCED_RATES = {False: (0.95, 0.95, 0.75, 0.75, 0.03), True: (0.5, 0.4, 0.1, 0.6, 0.5)}
PRIORS = Path(__file__).with_name("priors.json")

_N_MARGINALS = len(SOURCES) * N_LENGTHS * N_SHARES


def _marginal_of(cell: int) -> int:
    """Return the marginal of a cell: its source, match length and share."""
    rest, share = divmod(cell, N_SHARES)
    return (rest // N_ROWS) * N_SHARES + share


class Acceptance:
    """Beta counts per cell with decay. Not thread safe. Holds lists of a few thousand floats."""

    def __init__(self) -> None:
        self._marginal, self._prior, self._lift = _shipped_tables()
        self._hits = [0.0] * N_CELLS
        self._seen = [0.0] * N_CELLS
        self._marginal_hits = [0.0] * _N_MARGINALS
        self._marginal_seen = [0.0] * _N_MARGINALS
        self._known: dict[int, float] = {}  # Estimates since the last change.
        self.changes = 0

    def estimate(self, cell: int) -> float:
        """Return the probability in (0, 1) that a candidate with this evidence is the model's token.

        It takes under 1 us, and 0.1 us if the estimate is known.
        """
        known = self._known.get(cell)
        if known is not None:
            return known
        marginal = self._marginal[cell]
        coarse = (self._marginal_hits[marginal] + STRENGTH * self._prior[marginal]) / (
            self._marginal_seen[marginal] + STRENGTH
        )
        coarse = min(coarse * self._lift[cell], 0.99)
        known = (self._hits[cell] + STRENGTH * coarse) / (self._seen[cell] + STRENGTH)
        self._known[cell] = known
        return known

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count (cell, whether it was the model's token) for every proposal, submitted or not."""
        self._known.clear()
        self.changes += 1
        for cell, hit in outcomes:
            marginal = self._marginal[cell]
            self._seen[cell] += 1.0
            self._marginal_seen[marginal] += 1.0
            if hit:
                self._hits[cell] += 1.0
                self._marginal_hits[marginal] += 1.0
            if self._seen[cell] >= HALVE_AT:
                self._seen[cell] /= 2
                self._hits[cell] /= 2
            if self._marginal_seen[marginal] >= 4 * HALVE_AT:
                self._marginal_seen[marginal] /= 2
                self._marginal_hits[marginal] /= 2


@cache
def _shipped_tables() -> tuple[list[int], list[float], list[float]]:
    """Return the marginal of each cell, the prior rate of each marginal, and the rate of each cell over that prior.

    All instances share the lists and do not change them.
    """
    rates, marginals = shipped_rates(), [_marginal_of(cell) for cell in range(N_CELLS)]
    priors = [0.0] * _N_MARGINALS  # The mean rate of the cells of each marginal.
    for marginal, rate in zip(marginals, rates, strict=True):
        priors[marginal] += rate / N_ROWS
    return marginals, priors, [rate / priors[m] for rate, m in zip(rates, marginals, strict=True)]


@cache
def shipped_rates() -> tuple[float, ...]:
    """Return the prior probability of each cell. It takes a millisecond, once per process."""
    data = json.loads(PRIORS.read_text("utf-8")) if PRIORS.exists() else {}
    if (data.get("lengths"), data.get("rows"), data.get("shares")) != (N_LENGTHS, N_ROWS, N_SHARES):
        return (0.2,) * N_CELLS  # This happens only while the layout is being changed.
    rates = {
        "edit": data["rates"]["prediction"],
        **data["rates"],
        "model": model_rates(),
        "grammar": grammar_rates(),
    }
    return tuple(rate for source in SOURCES for rate in rates[source])


def model_rates() -> list[float]:
    """Return the prior rates of the source `model`, by cell: the probability that the cell stands for."""
    rates = [0.0] * CELLS_PER_SOURCE
    for depth in range(N_LENGTHS):
        for bucket in range(N_CONFIDENCES):
            probability = 1.0 - (1.0 - (bucket + 0.5) / N_CONFIDENCES) ** 2
            rates[model_cell(depth, probability) - MODEL * CELLS_PER_SOURCE] = probability
    return rates


def grammar_rates() -> list[float]:
    """Return the prior rates of the source `grammar`, by cell."""
    rates = [0.5] * CELLS_PER_SOURCE
    for apart, kinds in FORCED_RATES.items():
        for kind, rate in enumerate(kinds):
            for depth in range(N_ROWS):
                rates[grammar_cell(kind, apart, depth) - GRAMMAR * CELLS_PER_SOURCE] = rate
    return rates


SLOTS = 1 << 18  # Each of the two lists has so many weights.
SPREAD = 0x237B1  # It is odd, so that the slots of neighbouring ids lie far apart.
COMPUTED = 0x1F7A5  # The weights of tokens that a drafting model proposes lie so many slots further on.
# The rate of learning, and the squared error that a weight starts with. With 0.3 to 0.7, log loss is the same to half a
# percent.
RATE = 0.5


class TokenCalibrator:
    """The corrections by token. They take 4 MB, and 48 bytes for each learned weight. Not thread safe."""

    def __init__(self) -> None:
        self._weights = [0.0] * SLOTS
        self._squares = [RATE] * SLOTS

    def calibrate(self, preceding: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        """Return the corrected probability of each of `candidates`, in 1 us per node and 0.6 us per candidate.

        Candidates with little evidence are corrected too: without, HumanEval loses 2% of its tokens per step.
        """
        weights = self._weights
        before, last = (preceding[0] * SPREAD + 1) * SPREAD * SPREAD, (preceding[1] * SPREAD + 2) * SPREAD
        total = 0.0  # It is a loop because most nodes have one candidate, for which `sum` takes longer than the rest.
        for found in candidates.values():
            total += found[0]
        by_total = (int(4.0 * total) * SPREAD + 3) * SPREAD
        calibrated: list[Calibrated] = []
        for token, (estimate, _, members) in candidates.items():
            odds = log(estimate / (1.0 - estimate))
            shift = COMPUTED if members[-1][0].source == MODEL else 0  # The model comes last.
            own = token * SPREAD + shift
            alone, pair, apart = own % SLOTS, (own + last) % SLOTS, (own + before) % SLOTS
            after = (last + shift) % SLOTS
            bucket = ((by_total + round(2.0 * odds)) * SPREAD + len(members) + shift) % SLOTS
            odds += weights[after] + weights[alone] + weights[pair] + weights[apart] + weights[bucket]
            calibrated.append((token, 1.0 / (1.0 + exp(-odds)), (alone, pair, apart, after, bucket)))
        return calibrated

    def learn(self, calibrations: Iterable[tuple[Iterable[Calibrated], int]]) -> None:
        """Learn from the candidates that were calibrated at some nodes, and the model's token at each."""
        weights, squares = self._weights, self._squares
        for calibrated, right in calibrations:
            for token, probability, used in calibrated:
                error = (token == right) - probability
                square, step = error * error, RATE * error
                for slot in used:
                    squares[slot] = sum_ = squares[slot] + square
                    weights[slot] += step / sqrt(sum_)
