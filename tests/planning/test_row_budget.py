"""The budget of rows of logits: bounded, and what the drafts of the source have paid for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sequences import Silent
from support.prices import FLAT

from rest_local.drafting.recycled import SuccessorTable
from rest_local.planning.auto import Auto
from rest_local.planning.plan import MOST_ROW_MS, TRIAL_SHARE, RowBudget
from rest_local.planning.policy import StepContext


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(-5, 20)), max_size=300))
def test_a_step_never_takes_more_than_the_most(steps: list[tuple[float, float]]) -> None:
    budget = RowBudget()
    for plain, saved in steps:
        budget.earn(plain)
        assert 0 <= budget.ms <= MOST_ROW_MS
        budget.spend(budget.ms / 2)
        budget.settle(saved)


@pytest.mark.parametrize("plain", [0.5, 5.0, 50.0])
def test_without_gains_the_allowance_is_all_that_is_spent(plain: float) -> None:
    budget, spent = RowBudget(), 0.0
    for _ in range(20_000):
        budget.earn(plain)
        spent += budget.ms
        budget.spend(budget.ms)
    assert spent <= TRIAL_SHARE * plain * 20_000 * (1 + 1e-9)


def test_half_of_what_is_saved_is_spent() -> None:
    budget, spent = RowBudget(), 0.0
    for _ in range(5000):
        budget.earn(1.0)
        budget.settle(0.1)
    for _ in range(1000):
        budget.earn(1.0)
        spent += budget.ms
        budget.spend(budget.ms)
        budget.settle(0.1)
    assert spent / 1000 == pytest.approx(0.1 / 2 + TRIAL_SHARE, rel=0.02)


def test_requests_share_the_budget_and_a_step_without_time_for_a_row_reads_none() -> None:
    auto = Auto(FLAT)
    auto.successors = SuccessorTable(10)
    one, other = auto.fork(), auto.fork()
    assert one.successors is other.successors
    assert one.row_budget is other.row_budget
    one.draft(Silent(), StepContext(10, 4, 4))
    assert auto.row_budget.ms > 0
    auto.successors.row_ms = auto.row_budget.ms * 1.01
    assert one.logits_ms == 0
    auto.successors.row_ms = auto.row_budget.ms * 0.99
    assert one.logits_ms == other.logits_ms == auto.row_budget.ms
    auto.successors = None
    assert auto.logits_ms == 0
