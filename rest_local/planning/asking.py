"""When a drafting model is asked, and for how much: its passes are part of the price of a draft.

- A pass costs time and, if its tokens are drafted, nodes in the batch. It is worth that if the tokens that it is likely
  to add pay for it at the best rate of tokens per millisecond so far. At one path, it adds the joint probability of the
  path, times how much more often the model's first candidate is right than what is known there already.
- One pass serves all open paths of all requests. A further path is added to it if it pays for its row.
- A request loses at most half of its credit to passes in one step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from numpy.typing import NDArray

from rest_local.drafting.growth import Asker, Question
from rest_local.drafting.models.seam import Drafter, Query
from rest_local.planning.plan import Plan
from rest_local.planning.policy import StepCost

FloatArray = NDArray[np.float64]

INITIAL_CREDIT = 4.0  # plain steps that a new request may lose to a drafting model
INITIAL_GAIN = 0.3  # plain steps that it is expected to save in each step, until anything is measured
LEAST_GAIN = 0.02  # plain steps per step: the saving that is still expected of a drafting model that has lost so far
DEPTHS = 8  # depths whose first candidates are counted apart; the last counter holds all deeper ones
INITIAL_RIGHT = 0.6
STRENGTH = 6.0
OPTIMISM = 1.0  # answers that the depth above counts for
KEPT = 256
INITIAL_STATED = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
_SMOOTHING = 0.05


@dataclass
class ModelStats:
    """What is known of a drafting model: how often its first candidate was right, by depth, and its saving per step,
    in plain steps.
    """

    right: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    seen: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    gain: float = INITIAL_GAIN
    stated: deque[float] = field(default_factory=lambda: deque(INITIAL_STATED, KEPT))
    speedup: float = 1.0
    _tokens: float = 1.0
    _steps: float = 1.0
    _tables: dict[tuple[int, ...], PassValues] = field(default_factory=dict)

    def values(self, plan: Plan, rate: float, level_ms: float, rows: int) -> PassValues:
        """By number of nodes in the tree: the joint probability from which a question is worth a pass."""
        step = round(math.log(rate * plan.cost[0] / plan.guaranteed) / 0.04)
        rate = math.exp(step * 0.04) * plan.guaranteed / plan.cost[0]
        cost = plan.cost
        if plan.budget is not None:
            cost = cost[: max(1, bisect_right(cost, cost[0] + plan.budget.credit))]
        key = (step, rows, len(cost))
        table = self._tables.get(key)
        if table is None or not table.is_current(plan.cost[0], rate, level_ms):
            right = [self._hoped(depth) for depth in range(DEPTHS)]
            table = self._tables[key] = PassValues(cost, rate, level_ms, self.stated, right)
        return table

    @property
    def initial_credit(self) -> float:
        """Plain steps that a new request may lose to the model. The user who loads one wants it tried at once, not
        after the steps that would earn the first draft. INITIAL_CREDIT at most, and less the less it saves.
        """
        return INITIAL_CREDIT * max(0.0, min(self.gain / INITIAL_GAIN, 1.0))

    def _hoped(self, depth: int) -> float:
        p = self.promise(depth)
        return min(0.98, p + OPTIMISM * math.sqrt(p * (1.0 - p) / (self.seen[depth] + 2.0)))

    def promise(self, depth: int) -> float:
        """How often its first candidate is right, `depth` tokens below the root. A depth that was seen seldom counts
        little against the one above it, so that a good model is asked deeper than before.
        """
        promised = INITIAL_RIGHT
        for right, seen in zip(self.right[: depth + 1], self.seen, strict=False):
            promised = (right + promised * STRENGTH) / (seen + STRENGTH)
        return promised

    def learn(self, hits: Iterable[tuple[int, float, bool]]) -> None:
        """Count (depth, probability of the first candidate, whether it was right)."""
        for depth, probability, hit in hits:
            self.stated.append(probability)
            at = min(depth, DEPTHS - 1)
            self.seen[at] += 1
            self.right[at] += hit
            if self.seen[at] >= 400:
                self.seen[at] /= 2
                self.right[at] /= 2

    def learn_speed(self, done: StepCost, plain_ms: float) -> None:
        """Count the tokens and the time of a step."""
        self._tokens += 0.02 * (done.n_accepted + 1 - self._tokens)
        ms = done.decode_ms + done.query_ms
        self._steps += 0.02 * (ms / plain_ms - self._steps)
        self.speedup = self._tokens / self._steps

    def learn_gain(self, steps: float) -> None:
        """A step in which it was asked saved so many plain steps; negative if it lost."""
        self.gain += _SMOOTHING * (max(-1.0, min(steps, 4.0)) - self.gain)


GRID = 0.85 ** np.arange(25)  # joint probabilities, down to 0.02
RISING = np.concatenate([[0.0], GRID[::-1]])
QUANTILES = 8


class PassValues:
    """What further passes of a drafting model are worth in one step, in tokens.

    Computed backwards from the largest tree: a pass gives a candidate of some probability, which is added if that pays,
    and after it another pass may pay. A millisecond counts `rate` tokens.
    """

    def __init__(
        self, cost: Sequence[float], rate: float, level_ms: float, stated: Sequence[float], right: Sequence[float]
    ) -> None:
        self._key = (cost[0], rate, level_ms)
        self._uses = 0
        share = np.sort(np.array(stated))
        share = share[((np.arange(QUANTILES) + 0.5) / QUANTILES * len(share)).astype(int)] / share.mean()
        self._candidates = [np.minimum(share * each, 0.995) for each in right]
        self._node = [rate * (after - before) for before, after in zip(cost, cost[1:40], strict=False)]
        self._after: list[FloatArray] = [np.zeros(len(RISING))] * (len(self._node) + 1)
        self._rate = rate
        for n in range(len(self._node) - 1, -1, -1):
            candidates = self._candidates[min(n, len(right) - 1)]
            added = self._added(RISING[:, None] * candidates, n).mean(axis=1)
            self._after[n] = np.maximum(added - rate * level_ms, 0.0)

    def _added(self, joint: FloatArray, n: int) -> FloatArray:
        """The value of a candidate of this joint probability for a tree of `n` nodes."""
        return np.maximum(joint - self._node[n] + np.interp(joint, RISING, self._after[n + 1]), 0.0)

    def of(self, question: Question, n: int) -> float:
        """The value of an answer."""
        if n >= len(self._node):
            return 0.0
        candidates = self._candidates[min(len(question.path), len(self._candidates) - 1)]
        with_it = self._added(question.joint * np.maximum(candidates, question.known), n).mean()
        without = self._added(np.array(question.joint * question.known), n)
        return float(with_it - without)

    def is_current(self, plain_ms: float, rate: float, level_ms: float) -> bool:
        self._uses += 1
        was = self._key
        return (
            self._uses < 256
            and abs(rate - was[1]) < 0.03 * rate
            and abs(level_ms - was[2]) < 0.05 * level_ms
            and abs(plain_ms - was[0]) < 0.02 * plain_ms
        )


class Asking:
    """The passes of one step. A call asks the open questions in one pass, or returns False where that does not pay."""

    def __init__(self, drafter: Drafter, plan: Plan, stats: ModelStats, askers: Sequence[Asker]) -> None:
        self._drafter, self._plan, self._stats = drafter, plan, stats
        self._askers = list(askers)
        self._left = [asker.most_ms for asker in askers]
        self._rate = max(1.02, stats.speedup) * plan.guaranteed / plan.cost[0]

    def __call__(self) -> bool:
        """Takes the time of the pass; about 10 us for each question without it."""
        drafter = self._drafter
        if drafter.failed:
            return False
        chosen = self._choose()
        if not chosen:
            return False
        try:
            answers = drafter.answer([Query(self._askers[who].text, question.path) for who, question in chosen])
        except Exception as error:  # costs drafts, never an answer
            drafter.give_up("failed", error)
            return False
        for (who, question), likely in zip(chosen, answers, strict=True):
            self._askers[who].growth.answered(question.number, likely)
        return True

    def _choose(self) -> list[tuple[int, Question]]:
        """The questions of the next pass, by request; none if it is not worth its time."""
        drafter, plan = self._drafter, self._plan
        n_requests = len(self._askers)
        values = self._stats.values(plan, self._rate, drafter.pass_ms(n_requests) / n_requests, n_requests)
        questions = [
            (values.of(question, plan.grown), who, question)
            for who, asker in enumerate(self._askers)
            for question in asker.growth.questions()
        ]
        questions.sort(key=lambda each: -each[0])
        row_ms = drafter.pass_ms(2) - drafter.pass_ms(1)
        total, passes = 0.0, 1
        chosen: list[tuple[int, Question]] = []
        for gain, who, question in questions:
            needed = max(passes, self._askers[who].text.passes(question.path))
            if chosen and gain <= self._rate * (row_ms + (needed - passes) * drafter.pass_ms(1)):
                continue
            if gain <= 0.0:
                break
            total += gain
            passes = needed
            chosen.append((who, question))
        if not chosen:
            return []
        price = passes * drafter.pass_ms(len(chosen))
        requests = {who for who, _ in chosen}
        if total < self._rate * price:
            return []
        share = price / len(requests)
        if any(share > self._left[who] for who in requests):
            return []
        for who in requests:
            self._left[who] -= share
        plan.spend(price)
        return chosen
