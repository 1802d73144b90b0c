"""Decide what is worth its price: whether a step looks up, and how many nodes it submits.

- `Prices` gives the milliseconds of a step by its number of tokens: the cost curve plus the driver's own time.
- `Budget` bounds what a request may lose to drafts that fail, in milliseconds. It begins with a share of what drafts
  save for a request on average (`Savings`), every step earns a small share of a plain step, a draft pays what it costs
  beyond a plain step, and accepted tokens pay back what they save. A draft may cost at most the credit. So at any point
  of a request, whatever the text and however wrong the estimates are, drafts have lost at most what it began with and
  `ALLOWANCE` of its plain time.
- `Plan` maximises (guaranteed + expected accepted tokens) / t(n) over the number of nodes; 0 nodes is plain decoding.
- `Trigger` decides about lookups: a step makes one if it is expected to save more time than it takes. The saving is
  learned for each case that can be told without a lookup: how many of the newest tokens occur earlier in the request's
  own text, or whether the answer follows the prediction. Other lookups take EXPLORATION_SHARE of the time: one that
  costs less is made at every step. From them acceptance is learned, and text that becomes predictable is noticed.
- `grow` grows the trees of one request or of several by such a rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import ceil

import numpy as np

from rest_local.calibration.cost import COUNTS, LARGEST, CostCurve
from rest_local.drafting.tree import Growth

REPEATS = (1, 2, 3, 8)  # Lengths of the newest tokens that are searched in the request's own text.
LOOKUP_MS = 0.15  # Milliseconds of a lookup, and of other work of the driver, before any is measured.
# The share of plain time that may go to lookups which are not expected to pay, and to such passes of a drafting model.
EXPLORATION_SHARE = 0.01
PATIENCE = 4  # Trials in vain make the next ones rarer, until they take EXPLORATION_SHARE / PATIENCE.
SMOOTHING = 1 / 16  # The weight of the newest lookup, request, or step with a drafting model in a mean.
START = 0.3  # Plain steps that a lookup is expected to save before any is made. With 0.1 a fast model loses up to 17%.
REFRESH_MS = 200.0  # The price table is computed again after so many milliseconds of plain steps. That takes 0.2 ms.
# The share of what a draft costs beyond a plain step that it must be expected to save. The tree that looks best has the
# luckiest estimates, so drafts give 83 to 95% of the tokens that are expected of them.
MIN_RETURN = 0.25
ALLOWANCE = 0.03  # The share of plain decoding time that failed drafts may lose.
SAVINGS_SHARE = 0.05  # The share of what drafts save for a request that the next one may lose at once.
FIRST_SAVING = 40.0  # Plain steps that drafts are taken to save for a request before there was one.


class Gains:
    """Plain steps that a lookup is expected to save, by how many lengths of REPEATS repeat. All requests of an engine
    share them. They are means over all lookups while these are few, then over some 1/SMOOTHING.
    """

    def __init__(self) -> None:
        self.learned = 0
        self.savings = [START] * (len(REPEATS) + 1)
        self._seen = [0.5] * len(self.savings)  # START counts as half of a lookup.

    def learn(self, length: int, saving: float) -> None:
        self.learned += 1
        self._seen[length] += 1
        self.savings[length] += max(SMOOTHING, 1 / self._seen[length]) * (saving - self.savings[length])


class Trigger:
    """The trigger of one request; call `begin` when the request starts."""

    def __init__(self, gains: Gains | None = None) -> None:
        self.gains = gains or Gains()
        self.begin()

    def begin(self) -> None:
        self._length = 0  # How many lengths of REPEATS repeat.
        self._since = 0  # Steps since the last lookup.
        self._is_trial = False  # The last lookup was not expected to pay.
        self._patience = 1  # It waits so many times as long for a trial, after trials in vain.
        self._decided: tuple[int, float] | None = None  # What `_pays` was decided from.
        self.free_steps = 0  # So many of the next steps cannot fire: nothing has to be decided in them.
        self.rested = 0  # Steps of this rest so far.

    def fires(self, repeats: Callable[[int], bool], price: float) -> bool:
        """Return True if a lookup is to be made at a price in plain steps.

        `repeats(n)` tells whether the newest n tokens occur earlier in the request's own text; False for n implies
        False for more. One call decides unless there is a lookup, and none where no number of repeated tokens makes a
        lookup pay. It takes 1 us and that call.
        """
        known = (self.gains.learned, price)
        if known != self._decided:
            self._decide(known)
        self._since += 1
        waited = self._since >= self._longest_wait
        least = self._least_paying
        if not waited and least and (least > len(REPEATS) or not repeats(REPEATS[least - 1])):
            return False
        length = 0
        while length < len(REPEATS) and repeats(REPEATS[length]):
            length += 1
        self._length = length
        self._is_trial = waited and not self._pays[length]
        return waited or self._pays[length]

    def allow_rest(self, repeats: Callable[[int], bool], most: int) -> None:
        """Find out, after `fires` said no, how many of the next steps cannot fire either, `most` at most, if each adds
        one token and no lookup or price comes in between.

        A text that repeats fewer than n/2 of its newest tokens needs more than n/2 further tokens to repeat n.
        """
        free, least = self._longest_wait - 1 - self._since, self._least_paying
        if least <= len(REPEATS):
            needed = REPEATS[least - 1] if least else 0
            half = needed // 2
            free = min(free, needed - half) if half and not repeats(half) else 0
        self.free_steps = max(0, min(free, most))

    def rest(self, steps: int) -> None:
        """Count steps in which nothing had to be decided."""
        self.free_steps -= steps
        self.rested += steps

    def end_rest(self) -> int:
        """Do what the steps of the rest left undone, and return how many they were."""
        rested, self.rested, self.free_steps = self.rested, 0, 0
        self._since += rested
        return rested

    def _decide(self, known: tuple[int, float]) -> None:
        """Find out with how many lengths of REPEATS that repeat a lookup pays, and the least such number."""
        self._decided = known
        _, price = known
        self._longest_wait = longest_wait(price * self._patience)
        self._pays = [saving >= price for saving in self.gains.savings]
        self._least_paying = next((length for length, pays in enumerate(self._pays) if pays), len(self._pays))

    def learn(self, saving: float) -> None:
        """Count the lookup of this step, whose draft is expected to save `saving` plain steps, 0 without one."""
        self.gains.learn(self._length, saving)
        self._patience = min(2 * self._patience, PATIENCE) if self._is_trial and not saving else 1
        self._since = 0


def longest_wait(price: float) -> int:
    """Return after how many steps a lookup is made in any case. Its price is in plain steps."""
    return max(1, ceil(price / EXPLORATION_SHARE))


def in_words(plain_ms: float) -> str:
    """Tell the user when lookups are made if a plain step takes `plain_ms`."""
    share = LOOKUP_MS / plain_ms
    wait = longest_wait(share)
    if wait == 1:
        return f"at every step: one takes {share:.1%} of a plain step"
    return (
        f"if the expected saving exceeds the time of one ({share:.1%} of a plain step), and at least every {wait} steps"
    )


class Savings:
    """The time that drafts save for a request on average, in milliseconds, over some sixteen requests of an engine."""

    def __init__(self) -> None:
        self._requests = self._total = 0.0

    def begin(self, plain: float) -> float:
        """Count a request whose plain step takes `plain` ms, and return what it may lose at once."""
        if not self._requests:
            self._requests, self._total = 1.0, FIRST_SAVING * plain
        credit = SAVINGS_SHARE * max(0.0, self._total / self._requests)
        self._requests = 1 + (1 - SMOOTHING) * self._requests
        self._total *= 1 - SMOOTHING
        return credit

    def add(self, saved: float) -> None:
        """Count what a draft saved against plain steps, negative if it failed."""
        self._total += saved


class Budget:
    """The budget of one request: call `begin` when the request starts and `earn` before each step. All amounts are
    milliseconds unless stated otherwise.
    """

    def __init__(self) -> None:
        self.credit = 0.0
        self._plain = 1.0

    def begin(self, plain: float, credit: float = 0.0) -> None:
        """Start a new request whose plain step takes `plain` ms, and which may lose `credit` ms at once."""
        self._plain = plain
        self.credit = credit

    def earn(self, plain: float, allowance: float = ALLOWANCE) -> None:
        """Start a step; a plain one would take `plain` ms."""
        self._plain = plain
        self.credit += allowance * plain

    def earn_again(self, steps: int) -> None:
        """Start steps at the price of the last one. They are added one by one, so that the sum is the same."""
        for _ in range(steps):
            self.earn(self._plain)

    def settle(self, saved: float) -> None:
        """Account for a draft: what it saved against plain steps, negative if it failed."""
        self.credit += saved


@dataclass
class StepOverhead:
    """The driver's own time in a step, in milliseconds, learned from real steps."""

    lookup: float = LOOKUP_MS  # A lookup, with all drafting if nothing is submitted.
    step: float = LOOKUP_MS  # Any step: batch, sampling, bookkeeping.
    tree: float = LOOKUP_MS  # What a step with a draft takes in addition.
    NODE = 0.014  # What each drafted node takes in addition: growing, laying out and walking the tree.

    def learn_lookup(self, ms: float) -> None:
        """Count a step that looked up and submitted nothing."""
        self.lookup = _smoothed(self.lookup, ms)

    def learn_step(self, n_nodes: int, ms: float) -> None:
        """Count a step without a lookup, or with a draft of `n_nodes`."""
        if n_nodes:
            self.tree = _smoothed(self.tree, max(0.01, ms - self.step - self.NODE * n_nodes))
        else:
            self.step = _smoothed(self.step, ms)


