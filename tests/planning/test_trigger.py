"""Lookups are made where they pay, by entropy and by what came of the last ones, and now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rest_local.planning.trigger import LONGEST_WAIT, TEACHES, Trigger

PRICE = 0.1


def never(n: int) -> bool:
    return False


def run(
    trigger: Trigger, steps: int, entropy: Callable[[int], float | None], saving: Callable[[int], float]
) -> list[int]:
    """The steps in which it looked up."""
    looked = []
    for step in range(steps):
        nats = entropy(step)
        if trigger.wants(() if nats is None else (nats,), never, PRICE):
            looked.append(step)
            trigger.learn(saving(step), PRICE)
    return looked


def test_where_nothing_is_ever_found_lookups_become_rare_and_never_end() -> None:
    looked = run(Trigger(), 2000, lambda step: None, lambda step: 0.0)
    assert len(looked) < 2000 / LONGEST_WAIT + 40
    assert max(np.diff([*looked, 2000])) <= LONGEST_WAIT


def test_where_lookups_pay_every_step_has_one() -> None:
    assert len(run(Trigger(), 500, lambda step: None, lambda step: 0.5)) == 500


def test_a_free_lookup_is_always_made() -> None:
    trigger = Trigger()
    for _ in range(200):
        assert trigger.wants((5.0,), never, TEACHES)
        trigger.learn(0.0, TEACHES)


@pytest.mark.parametrize("certain", [0.1, 2.5])
def test_the_threshold_is_where_lookups_pay_whatever_the_nats(certain: float) -> None:
    """One in four tokens is certain at `certain` nats and the lookup pays there; at all others it never does."""
    rng = np.random.default_rng(1)
    predictable = (rng.random(6000) < 0.25).tolist()

    def entropy(step: int) -> float:
        return certain if predictable[step] else certain + 1.4

    looked = run(Trigger(), 6000, entropy, lambda step: 0.8 * predictable[step])[500:]
    later = range(looked[0], 6000)
    paying = sum(predictable[step] for step in later)
    made = sum(predictable[step] for step in looked)
    assert made > 0.97 * paying
    assert len(looked) - made < 0.2 * (len(later) - paying)


def test_text_that_becomes_predictable_is_noticed_within_the_longest_wait() -> None:
    trigger = Trigger()
    run(trigger, 3000, lambda step: None, lambda step: 0.0)
    looked = run(trigger, 200, lambda step: None, lambda step: 1.0)
    assert looked[0] < LONGEST_WAIT
    assert len(looked) > 100


def test_nothing_is_looked_up_where_the_newest_token_is_new_and_nothing_was_ever_found_so() -> None:
    """Half of the tokens stood in the text before; without one there is nothing to find."""
    trigger, looked = Trigger(), [0, 0]
    for step in range(4000):
        known = step % 2

        def repeats(n: int, known: int = known) -> bool:
            return bool(known) and n == 1

        if trigger.wants((), repeats, PRICE):
            looked[known] += 1
            trigger.learn(0.2 * known, PRICE)
    assert looked[1] == 2000
    assert looked[0] < 100


def test_requests_share_what_lookups_are_worth_and_not_the_timer() -> None:
    one = Trigger()
    run(one, 500, lambda step: 4.0, lambda step: 0.0)
    other = Trigger(one.gains)
    other.learn(0.0, PRICE)
    assert not other.wants((4.0,), never, PRICE)
