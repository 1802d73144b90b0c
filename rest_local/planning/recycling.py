"""How long a step may read rows of logits for the source `logits`: what its drafts have paid for.

Every step earns a small share of a plain step, and half of what the source's own drafts save, smoothed over some
hundred steps. So a machine on which they do not pay spends `ALLOWANCE` of its time on the table and no more, which is
how text on which they do pay is noticed.
"""

from __future__ import annotations

MOST_MS = 0.15  # in one step
ALLOWANCE = 0.002  # of a plain step
SPENT = 0.5  # of the smoothed saving
SMOOTHING = 1 / 256  # weight of a step
START = 0.01  # plain steps that a step is expected to save before any is counted


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
