"""Decide when a drafting model is asked, and for how much: its passes are part of the price of a draft.

- Time has one price: the tokens per millisecond that requests reach with this model where no found text leads
  (`ModelStats.speedup`). A pass is worth its time if its answers are worth more tokens than that.
- An answer is worth the candidate that it is likely to bring, less the time of one more node in the batch, plus what
  passes after it are worth. `PassValues` computes this backwards from the largest tree, from how confident the model
  was lately. So a long chain can pay where each of its nodes alone does not, and where the model is seldom confident, a
  cheap pass still pays for the places where it is.
- What another source knows counts on both sides: an answer is worth what it adds to that.
- One pass serves all open paths of all requests. A further path is added to it if it pays for its row.
- Passes have a budget of their own: what they cost is paid back by tokens that the model alone proposed. A request
  loses at most half of it in one step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import LARGEST
from rest_local.drafting.models.drafter import Drafter, Query
from rest_local.drafting.tree import DraftModelBudget, OpenNode
from rest_local.planning.plan import EXPLORATION_SHARE, SMOOTHING, START, Plan

INITIAL_CREDIT = 4.0  # Plain steps that a new request may lose to a drafting model. With two, up to 16% are lost.
# The confidences of the first candidate begin with those of a good model, so that it is tried. With a mean of 0.75, not
# 0.89, a model of acceptance 0.9 whose pass takes 25% of a step was never tried on the CPU curve: 1.00 instead of 1.20
# (`benchmarks.simulated_drafters`).
INITIAL_CONFIDENCES = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.99)
DEPTHS = 4  # Depths whose confidences are kept apart. The last one holds all deeper ones.
KEPT = 32  # Confidences that are kept for each depth.
REFRESH = 8  # Steps between two estimates of what passes are worth.

Floats = NDArray[np.float64]


@dataclass
class ModelStats:
    """The record of a drafting model: its newest confidences by depth, its saving per step in plain steps, and the
    speed that requests reach with it.
    """

    confidences: list[deque[float]] = field(
        default_factory=lambda: [deque(() if depth else INITIAL_CONFIDENCES, maxlen=KEPT) for depth in range(DEPTHS)]
    )
    gain: float = START
    waited: int = 0  # Steps since the last pass.
    _tokens: float = 1.0  # The mean number of tokens of a step.
    _steps: float = 1.0  # The mean time of a step in plain steps.
    _learned: int = 0  # Answers at the root.
    _promises: list[float] = field(default_factory=list)
    _values: dict[tuple[int, int], tuple[int, PassValues]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.learn(())

    @property
    def initial_credit(self) -> float:
        """Return how many plain steps a new request may lose to the model: fewer the less it saves.

        The user who loads one wants it tried at once, not after the steps that would earn the first draft.
        """
        return INITIAL_CREDIT * max(0.0, min(self.gain / START, 1.0))

    @property
    def speedup(self) -> float:
        """Return the speed of requests with this model over plain decoding, lately; 1 at least."""
        return max(1.0, self._tokens / self._steps)

    def promise(self, depth: int) -> float:
        """Return how likely its first candidate is, `depth` tokens below the root."""
        return self._promises[min(depth, DEPTHS - 1)]

    def learn(self, confidences: Iterable[tuple[int, float]]) -> None:
        """Count (depth, probability of the first candidate)."""
        for depth, probability in confidences:
            self._learned += depth == 0
            self.confidences[min(depth, DEPTHS - 1)].append(probability)
        self._promises = [fmean(self.of_depth(depth)) for depth in range(DEPTHS)]

    def of_depth(self, depth: int) -> Sequence[float]:
        """Return the confidences at a depth, or those of the depth above while they are fewer than KEPT."""
        own = self.confidences[depth]
        return own if not depth or len(own) == KEPT else self.of_depth(depth - 1)

    def learn_step(self, tokens: int, plain_steps: float) -> None:
        """Count a step that gave so many tokens in the time of so many plain steps."""
        self.waited += 1
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._steps += SMOOTHING * (plain_steps - self._steps)

    def learn_gain(self, steps: float) -> None:
        """Count a step in which it was asked and saved so many plain steps; negative if it lost."""
        self.gain += SMOOTHING * (max(-1.0, min(steps, 4.0)) - self.gain)

    def values(self, plan: Plan, pass_ms: float, n_requests: int, depths: int = 1) -> PassValues:
        """Return what passes are worth in this step, if each takes `pass_ms` for each request and answers so many
        depths.

        It is computed every REFRESH steps, for sizes up to a power of two, half of LARGEST at most.
        """
        size = min(1 << len(plan.cost).bit_length() - 1, LARGEST // 2)
        now = (self._learned + self.waited) // REFRESH
        known = self._values.get((size, n_requests))
        if known is None or known[0] != now:
            confidences = [self.of_depth(depth) for depth in range(DEPTHS)]
            known = now, PassValues(plan.cost[:size], plan.price_of_time, pass_ms, confidences, depths)
            self._values[size, n_requests] = known
        return known[1]


_JOINT = np.concatenate([[0.0], 0.85 ** np.arange(24.0, -1.0, -1.0)])  # Joint probabilities, 0.02 to 1.


def _quantiles(numbers: Sequence[float]) -> Floats:
    """Return the middles of as many equal parts as INITIAL_CONFIDENCES, in a tenth of `numpy.quantile`'s time."""
    n = len(INITIAL_CONFIDENCES)
    places = (np.arange(n) + 0.5) / n * (len(numbers) - 1)
    return np.interp(places, np.arange(len(numbers)), sorted(numbers))