def _smoothed(now: float, ms: float) -> float:
    """Move a twentieth of the way to `ms`; an outlier counts as at most four times the present value."""
    return now + 0.05 * (min(max(ms, 0.0), 4 * now) - now)


class Prices:
    """Milliseconds of a step by its number of tokens, and the smallest slope from each size on.

    They are computed again every REFRESH_MS, and every LARGEST tokens of context, which takes 60 us.
    """

    def __init__(self, curve: CostCurve, driver: StepOverhead) -> None:
        self._curve, self._driver = curve, driver
        self._refresh_in = 0
        self._bucket = -1
        self._tables: tuple[list[float], list[float]] = ([], [])

    def count_steps(self, n: int = 1) -> None:
        """Note that the cost curve has observed steps."""
        self._refresh_in -= n

    def steps_left(self, n_ctx: int) -> int:
        """Return for how many steps of one token after the one at `n_ctx` the prices stay as they are."""
        return min(self._refresh_in - 1, LARGEST - 1 - n_ctx % LARGEST)

    def at(self, n_ctx: int) -> tuple[list[float], list[float]]:
        """Return cost and slope at `n_ctx` tokens of context, [64] each, indexed by the number of tokens less one."""
        if self._bucket != n_ctx // LARGEST or self._refresh_in <= 0:
            cost = self._curve.at(n_ctx) + self._driver.step
            cost[1:] += self._driver.tree + self._driver.NODE * COUNTS[:-1]
            cost = np.minimum.accumulate(cost[::-1])[::-1]  # A size that costs more than a larger one is padded.
            rise = cost[None, :] - cost[:, None]
            slope = np.divide(rise, _GAPS, out=np.full_like(rise, np.inf), where=_GAPS > 0).min(axis=1)
            self._tables = (cost.tolist(), slope.tolist())
            self._bucket, self._refresh_in = n_ctx // LARGEST, ceil(REFRESH_MS / cost[0])
        return self._tables


