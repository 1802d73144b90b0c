"""The trigger makes lookups that pay, by entropy and the last outcomes, and occasional others."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.planning.plan import ENTROPIES, PATIENCE, REPEATS, TRIAL_SHARE, Gains, Trigger, longest_wait

PRICE = 0.1
WAIT = longest_wait(PRICE)


def never(n: int) -> bool:
    return False


def run(
    trigger: Trigger, steps: int, entropy: Callable[[int], float | None], saving: Callable[[int], float]
) -> list[int]:
    """Return the steps in which the trigger fired."""
    looked = []
    for step in range(steps):
        nats = entropy(step)
        if trigger.fires(() if nats is None else (nats,), never, PRICE):
            looked.append(step)
            trigger.learn(saving(step))
    return looked


@pytest.mark.parametrize("price", [0.01, 0.16, 0.25, 1.0])
def test_lookups_that_are_not_expected_to_pay_take_a_bounded_share(price: float) -> None:
    trigger, looked = Trigger(), list[int]()
    for step in range(6000):
        if trigger.fires((), never, price):
            looked.append(step)
            trigger.learn(0.0)
    late = sum(step >= 3000 for step in looked)
    assert late >= 3000 // longest_wait(PATIENCE * price) - 1
    assert price * late <= 3000 * TRIAL_SHARE * 1.2 + price


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
    assert looked[0] < PATIENCE * WAIT
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
            trigger.learn(0.2 * known)
    assert looked[1] == 2000
    assert looked[0] < 100


class Thorough(Trigger):
    """The oracle: asks about every length and estimates the gain anew at every step."""

    def fires(self, entropies: Sequence[float], repeats: Callable[[int], bool], price: float) -> bool:
        bucket = 1 + bisect_left(ENTROPIES, entropies[-1]) if entropies else 0
        self._cell = bucket, sum(repeats(n) for n in REPEATS)
        self._since += 1
        pays = self.gains.saving(bucket)[self._cell[1]] >= price
        self._is_trial = not pays
        return pays or self._since >= longest_wait(price * self._patience)


@st.composite
def steps_of_two_requests(draw: st.DrawFn) -> list[tuple[int, int, float | None, float, float]]:
    """Draw (request, tokens that repeat, entropy, price, saving), with prices and savings that change rarely."""
    prices = draw(st.lists(st.sampled_from([0.004, 0.01, 0.04, 0.1, 0.3]), min_size=1, max_size=3))
    paying = draw(
        st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=len(REPEATS) + 1, max_size=len(REPEATS) + 1)
    )
    one = st.tuples(st.integers(0, 1), st.integers(0, 9), st.none() | st.floats(0, 5), st.sampled_from(prices))
    steps = draw(st.lists(one, min_size=50, max_size=150))
    return [
        (request, n, nats, price, paying[sum(n >= length for length in REPEATS)]) for request, n, nats, price in steps
    ]


@given(steps_of_two_requests())
def test_it_fires_as_if_every_length_was_searched(steps: list[tuple[int, int, float | None, float, float]]) -> None:
    gains = Gains(), Gains()
    triggers = [Trigger(gains[0]) for _ in range(2)]
    oracles = [Thorough(gains[1]) for _ in range(2)]
    for request, n_repeated, nats, price, saving in steps:
        known = () if nats is None else (nats,)
        asked: list[int] = []

        def repeats(n: int, most: int = n_repeated, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= most

        fired = triggers[request].fires(known, repeats, price)
        searched = len(asked)
        assert fired == oracles[request].fires(known, repeats, price)
        assert fired or searched <= 1 + len(REPEATS)
        if fired:
            triggers[request].learn(saving)
            oracles[request].learn(saving)
    for bucket in range(len(ENTROPIES) + 1):
        assert gains[0].saving(bucket) == gains[1].saving(bucket)
    assert gains[0].learned == gains[1].learned