class PassValues:
    """The worth of a drafting model's answers in one step, in tokens. 0.2 ms to compute."""

    def __init__(
        self,
        cost: Sequence[float],
        rate: float,
        pass_ms: float,
        confidences: Sequence[Sequence[float]],
        depths: int = 1,
    ) -> None:
        """Compute from the cost of a step by its number of nodes, the tokens that a millisecond is worth (`rate`), the
        time of a pass, and the confidences of the model's first candidates by depth. If a pass answers several
        `depths`, the deeper ones cost nothing, and a step has one pass.
        """
        self._confidences = np.array([_quantiles(each) for each in confidences])
        self._node = [rate * (after - before) for before, after in itertools.pairwise(cost)]
        # For each number of nodes, what passes below a node of each joint probability are worth, less their time.
        self._below: list[Floats] = [np.zeros(len(_JOINT))] * (len(self._node) + 1)
        price = rate * pass_ms if depths == 1 else 0.0
        deepest = len(self._node) if depths == 1 else min(len(self._node), depths)
        for n in range(deepest - 1, -1, -1):
            joint = _JOINT[:, None] * self._confidences[min(n, len(confidences) - 1)]
            self._below[n] = np.maximum(self._added(joint, n).mean(axis=1) - price, 0.0)

    def _added(self, joint: Floats, n: int) -> Floats:
        """Return what candidates of these joint probabilities are worth to a tree of `n` nodes, in the same shape."""
        return np.maximum(joint - self._node[n] + np.interp(joint, _JOINT, self._below[n + 1]), 0.0)

    def of(self, nodes: Sequence[OpenNode], n: int) -> list[float]:
        """Return what the answer to each node is worth to a tree of `n` nodes, without the time of the pass. 40 us."""
        if n >= len(self._node):
            return [0.0] * len(nodes)
        deepest = len(self._confidences) - 1
        confidences = self._confidences[[min(len(node.path), deepest) for node in nodes]]
        joint = np.array([node.joint for node in nodes])
        known = np.array([node.known for node in nodes])
        answered = self._added(joint[:, None] * np.maximum(confidences, known[:, None]), n).mean(axis=1)
        worth: list[float] = (answered - self._added(joint * known, n)).tolist()
        return worth


class DraftModelScheduler:
    """The passes of one step. A call asks the open nodes in one pass, or returns False where that does not pay."""

    def __init__(self, drafter: Drafter, plan: Plan, stats: ModelStats, budgets: Sequence[DraftModelBudget]) -> None:
        self._drafter, self._plan, self._stats = drafter, plan, stats
        self._budgets = list(budgets)
        self._left = [model_budget.most_ms for model_budget in budgets]

    def __call__(self) -> bool:
        """Ask in one pass, or decide against it in 50 us and 10 us for each node."""
        drafter = self._drafter
        if drafter.failed:
            return False
        chosen = self._choose()
        if not chosen:
            return False
        try:
            answers = drafter.answer([Query(self._budgets[number].text, node.path) for number, node in chosen])
        except Exception as error:  # It costs drafts, never an answer.
            drafter.give_up("failed", error)
            return False
        self._stats.waited = 0
        for (number, node), likely in zip(chosen, answers, strict=True):
            model_budget = self._budgets[number]
            model_budget.growth.answered(node.number, likely, model_budget.text.following)
        return True

    def _choose(self) -> list[tuple[int, OpenNode]]:
        """Choose the nodes of the next pass, by request; none if it is not worth its time."""
        drafter, plan, n = self._drafter, self._plan, len(self._budgets)
        rate = plan.price_of_time
        asked = [
            (number, node)
            for number, model_budget in enumerate(self._budgets)
            for node in model_budget.growth.open_nodes()
        ]
        if not asked:
            return []
        values = self._stats.values(plan, drafter.pass_ms(n) / n, n, drafter.depths)
        worth = values.of([node for _, node in asked], plan.grown)
        row_ms = drafter.pass_ms(2) - drafter.pass_ms(1)
        total, passes = 0.0, 1
        chosen: list[tuple[int, OpenNode]] = []
        for tokens, (number, node) in sorted(zip(worth, asked, strict=True), key=lambda each: -each[0]):
            if drafter.depths > 1 and any(number == other for other, _ in chosen):
                continue  # One block answers all paths of a request.
            own = self._budgets[number].text.passes(node.path)
            needed = max(passes, own)
            if not own or (chosen and tokens <= rate * (row_ms + (needed - passes) * drafter.pass_ms(1))):
                continue
            total += tokens
            passes = needed
            chosen.append((number, node))
        if not chosen:
            return []
        price = passes * drafter.pass_ms(len(chosen))
        plain_ms = plan.cost[0] / plan.guaranteed
        waited = not chosen[0][1].path and self._stats.waited * EXPLORATION_SHARE * plain_ms > price
        if total <= rate * price and not waited:  # After waiting, it is asked to notice that it has become better.
            return []
        requests = {number for number, _ in chosen}
        share = price / len(requests)
        if any(share > self._left[number] for number in requests):
            return []
        for number in requests:
            self._left[number] -= share
        return chosen