_GAPS = COUNTS[None, :] - COUNTS[:, None]


@dataclass(slots=True)
class Plan:
    """The rule for one step. The drafter calls `worth` before each node; `best` is the number of nodes to submit.

    Without `rate`, the rate of the step itself is maximised. With a drafting model, the time of its passes is spent
    before the size of the tree is decided, and steps differ more. So there `rate` is given, the tokens per millisecond
    of many steps, and the tokens that the step gives beyond that are maximised, which maximises the rate in the long
    run.
    """

    cost: list[float]  # Milliseconds of a step with n drafted nodes, n = 0..limit.
    slope: list[float]  # The smallest cost in milliseconds of a further node, from each number of nodes on.
    guaranteed: float  # Tokens that the step yields without any draft: one for each request.
    rate: float | None = None
    best: int = 0
    expected: float = 0.0  # Accepted nodes that are expected of all that were counted.
    saving: float = 0.0  # Milliseconds that the `best` nodes are expected to save.
    grown: int = 0  # Nodes that were counted.
    best_rate: float = field(init=False)
    _plain: float = field(init=False)
    _beyond: float = 0.0  # Tokens that the `best` nodes are expected to give beyond `rate`.

    def __post_init__(self) -> None:
        self._plain = self.cost[0] / self.guaranteed
        self.best_rate = 1 / self._plain

    def afford(self, credit: float) -> None:
        """Leave only the sizes that cost at most `credit` ms more than a plain step."""
        self.cost = self.cost[: max(1, bisect_right(self.cost, self.cost[0] + credit))]

    @property
    def price_of_time(self) -> float:
        """Return how many tokens a millisecond is worth in this step."""
        return self.rate or self.best_rate

    def worth(self, probability: float) -> bool:
        """Count a node of this joint probability, and say whether the tree should grow by it. Constant time."""
        n = self.grown + 1
        if n >= len(self.cost) or probability <= self.price_of_time * self.slope[n - 1]:
            return False
        self.grown = n
        self.expected += probability
        extra = self.cost[n] - self.cost[0]
        beyond = self.expected - self.rate * extra if self.rate else 0.0
        rate = (self.guaranteed + self.expected) / self.cost[n]
        if beyond > self._beyond if self.rate else rate >= self.best_rate:
            saving = self.expected * self._plain - extra
            if self.rate or saving >= MIN_RETURN * extra:
                self.best, self.saving, self._beyond = n, saving, beyond
                if not self.rate:
                    self.best_rate = rate
        return True


