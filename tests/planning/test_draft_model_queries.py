"""A draft model is queried where it pays. Time is simulated by a cost curve; nothing is measured."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.fake_sequences import Silent

from rest_local.calibration.cost import CostCurve
from rest_local.drafting.models.drafter import Drafter, DraftText, Likely, Query
from rest_local.drafting.sources import N_CELLS, SOURCES, model_cell
from rest_local.drafting.tree import ROOT, DraftModelBudget, OpenNode
from rest_local.planning.acceptance import model_rates
from rest_local.planning.auto import Auto
from rest_local.planning.draft_scheduler import DraftModelScheduler, ModelStats
from rest_local.planning.plan import Plan
from rest_local.planning.policy import StepContext, StepCost

GPU = CostCurve.from_points([512], [1, 8, 16, 32, 64], [[10, 11.5, 14.5, 21, 36]])
CPU = CostCurve.from_points([512], [1, 2, 4, 8, 16, 64], [[20, 37, 48, 76, 98, 362]])
LOOKUP_MS = 0.05


class Scripted(DraftText, Drafter):
    """A drafter with one text: it returns the next token of the story with probability `right`, and states that
    probability. A pass takes `pass_ms`, whatever it answers.
    """

    name = path = "scripted"

    def __init__(self, story: Sequence[int], right: float, pass_ms: float) -> None:
        super().__init__(self)
        self.passes_done = 0
        self.at = 0
        self._story, self._right, self._pass_ms = story, right, pass_ms
        self._rng = np.random.default_rng(2)

    can_ask = True

    def passes(self, path: Sequence[int]) -> int:
        return 1

    def caught_up(self, saves_ms: float) -> bool:
        return True

    def pass_ms(self, n: int) -> float:
        return self._pass_ms

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        self.passes_done += 1
        self.query_ms += self._pass_ms
        return [self._likely(query.path) for query in queries]

    def _likely(self, path: Sequence[int]) -> list[Likely]:
        follows = list(path) == list(self._story[self.at : self.at + len(path)])
        knows = follows and self._rng.random() < self._right
        token = self._story[self.at + len(path)] if knows else -2
        return [(token, self._right), (-3, (1 - self._right) / 2)]


class OnlyDraftModel(Silent):
    """Sources without text, but with a draft model."""

    def __init__(self, drafter: Scripted) -> None:
        self.draft_text = drafter


class Block(Scripted):
    """One that answers eight depths in a pass."""

    depths = 8

    def following(self, path: tuple[int, ...]) -> Sequence[Likely]:
        return self._likely(path) if len(path) < self.depths else ()


def speedup(
    curve: CostCurve,
    right: float,
    pass_ms: float,
    n_tokens: int = 1200,
    each: int = 1200,
    kind: type[Scripted] = Scripted,
) -> float:
    """Return the speed-up over plain decoding of `n_tokens`, in answers of `each` tokens."""
    story = list(range(n_tokens + 200))
    drafter = kind(story, right, pass_ms)
    sources, policy = OnlyDraftModel(drafter), Auto(curve)
    driver = policy.shared.driver
    driver.lookup, driver.step, driver.tree = LOOKUP_MS, 0.0, 0.0
    policy.shared.drafter = cast(Any, drafter)
    spent, begun = 0.0, -each
    ms = curve.at(512).tolist()
    while drafter.at < n_tokens:
        if drafter.at >= begun + each:
            begun = drafter.at
            policy.begin(512)
        drafted = policy.draft(sources, StepContext(512, 63, 8))
        tree, node = drafted.tree, ROOT
        accepted: list[int] = []
        while children := [c for c in tree.children_of(node) if tree.token[c] == story[drafter.at + len(accepted)]]:
            node = children[0]
            accepted.append(tree.token[node])
        tokens = story[drafter.at : drafter.at + len(accepted) + 1]
        looked = LOOKUP_MS if drafted.lookup_us is not None else None
        cost = StepCost(512, len(tree), len(accepted), ms[len(tree)], 0.0, looked, query_ms=drafter.query_ms)
        spent += cost.decode_ms + (looked or 0.0) + drafter.query_ms
        drafter.query_ms = 0.0
        policy.learn(drafted, tokens, cost)
        policy.catch_up()
        drafter.at += len(tokens)
    return drafter.at * ms[0] / spent


def best_chain(curve: CostCurve, right: float, pass_ms: float) -> float:
    """Return the best speed-up of a chain of fixed length whose tokens are all right with the same probability."""
    ms = curve.at(512).tolist()
    return max(
        sum(right**i for i in range(k + 1)) * ms[0] / (ms[k] + k * pass_ms)  # 1 + r + r^2 + ...
        for k in range(32)
    )


@pytest.mark.parametrize(("curve", "right", "pass_ms"), [(GPU, 0.8, 0.5), (CPU, 0.9, 1.0)])
def test_nearly_as_fast_as_the_best_chain_of_fixed_length(curve: CostCurve, right: float, pass_ms: float) -> None:
    best = best_chain(curve, right, pass_ms)
    assert best > 1.1
    assert speedup(curve, right, pass_ms) >= 0.9 * best
    assert speedup(curve, right, pass_ms, each=100) >= 0.88 * best


@pytest.mark.parametrize(("curve", "right", "pass_ms"), [(GPU, 0.8, 3.0), (CPU, 0.9, 12.0)])
def test_a_block_is_nearly_as_fast_as_its_best_part(curve: CostCurve, right: float, pass_ms: float) -> None:
    """A pass costs as much as several of a head would, and as a pass of each depth it would not pay."""
    ms = curve.at(512).tolist()
    best = max(sum(right**i for i in range(k + 1)) * ms[0] / (ms[k] + pass_ms) for k in range(Block.depths + 1))
    assert best > 1.1
    assert speedup(curve, right, pass_ms, kind=Block) >= 0.9 * best
    assert speedup(curve, right, pass_ms) < 0.9 * best
    assert speedup(curve, 0.0, pass_ms, kind=Block) >= 0.965


@pytest.mark.parametrize(("curve", "right", "pass_ms"), [(GPU, 0.0, 0.5), (CPU, 0.2, 4.0), (GPU, 0.9, 40.0)])
def test_a_draft_model_that_does_not_pay_costs_little(curve: CostCurve, right: float, pass_ms: float) -> None:
    assert speedup(curve, right, pass_ms) >= 0.965
    assert speedup(curve, right, pass_ms, each=100) >= 0.95


def asked(drafter: Scripted, joint: float, known: float, most_ms: float = 100.0) -> bool:
    """Return True if a path of this joint probability is asked about. Below it a token of `known` is known."""
    ms = GPU.at(512).tolist()
    text = cast(Any, drafter)
    growth = cast(Any, SimpleNamespace(open_nodes=lambda: [OpenNode(0, (), joint, known)], answered=lambda *_: None))
    stats = ModelStats()
    stats.learn([(0, 0.7)] * 100)
    return DraftModelScheduler(text, Plan(ms, [0.2] * len(ms), 1.0), stats, [DraftModelBudget(growth, text, most_ms)])()


def test_no_pass_if_the_next_token_is_known_or_the_path_unlikely() -> None:
    drafter = Scripted(range(100), 0.9, 0.1)
    assert not asked(drafter, 1.0, 0.95)
    assert not asked(drafter, 0.01, 0.0)
    assert drafter.passes_done == 0
    assert asked(drafter, 1.0, 0.1)
    assert drafter.passes_done == 1
    assert not asked(drafter, 1.0, 0.1, most_ms=0.05)


def test_what_the_model_cannot_answer_is_not_asked_and_does_not_stand_before_what_it_can() -> None:
    class Chain(Scripted):
        def passes(self, path: Sequence[int]) -> int:
            return int(not path)

    drafter, ms = Chain(range(100), 0.9, 0.1), GPU.at(512).tolist()
    text, stats = cast(Any, drafter), ModelStats()
    stats.learn([(0, 0.7)] * 100)
    answered: list[int] = []
    questions = [OpenNode(5, (1,), 0.9, 0.0), OpenNode(6, (), 0.8, 0.0)]
    growth = cast(
        Any, SimpleNamespace(open_nodes=lambda: questions, answered=lambda number, *_: answered.append(number))
    )
    asking = DraftModelScheduler(text, Plan(ms, [0.2] * len(ms), 1.0), stats, [DraftModelBudget(growth, text, 100.0)])
    assert asking()
    assert answered == [6]
    del questions[1]
    assert not asking()
    assert drafter.passes_done == 1


def test_cells_of_a_draft_model_follow_its_own_probability() -> None:
    rates = model_rates()
    assert len(rates) * len(SOURCES) == N_CELLS
    first = model_cell(0, 0.0) // len(rates) * len(rates)
    for depth in (0, 3, 40):
        cells = [model_cell(depth, p) for p in np.linspace(0, 1, 50)]
        assert all(0 <= cell - first < len(rates) for cell in cells)
        known = [rates[cell - first] for cell in cells]
        assert known == sorted(known)
        assert known[0] < 0.05
        assert known[-1] > 0.99
        for p in (0.1, 0.5, 0.9, 0.99):
            assert abs(rates[model_cell(depth, p) - first] - p) < 0.05
