"""What an answer of a drafting model is worth, and which questions share a pass."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.models.drafter import Drafter, Likely, PassTimes, Query
from rest_local.drafting.tree import DraftModelBudget, OpenNode
from rest_local.planning.draft_scheduler import (
    DEPTHS,
    INITIAL_CREDIT,
    REFRESH,
    DraftModelScheduler,
    ModelStats,
    PassValues,
)
from rest_local.planning.plan import EXPLORATION_SHARE, Plan

PLAIN = 10.0
FLAT = [PLAIN + 0.2 * n for n in range(40)]


class Counted(Drafter):
    """A drafter that answers everything alike, and notes its passes."""

    name = path = "counted"

    def __init__(self, pass_ms: float, row_ms: float = 0.0, failing: bool = False) -> None:
        self.asked: list[list[tuple[int, ...]]] = []
        self._times, self._failing = PassTimes(pass_ms, row_ms), failing

    def pass_ms(self, n: int) -> float:
        return self._times.at(n)

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        self.asked.append([query.path for query in queries])
        if self._failing:
            raise ValueError("broken")
        return [[(1, 0.9)] for _ in queries]


class CountedBlock(Counted):
    depths = 8


class Text:
    """A text in the drafting model; a path of n tokens needs `steps` passes."""

    following = None

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps

    def passes(self, path: Sequence[int]) -> int:
        return self._steps if path else 1


class Open:
    """A growth with these open questions."""

    def __init__(self, *questions: OpenNode) -> None:
        self._questions = list(questions)
        self.got: dict[int, object] = {}

    def open_nodes(self) -> list[OpenNode]:
        return self._questions

    def answered(self, number: int, likely: object, following: object) -> None:
        self.got[number] = likely


def question(joint: float, known: float = 0.0, path: tuple[int, ...] = (), number: int = 0) -> OpenNode:
    return OpenNode(number, path, joint, known)


def stats(confidence: float = 0.8, n: int = 100) -> ModelStats:
    made = ModelStats()
    made.learn([(0, confidence)] * n)
    return made


def asking(
    drafter: Counted, *growths: Open, most_ms: float = 100.0, known: ModelStats | None = None, steps: int = 1
) -> DraftModelScheduler:
    budgets = [DraftModelBudget(cast(Any, growth), cast(Any, Text(steps)), most_ms) for growth in growths]
    plan = Plan(FLAT, [0.2] * len(FLAT), float(len(growths)), rate=1.2 * len(growths) / PLAIN)
    return DraftModelScheduler(cast(Any, drafter), plan, known or stats(), budgets)


def test_a_model_that_saves_nothing_gets_no_initial_credit() -> None:
    made = ModelStats()
    assert made.initial_credit == INITIAL_CREDIT
    for _ in range(200):
        made.learn_gain(-50.0)
    assert made.initial_credit == 0.0


def slow_value(
    cost: Sequence[float], rate: float, pass_ms: float, confidences: Sequence[float], joint: float, known: float, n: int
) -> float:
    """Return what an answer is worth, by enumerating all answers that follow."""

    def added(of: float, at: int) -> float:
        return max(0.0, of - rate * (cost[at + 1] - cost[at]) + below(of, at + 1))

    def below(of: float, at: int) -> float:
        if at == len(cost) - 1:
            return 0.0
        return max(0.0, float(np.mean([added(of * each, at) for each in confidences])) - rate * pass_ms)

    return float(np.mean([added(joint * max(each, known), n) for each in confidences])) - added(joint * known, n)


@given(
    st.lists(st.floats(0.1, 12.0), min_size=1, max_size=4),
    st.floats(0.05, 0.4),
    st.floats(0.0, 8.0),
    st.floats(0.1, 0.99),
    st.floats(0.1, 0.99),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 4),
)
def test_values_are_those_of_a_slow_enumeration(
    steps: list[float], rate: float, pass_ms: float, low: float, high: float, joint: float, known: float, n: int
) -> None:
    cost = [PLAIN, *(PLAIN + float(each) for each in np.cumsum(steps))]
    values = PassValues(cost, rate, pass_ms, [[low] * 8 + [high] * 8] * DEPTHS)
    got = values.of([question(joint, known)], n)[0]
    if n >= len(steps):
        assert got == 0.0
        return
    # the table is interpolated between joint probabilities that are 15% apart
    assert got == pytest.approx(slow_value(cost, rate, pass_ms, [low, high], joint, known, n), abs=0.06 * len(steps))


@pytest.mark.parametrize("asked", [True, False])
def test_values_are_computed_again_after_some_steps(asked: bool) -> None:
    made = stats(n=REFRESH)
    plan = Plan(FLAT, [0.2] * len(FLAT), 1.0, rate=0.12)
    values = made.values(plan, 1.0, 1)
    for step in range(REFRESH):
        assert made.values(plan, 1.0, 1) is values, step
        if asked:
            made.learn([(0, 0.8)])
        else:
            made.learn_step(1, 1.0)
    assert made.values(plan, 1.0, 1) is not values


def test_all_requests_share_one_pass() -> None:
    drafter = Counted(1.0)
    growths = [Open(question(0.5, path=(number,)), question(0.0, path=(9,), number=1)) for number in range(4)]
    assert asking(drafter, *growths)()
    assert drafter.asked == [[(0,), (1,), (2,), (3,)]]
    assert all(growth.got == {0: [(1, 0.9)]} for growth in growths)


def test_a_further_path_has_to_pay_for_its_row() -> None:
    paths = Open(question(0.9, path=(1,)), question(0.05, path=(2,), number=1))
    cheap, dear = Counted(1.0, 0.01), Counted(1.0, 0.9)
    assert asking(cheap, paths)()
    assert asking(dear, paths)()
    assert (cheap.asked, dear.asked) == ([[(1,), (2,)]], [[(1,)]])


def test_a_block_is_asked_with_one_path_of_each_request() -> None:
    drafter = CountedBlock(1.0, 0.01)
    growths = [Open(question(0.5, path=(number,)), question(0.9, path=(9,), number=1)) for number in range(3)]
    assert asking(drafter, *growths)()
    assert drafter.asked == [[(9,), (9,), (9,)]]


def test_a_path_that_needs_more_passes_has_to_pay_for_them() -> None:
    drafter = Counted(4.0)
    growth = Open(question(1.0), question(0.3, path=(2,), number=1))
    assert asking(drafter, growth, steps=3)()
    assert drafter.asked == [[()]]


def test_a_request_whose_share_exceeds_what_it_may_lose_is_not_asked() -> None:
    drafter = Counted(2.0)
    answers = asking(drafter, Open(question(1.0)), most_ms=5.0)
    assert [answers() for _ in range(3)] == [True, True, False]  # 2 + 2 of 5 ms
    assert len(drafter.asked) == 2
    shared = asking(drafter, Open(question(1.0)), Open(question(1.0)), most_ms=1.0)
    assert shared()  # 1 ms for each


def test_a_model_that_does_not_pay_is_asked_once_in_a_while() -> None:
    made, drafter, root = stats(0.01), Counted(1.0), Open(question(1.0))
    assert not asking(drafter, root, known=made)()
    made.waited = int(1.0 / EXPLORATION_SHARE / PLAIN) + 1
    assert not asking(drafter, Open(question(0.5, path=(1,))), known=made)()
    assert asking(drafter, root, known=made)()
    assert made.waited == 0
    assert not asking(drafter, root, known=made)()
