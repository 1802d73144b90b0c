"""The budget bounds losses at every point of a request, and gains raise it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.planning.plan import ALLOWANCE, FIRST_SAVING, SAVINGS_SHARE, Budget, Savings


@given(st.lists(st.floats(0, 100), max_size=200), st.floats(0.1, 100))
def test_drafts_that_always_fail_lose_a_bounded_share_at_any_point(drafts: list[float], ms: float) -> None:
    """`drafts`: the cost of each in plain steps."""
    budget, lost, begun_with = Budget(), 0.0, SAVINGS_SHARE * FIRST_SAVING
    budget.begin(ms, Savings().begin(ms))
    for step, extra in enumerate(drafts, 1):
        budget.earn(ms)
        if extra * ms <= budget.credit:
            budget.settle(-extra * ms)
            lost += extra * ms
        assert lost <= (ALLOWANCE * step + begun_with) * ms * (1 + 1e-9)


def test_a_new_request_starts_without_the_previous_losses() -> None:
    budget = Budget()
    budget.begin(1.0)
    budget.settle(-2.0)
    budget.begin(1.0)
    assert budget.credit == 0.0
    budget.begin(3.0, 6.0)
    assert budget.credit == 6.0


def test_a_request_may_lose_a_share_of_what_drafts_saved_for_earlier_ones() -> None:
    savings = Savings()
    for _ in range(200):
        savings.begin(10.0)
        savings.add(500.0)
    assert savings.begin(10.0) == pytest.approx(SAVINGS_SHARE * 500.0, rel=0.01)
    for _ in range(200):
        savings.begin(10.0)
        savings.add(-1.0)
    assert savings.begin(10.0) == 0.0, "where drafts lose, nothing is staked on them"
