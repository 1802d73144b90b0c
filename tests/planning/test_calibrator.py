"""The calibrator learns what a plain logistic regression learns, about the tokens concerned and no others."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import Merged
from rest_local.planning.acceptance import RATE, SLOTS, TokenCalibrator


def candidates(estimates: dict[int, float]) -> Merged:
    return {token: (estimate, 0, []) for token, estimate in estimates.items()}


class Naive:
    """The same regression with weights by name."""

    def __init__(self) -> None:
        self.weights: dict[object, list[float]] = {}

    def names(self, preceding: tuple[int, int], token: int, estimates: dict[int, float]) -> list[object]:
        before, last = preceding
        half = round(2 * log(estimates[token] / (1 - estimates[token])))
        bucket = ("bucket", half, int(4 * sum(estimates.values())))
        return [("alone", token), ("pair", last, token), ("apart", before, token), ("after", last), bucket]

    def probability(self, preceding: tuple[int, int], token: int, estimates: dict[int, float]) -> float:
        names = self.names(preceding, token, estimates)
        odds = log(estimates[token] / (1 - estimates[token]))
        odds += sum(self.weights.setdefault(name, [0.0, RATE])[0] for name in names)
        return 1 / (1 + exp(-odds))

    def learn(self, preceding: tuple[int, int], estimates: dict[int, float], right: int) -> None:
        calibrated = {token: self.probability(preceding, token, estimates) for token in estimates}
        for token, probability in calibrated.items():
            error = (token == right) - probability
            for name in self.names(preceding, token, estimates):
                weight = self.weights[name]
                weight[1] += error * error
                weight[0] += RATE * error / sqrt(weight[1])


TOKENS = st.integers(1, 4)  # so few that no two weights share a slot
NODES = st.lists(
    st.tuples(
        st.tuples(TOKENS, TOKENS), st.dictionaries(TOKENS, st.floats(0.001, 0.999), min_size=1), st.integers(1, 5)
    ),
    max_size=12,
)


@given(NODES)
def test_the_probabilities_equal_those_of_a_naive_regression(
    nodes: list[tuple[tuple[int, int], dict[int, float], int]],
) -> None:
    calibrator, naive = TokenCalibrator(), Naive()
    for preceding, estimates, right in nodes:
        calibrated = calibrator.calibrate(preceding, candidates(estimates))
        for token, probability, _ in calibrated:
            assert 0.0 < probability < 1.0
            assert probability == pytest.approx(naive.probability(preceding, token, estimates))
        calibrator.learn([(calibrated, right)])
        naive.learn(preceding, estimates, right)


@given(
    st.tuples(st.integers(-1, 1 << 20), st.integers(-1, 1 << 20)), st.integers(0, 1 << 20), st.floats(1e-6, 0.999999)
)
def test_every_token_has_valid_slots(preceding: tuple[int, int], token: int, estimate: float) -> None:
    calibrator = TokenCalibrator()
    ((_, _, used),) = calibrated = calibrator.calibrate(preceding, candidates({token: estimate}))
    assert all(0 <= slot < SLOTS for slot in used)
    calibrator.learn([(calibrated, token)])
    ((_, after, _),) = calibrator.calibrate(preceding, candidates({token: estimate}))
    assert after > estimate * (1 - 1e-9)
