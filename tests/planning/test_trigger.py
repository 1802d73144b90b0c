"""The trigger makes lookups that pay, by entropy and the last outcomes, and occasional others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rest_local.planning.plan import EXPLORATION_VALUE, LONGEST_WAIT, Trigger

PRICE = 0.1


def never(n: int) -> bool:
    return False


def run(
    trigger: Trigger, steps: int, entropy: Callable[[int], float | None], saving: Callable[[int], float]
) -> list[int]:
    """The steps in which the trigger fired."""
    looked = []
    for step in range(steps):
        nats = entropy(step)
        if trigger.fires(() if nats is None else (nats,), never, PRICE):
            looked.append(step)
            trigger.learn(saving(step), PRICE)
    return looked


def test_lookups_that_find_nothing_become_rare_but_never_stop() -> None:
    looked = run(Trigger(), 2000, lambda step: None, lambda step: 0.0)
    assert len(looked) < 2000 / LONGEST_WAIT + 40
    assert max(np.diff([*looked, 2000])) <= LONGEST_WAIT


def test_lookups_that_always_pay_are_made_at_every_step() -> None:
    assert len(run(Trigger(), 500, lambda step: None, lambda step: 0.5)) == 500


def test_a_free_lookup_is_always_made() -> None:
    trigger = Trigger()
    for _ in range(200):
        assert trigger.fires((5.0,), never, EXPLORATION_VALUE)
        trigger.learn(0.0, EXPLORATION_VALUE)


@pytest.mark.parametrize("certain", [0.1, 2.5])
def test_the_threshold_is_learned_at_any_level_of_entropy(certain: float) -> None:
    """One token in four has an entropy of `certain` nats and its lookup pays; the lookups of all others never do."""
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


def test_predictable_text_is_noticed_within_the_longest_wait() -> None:
    trigger = Trigger()
    run(trigger, 3000, lambda step: None, lambda step: 0.0)
    looked = run(trigger, 200, lambda step: None, lambda step: 1.0)
    assert looked[0] < LONGEST_WAIT
    assert len(looked) > 100


def test_no_lookup_after_a_new_token_if_such_lookups_never_find_anything() -> None:
    """Half of the tokens occur earlier in the text; after the others there is nothing to find."""
    trigger, looked = Trigger(), [0, 0]
    for step in range(4000):
        known = step % 2

        def repeats(n: int, known: int = known) -> bool:
            return bool(known) and n == 1

        if trigger.fires((), repeats, PRICE):
            looked[known] += 1
            trigger.learn(0.2 * known, PRICE)
    assert looked[1] == 2000
    assert looked[0] < 100


def test_requests_share_the_learned_gains_but_not_the_timer() -> None:
    one = Trigger()
    run(one, 500, lambda step: 4.0, lambda step: 0.0)
    other = Trigger(one.gains)
    other.learn(0.0, PRICE)
    assert not other.fires((4.0,), never, PRICE)
