"""The budget bounds losses at every point of a request, and gains raise it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.planning.plan import ALLOWANCE, FLOOR, SAVING_SHARE, Budget


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-100, 1000)), max_size=200), st.floats(0.1, 100))
def test_drafts_that_always_fail_lose_a_bounded_share_at_any_point(
    drafts: list[tuple[float, float]], ms: float
) -> None:
    """Each draft is (its cost, its expected saving) in plain steps."""
    budget, lost = Budget(), 0.0
    budget.begin(ms)
    for step, (extra, saving) in enumerate(drafts, 1):
        budget.earn(ms)
        if budget.allows(extra * ms, saving * ms):
            budget.settle(-extra * ms)
            lost += extra * ms
        assert lost <= (ALLOWANCE * step + FLOOR) * ms * (1 + 1e-9)


def test_the_expected_saving_decides_how_much_a_draft_may_cost() -> None:
    budget = Budget()
    budget.begin(10.0)
    assert not budget.allows(10.0, 1.0)
    assert budget.allows(10.0, 10.0 / SAVING_SHARE)
    assert not budget.allows(10.0 * FLOOR + 1.0, 1e9)
    assert budget.most == pytest.approx(10.0 * FLOOR)
    budget.settle(5.0)
    assert budget.allows(10.0 * FLOOR + 1.0, 1e9), "what was saved may be spent"


def test_a_new_request_starts_without_the_previous_losses() -> None:
    budget = Budget()
    budget.begin(1.0)
    budget.settle(-2.0)
    budget.begin(1.0)
    assert budget.credit == 0.0
    budget.begin(3.0, 2.0)
    assert budget.credit == 6.0
