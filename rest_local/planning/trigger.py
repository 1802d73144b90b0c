"""When to look anything up: where a lookup is expected to save more than it takes.

Contract: before a step `wants` says whether to ask the sources; `learn` then takes what came of it. What a lookup saves
is learned by what can be known without one: the entropy of the distribution that gave the newest token whose entropy is
known, how many of the newest tokens stand in the request's own text before (or whether the answer follows the
prediction), and how the last lookups went. So the
threshold is no number of nats: it is where the expected saving falls below the measured price.

Where it is below, one lookup in `LONGEST_WAIT` steps is made all the same, and the first one that pays counts as a
success again: so text that becomes predictable is noticed within so many steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

ENTROPIES = (0.05, 0.2, 0.5, 1.0, 1.8, 3.0)  # nats: upper ends of the buckets; the last one is open
LOOKUP_MS = 0.15  # what a lookup takes until it was measured
LONGEST_WAIT = 16  # steps
FOLLOW = 1 / 32  # weight of a lookup against those before, after the first 32
LESSONS = 20_000  # without, HumanEval with a datastore and chat with history on a GPU lose 4 to 5%: what is skipped
# is not learned from
COARSE_STRENGTH = 16  # lookups that the coarse cell is worth
START = 0.3  # plain steps that a lookup is expected to save before anything is known
TEACHES = 0.005  # plain steps that a lookup is worth for what it teaches about the text
REPEATS = (1, 2, 3, 8)  # newest tokens: whether so many stand in the request's own text before
RECENT = 1  # fruitless lookups that are told apart; three gain nothing

_N_COARSE = (len(REPEATS) + 1) * (RECENT + 1)  # what is known without an entropy; these are the first cells
_N_CELLS = (len(ENTROPIES) + 2) * _N_COARSE


class Gains:
    """Plain steps that a lookup saves, by cell. Shared by all requests of an engine."""

    def __init__(self) -> None:
        self.saving = [START] * _N_CELLS
        self.seen = [0] * _N_CELLS
        self.lessons = 0

    def estimate(self, cell: int, coarse: int) -> float:
        """What a lookup is expected to save in a cell; while that was seen seldom, in the coarse cell that holds it."""
        seen = self.seen[cell]
        return (seen * self.saving[cell] + COARSE_STRENGTH * self.saving[coarse]) / (seen + COARSE_STRENGTH)

    def learn(self, cell: int, saving: float) -> None:
        """Count a lookup."""
        self.seen[cell] += 1
        self.saving[cell] += max(FOLLOW, 1 / (self.seen[cell] + 1)) * (saving - self.saving[cell])


class Trigger:
    """One for each request; `begin` with it."""

    def __init__(self, gains: Gains | None = None) -> None:
        self.gains = gains or Gains()
        self.begin()

    def begin(self) -> None:
        """A new request."""
        self._cell = self._coarse = 0
        self._in_vain = 0  # lookups since the last one that paid
        self._since = 0  # steps since the last lookup

    def wants(self, entropies: Sequence[float], repeats: Callable[[int], bool], price: float) -> bool:
        """Whether to look up, at a price in plain steps. `repeats(n)`: whether the newest n tokens stand in the
        request's own text before; 10 us for all of REPEATS.
        """
        bucket = 1 + bisect_left(ENTROPIES, entropies[-1]) if entropies else 0
        length = sum(repeats(n) for n in REPEATS) if price > TEACHES else 0
        self._coarse = length * (RECENT + 1) + min(self._in_vain, RECENT)
        self._cell = self._coarse + bucket * _N_COARSE
        self._since += 1
        return self.gains.estimate(self._cell, self._coarse) + TEACHES >= price or self._since >= LONGEST_WAIT

    def learn(self, saving: float, price: float, found: bool = False) -> None:
        """The lookup of this step let a draft go that is expected to save so many plain steps; 0 where none went.
        `found`: there were candidates. The first LESSONS such lookups are worth their price for what they teach.
        """
        if found and saving < price and self.gains.lessons < LESSONS:
            self.gains.lessons += 1
            saving = price
        for cell in {self._cell, self._coarse}:
            self.gains.learn(cell, saving)
        self._since = 0
        self._in_vain = 0 if saving > price else self._in_vain + 1


def in_words(plain_ms: float) -> str:
    """When lookups are made where a plain step takes so long, for people."""
    share = LOOKUP_MS / plain_ms
    if share <= TEACHES:
        return f"at every step: one takes {share:.1%} of a plain step"
    return (
        f"where entropy and the last outcomes promise more than one takes ({share:.1%} of a plain step), and every "
        f"{LONGEST_WAIT} steps"
    )
