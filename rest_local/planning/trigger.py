"""The trigger of lookups: a step makes one if it is expected to save more time than it takes.

`fires` says before a step whether to make a lookup; `learn` takes its outcome. The saving is learned for each
combination of what is known without a lookup:

- the entropy of the distribution that gave the newest token, as far as it is known,
- how many of the newest tokens occur earlier in the request's own text, or whether the answer follows the prediction,
- whether the last lookup paid.

So the threshold is not a number of nats: it is where the expected saving falls below the measured price. Below it, one
lookup in `LONGEST_WAIT` steps is made nevertheless, and the first one that pays counts as a success again. That is how
text that becomes predictable is noticed within that many steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

ENTROPIES = (0.05, 0.2, 0.5, 1.0, 1.8, 3.0)  # nats: upper ends of the buckets; the last bucket is open
LOOKUP_MS = 0.15  # milliseconds of a lookup before any is measured
LONGEST_WAIT = 16  # steps
SMOOTHING = 1 / 32  # weight of a lookup against the earlier ones, after the first 32
EXPLORATIONS = 20_000  # lookups that are made to learn. Without them, HumanEval with a datastore and chat with history
# on a GPU lose 4 to 5%, because nothing is learned from skipped lookups
EXPLORATION_PRICE = 0.05  # plain steps: a lookup that costs more is made only where it pays. It costs a quarter of a
# plain step of 0.6 ms, and text without matches lost 2% more
COARSE_STRENGTH = 16  # lookups that the coarse cell counts for
START = 0.3  # plain steps that a lookup is expected to save before any is made
EXPLORATION_VALUE = 0.005  # plain steps that a lookup is worth for what is learned from it
REPEATS = (1, 2, 3, 8)  # lengths of the newest tokens that are searched in the request's own text
RECENT = 1  # fruitless lookups that are distinguished; three gain nothing

_N_COARSE = (len(REPEATS) + 1) * (RECENT + 1)  # cells of an unknown entropy; these are the first cells
_N_CELLS = (len(ENTROPIES) + 2) * _N_COARSE


class Gains:
    """Plain steps that a lookup saves, by cell. All requests of an engine share them."""

    def __init__(self) -> None:
        self.saving = [START] * _N_CELLS
        self.seen = [0] * _N_CELLS
        self.explored = 0

    def estimate(self, cell: int, coarse: int) -> float:
        """The expected saving of a lookup in a cell, blended with that of the coarse cell while counts are few."""
        seen = self.seen[cell]
        return (seen * self.saving[cell] + COARSE_STRENGTH * self.saving[coarse]) / (seen + COARSE_STRENGTH)

    def learn(self, cell: int, saving: float) -> None:
        """Count a lookup."""
        self.seen[cell] += 1
        self.saving[cell] += max(SMOOTHING, 1 / (self.seen[cell] + 1)) * (saving - self.saving[cell])


class Trigger:
    """The trigger of one request; call `begin` when the request starts."""

    def __init__(self, gains: Gains | None = None) -> None:
        self.gains = gains or Gains()
        self.begin()

    def begin(self) -> None:
        """Start a new request."""
        self._cell = self._coarse = 0
        self._fruitless = 0  # lookups since the last one that paid
        self._since = 0  # steps since the last lookup

    def fires(self, entropies: Sequence[float], repeats: Callable[[int], bool], price: float) -> bool:
        """Whether to make a lookup at a price in plain steps. `repeats(n)`: whether the newest n tokens occur earlier
        in the request's own text; 10 us for all of REPEATS.
        """
        bucket = 1 + bisect_left(ENTROPIES, entropies[-1]) if entropies else 0
        length = sum(repeats(n) for n in REPEATS) if price > EXPLORATION_VALUE else 0
        self._coarse = length * (RECENT + 1) + min(self._fruitless, RECENT)
        self._cell = self._coarse + bucket * _N_COARSE
        self._since += 1
        expected = self.gains.estimate(self._cell, self._coarse) + EXPLORATION_VALUE
        return expected >= price or self._since >= LONGEST_WAIT

    def learn(self, saving: float, price: float, found: bool = False) -> None:
        """Count the lookup of this step. `saving`: plain steps that its draft is expected to save, 0 without a draft.
        `found`: whether there were candidates. The first EXPLORATIONS lookups with candidates that do not pay count as
        worth their price, if that is at most EXPLORATION_PRICE, because the acceptance rates are learned from them.
        """
        if found and saving < price and price <= EXPLORATION_PRICE and self.gains.explored < EXPLORATIONS:
            self.gains.explored += 1
            saving = price
        for cell in {self._cell, self._coarse}:
            self.gains.learn(cell, saving)
        self._since = 0
        self._fruitless = 0 if saving > price else self._fruitless + 1


def in_words(plain_ms: float) -> str:
    """A phrase for the user: when lookups are made if a plain step takes `plain_ms`."""
    share = LOOKUP_MS / plain_ms
    if share <= EXPLORATION_VALUE:
        return f"at every step: one takes {share:.1%} of a plain step"
    return (
        f"if the expected saving exceeds the time of one ({share:.1%} of a plain step), and at least every "
        f"{LONGEST_WAIT} steps"
    )
