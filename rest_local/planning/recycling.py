"""Whether the source `logits` is used, and how long a step may read rows of logits for it.

It is used where a draft of 8 tokens costs little (`is_flat`): elsewhere it does not pay. With the demo model's answers
(docs/LOG.md) it gains 2 to 10% on curves on which 8 tokens take 1.03 and 1.15 plain steps, and on those on
which they take 1.6 to 2.6 it gains nothing and loses up to 2%.

Every step earns a small share of a plain step, and half of what the source's own drafts save, smoothed over some
hundred steps. So a machine on which they do not pay spends `ALLOWANCE` of its time on the table and no more, which is
how text on which they do pay is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

FLAT = 1.3  # plain steps
DRAFT = 8  # tokens
MOST_MS = 0.15  # in one step
ALLOWANCE = 0.002  # of a plain step
SPENT = 0.5  # of the smoothed saving
SMOOTHING = 1 / 256  # weight of a step
START = 0.01  # plain steps that a step is expected to save before any is counted


def is_flat(cost: Sequence[float]) -> bool:
    """Whether DRAFT tokens cost at most FLAT plain steps. `cost`: by the number of tokens less one."""
    return cost[min(DRAFT, len(cost)) - 1] <= FLAT * cost[0]


class RowBudget:
    """Shared by the requests of a lane. Amounts are milliseconds."""

    def __init__(self) -> None:
        self.saving = START  # plain steps in a step
        self._left = 0.0

    def earn(self, plain: float) -> None:
        """Start a step of one request; a plain one would take `plain` ms."""
        self.saving -= SMOOTHING * self.saving
        self._left = min(self._left + plain * (ALLOWANCE + SPENT * max(0.0, self.saving)), MOST_MS)

    def settle(self, saved: float) -> None:
        """Count what the drafts of the source saved in a step, in plain steps; negative if they failed."""
        self.saving += SMOOTHING * saved

    @property
    def ms(self) -> float:
        """What the step may take, at most MOST_MS."""
        return self._left

    def spend(self, ms: float) -> None:
        """Count what it took, at most what was left."""
        self._left = max(0.0, self._left - ms)
