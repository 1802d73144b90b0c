"""The budget bounds losses at every point of a request, and gains raise it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.planning.plan import ALLOWANCE, FLOOR, MAX_CREDIT, SAVING_SHARE, SURE, SURE_FLOOR, Budget, Plan


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(-100, 1000), st.floats(0, 1)), max_size=200),
    st.floats(0.1, 100),
    st.booleans(),
)
def test_drafts_that_always_fail_lose_a_bounded_share_at_any_point(
    drafts: list[tuple[float, float, float]], ms: float, are_unsure: bool
) -> None:
    """Each draft is (its cost, its expected saving, the probability that it pays), the first two in plain steps."""
    budget, lost = Budget(), 0.0
    budget.begin(ms)
    for step, (extra, saving, chance) in enumerate(drafts, 1):
        budget.earn(ms)
        if budget.allows(extra * ms, saving * ms, chance * (SURE / 2 if are_unsure else 1)):
            budget.settle(-extra * ms)
            lost += extra * ms
        assert lost <= (ALLOWANCE * step + (FLOOR if are_unsure else SURE_FLOOR)) * ms * (1 + 1e-9)


def test_the_expected_saving_decides_how_much_a_draft_may_cost() -> None:
    budget = Budget()
    budget.begin(10.0)
    assert not budget.allows(10.0, 1.0, 0.0)
    assert budget.allows(10.0, 10.0 / SAVING_SHARE, 0.0)
    assert not budget.allows(10.0 * FLOOR + 1.0, 1e9, SURE - 0.01)
    assert budget.allows(10.0 * FLOOR + 1.0, 1e9, SURE)
    assert not budget.allows(10.0 * SURE_FLOOR + 1.0, 1e9, 1.0)
    assert budget.most == pytest.approx(10.0 * SURE_FLOOR)


@pytest.mark.parametrize(("probability", "best"), [(0.99, 32), (0.95, 3)])
def test_a_new_request_dares_a_dear_draft_that_is_likely_to_pay(probability: float, best: int) -> None:
    """Up to three tokens cost next to nothing, and more of them five plain steps, which six accepted tokens pay."""
    budget = Budget()
    budget.begin(1.0)
    plan = Plan([1.0, 1.1, 1.2, 1.3, *[6.0] * 29], [0.0] * 33, budget=budget)
    for depth in range(1, 33):
        plan.worth(probability**depth)
    assert plan.best == best


def test_savings_raise_the_credit_up_to_a_limit() -> None:
    budget = Budget()
    budget.begin(1.0)
    for _ in range(10):
        budget.settle(5.0)
    budget.earn(1.0)
    assert budget.credit == MAX_CREDIT


def test_a_new_request_starts_without_the_previous_losses() -> None:
    budget = Budget()
    budget.begin(1.0)
    budget.settle(-2.0)
    budget.begin(1.0)
    assert budget.credit == 0.0
    budget.begin(3.0, 2.0)
    assert budget.credit == 6.0
