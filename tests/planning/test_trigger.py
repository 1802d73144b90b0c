"""The trigger makes lookups that pay, by the last outcomes, and occasional others."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.sources import Sources
from rest_local.planning.plan import EXPLORATION_SHARE, PATIENCE, REPEATS, Gains, Trigger, longest_wait

PRICE = 0.1


def never(n: int) -> bool:
    return False


@pytest.mark.parametrize("price", [0.01, 0.16, 0.25, 1.0])
def test_lookups_that_are_not_expected_to_pay_take_a_bounded_share(price: float) -> None:
    trigger, looked = Trigger(), list[int]()
    for step in range(6000):
        if trigger.fires(never, price):
            looked.append(step)
            trigger.learn(0.0)
    late = sum(step >= 3000 for step in looked)
    assert late >= 3000 // longest_wait(PATIENCE * price) - 1
    assert price * late <= 3000 * EXPLORATION_SHARE * 1.2 + price


def test_predictable_text_is_noticed_within_the_longest_wait() -> None:
    trigger, looked = Trigger(), list[int]()
    for step in range(3200):
        if trigger.fires(never, PRICE):
            looked.append(step)
            trigger.learn(float(step >= 3000))
    late = [step - 3000 for step in looked if step >= 3000]
    assert late[0] < PATIENCE * longest_wait(PRICE)
    assert len(late) > 100


def test_no_lookup_after_a_new_token_if_such_lookups_never_find_anything() -> None:
    """Half of the tokens occur earlier in the text; after the others there is nothing to find."""
    trigger, looked = Trigger(), [0, 0]
    for step in range(4000):
        known = step % 2

        def repeats(n: int, known: int = known) -> bool:
            return bool(known) and n == 1

        if trigger.fires(repeats, PRICE):
            looked[known] += 1
            trigger.learn(0.2 * known)
    assert looked[1] == 2000
    assert looked[0] < 100


class Thorough(Trigger):
    """The oracle: asks about every length and estimates the gain anew at every step."""

    def fires(self, repeats: Callable[[int], bool], price: float) -> bool:
        self._length = sum(repeats(n) for n in REPEATS)
        self._since += 1
        pays = self.gains.savings[self._length] >= price
        self._is_trial = not pays
        return pays or self._since >= longest_wait(price * self._patience)


@st.composite
def steps_of_two_requests(draw: st.DrawFn) -> list[tuple[int, int, float, float]]:
    """Draw (request, tokens that repeat, price, saving), with prices and savings that change rarely."""
    prices = draw(st.lists(st.sampled_from([0.004, 0.01, 0.04, 0.1, 0.3]), min_size=1, max_size=3))
    paying = draw(
        st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=len(REPEATS) + 1, max_size=len(REPEATS) + 1)
    )
    one = st.tuples(st.integers(0, 1), st.integers(0, 9), st.sampled_from(prices))
    steps = draw(st.lists(one, min_size=50, max_size=150))
    return [(request, n, price, paying[sum(n >= length for length in REPEATS)]) for request, n, price in steps]


@given(steps_of_two_requests())
def test_it_fires_as_if_every_length_was_searched(steps: list[tuple[int, int, float, float]]) -> None:
    gains = Gains(), Gains()
    triggers = [Trigger(gains[0]) for _ in range(2)]
    oracles = [Thorough(gains[1]) for _ in range(2)]
    for request, n_repeated, price, saving in steps:
        asked: list[int] = []

        def repeats(n: int, most: int = n_repeated, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= most

        fired = triggers[request].fires(repeats, price)
        searched = len(asked)
        assert fired == oracles[request].fires(repeats, price)
        assert fired or searched <= 1 + len(REPEATS)
        if fired:
            triggers[request].learn(saving)
            oracles[request].learn(saving)
    assert gains[0].savings == gains[1].savings
    assert gains[0].learned == gains[1].learned


@pytest.mark.parametrize("price", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("pays_from", range(len(REPEATS) + 2))
def test_no_step_of_a_rest_would_have_fired(pays_from: int, price: float) -> None:
    """Lookups pay from a number of repeated lengths on; the oracle is asked at every step."""
    rng = np.random.default_rng(pays_from)
    resting, oracle = Trigger(), Trigger()
    sources, text, rested = Sources([], 40_000), list[int](), 0
    while len(text) < 600:
        again = len(text) > 60 and rng.random() < 0.04
        at = int(rng.integers(0, len(text) - 40)) if again else 0
        text += text[at : at + int(rng.integers(5, 40))] if again else [int(rng.zipf(1.4) % 500)]
    for token in text:
        sources.extend([token])
        fired = oracle.fires(sources.repeats, price)
        if resting.free_steps:
            resting.rest(1)
            rested += 1
            assert not fired
            continue
        resting.end_rest()
        assert resting.fires(sources.repeats, price) == fired
        if fired:
            repeated = sum(sources.repeats(n) for n in REPEATS)
            for trigger in (resting, oracle):
                trigger.learn(float(repeated >= pays_from))
        else:
            resting.allow_rest(sources.repeats, 100)
    assert rested or pays_from < len(REPEATS)