Worth = Callable[[float], bool]  # Tells whether to add a node, by its joint probability.
Answers = Callable[[], bool]  # Asks a drafting model about the open nodes in one pass, or decides against it: False.


class TreeFailed(Exception):
    """Growing the tree of this number failed, for the reason that is its cause."""

    def __init__(self, number: int) -> None:
        super().__init__(f"tree {number}")
        self.number = number


def refuse() -> bool:
    """Leave all open nodes without an answer."""
    return False


def grow(growths: Sequence[Growth], worth: Worth, limit: int = LARGEST, answers: Answers = refuse) -> list[int]:
    """Grow the tree of one request or those of several, always by the likeliest node of all, to `limit` nodes in total.
    Returns the number of the tree that each node was added to. Raises TreeFailed.

    `worth` is called before each addition with the joint probability of that node. Nodes come in descending order, but
    for those that an answer brings, so the first False ends the growth. `answers` asks about the open nodes of all
    trees in one pass, where the model promises more than what is known; False if that does not pay.
    """
    order: list[int] = []
    heap = _likeliest(growths)
    while heap and len(order) < limit:
        key, number = heap[0]
        growth = growths[number]
        best = growth.best
        if growth.promised > best:
            if not answers():
                for each in growths:
                    each.decline()
            heap = _likeliest(growths)
            continue
        if not worth(-key):
            break
        try:
            growth.grow()
            best = max(growth.best, growth.promised)
        except Exception as error:
            raise TreeFailed(number) from error
        order.append(number)
        if best:
            heapreplace(heap, (-best, number))
        else:
            heappop(heap)
    return order


def _likeliest(growths: Sequence[Growth]) -> list[tuple[float, int]]:
    """Make the heap of the trees by their likeliest node, known or promised."""
    keys = (max(growth.best, growth.promised) for growth in growths)
    heap = [(-key, number) for number, key in enumerate(keys) if key]
    heapify(heap)
    return heap
