"""Losses are bounded at every point of a request, and gains let drafting grow."""

import pytest

from rest_local.planning.account import (
    ALLOWANCE,
    LOOKUP_ALLOWANCE,
    LOOKUPS_START,
    MATCH_STEPS,
    MOST_STEPS,
    OVERDRAFT_STEPS,
    Account,
)


def never() -> bool:
    return False


def always() -> bool:
    return True


@pytest.mark.parametrize(("plain", "lookup"), [(0.5, 0.2), (20.0, 0.2), (20.0, 30.0)])
def test_drafts_that_always_fail_lose_no_more_than_the_allowance_at_any_point(plain: float, lookup: float) -> None:
    """Each draft stakes all that it may, behind what always looks like a long repeat."""
    account = Account()
    account.begin(plain)
    lost = 0.0
    for step in range(1, 2000):
        account.earn(plain)
        if account.affords_lookup(lookup, always):
            account.pay_lookup(lookup)
            stake = max(0.0, account.risk - lookup)
            account.settle(-stake)
            lost += lookup + stake
        assert lost <= (ALLOWANCE * step + OVERDRAFT_STEPS + LOOKUPS_START) * plain + 1e-9
    assert lost > 0


def test_drafts_behind_long_agreements_that_always_fail_lose_a_few_steps_once() -> None:
    account = Account()
    account.begin(1.0)
    lost = 0.0
    for step in range(1, 2000):
        account.earn(1.0)
        if account.affords_lookup(0.2, never):
            account.overdraw()
            account.pay_lookup(0.2)
            stake = max(0.0, account.risk - 0.2)
            account.settle(-stake)
            lost += 0.2 + stake
        assert lost <= ALLOWANCE * step + MATCH_STEPS + LOOKUPS_START + 1e-9
    assert lost > MATCH_STEPS


def test_lookups_that_find_nothing_cost_little() -> None:
    plain, lookup, spent = 0.6, 0.3, 0.0
    account = Account()
    account.begin(plain)
    for _ in range(2000):
        account.earn(plain)
        if account.affords_lookup(lookup, never):
            account.pay_lookup(lookup)
            spent += lookup
    assert 0 < spent <= (2000 * LOOKUP_ALLOWANCE + LOOKUPS_START) * plain
    assert LOOKUP_ALLOWANCE < ALLOWANCE


def test_a_cheap_lookup_is_always_affordable() -> None:
    account = Account()
    account.begin(20.0)
    for _ in range(1000):
        account.earn(20.0)
        assert account.affords_lookup(0.1, never)
        account.pay_lookup(0.1)


def test_a_long_repeat_may_overdraw_once() -> None:
    account = Account()
    account.begin(1.0)
    account.earn(1.0)
    account.pay_lookup(0.8)
    assert not account.affords_lookup(0.15, never)
    assert account.affords_lookup(0.15, always)
    account.pay_lookup(0.9)
    account.earn(1.0)
    assert not account.affords_lookup(0.15, always)


def test_gains_pay_for_more_up_to_a_limit() -> None:
    account = Account()
    account.begin(1.0)
    for _ in range(10):
        account.settle(5.0)
    account.earn(1.0)
    assert account.risk == MOST_STEPS


def test_a_request_starts_with_what_the_last_ones_gained_and_no_debt() -> None:
    account = Account()
    account.begin(1.0)
    account.earn(1.0)
    assert account.risk == pytest.approx(ALLOWANCE)
    for _ in range(300):
        account.earn(1.0)
        account.settle(0.5)
    account.begin(1.0)
    account.earn(1.0)
    assert 0.2 < account.risk - ALLOWANCE < 0.5
    for _ in range(3000):
        account.earn(1.0)
        account.settle(-0.5)
    account.begin(1.0)
    account.earn(1.0)
    assert account.risk == pytest.approx(ALLOWANCE)


def test_a_long_time_without_books_invents_no_credit() -> None:
    """An answer beside a prompt of many parts: thousands of steps in which nobody drafted."""
    account = Account()
    account.begin(10.0)
    account.pay_lookup(100.0)
    before = account.record.gain
    assert before < 0
    account.earn(10.0, 5000)
    assert before < account.record.gain <= 0
