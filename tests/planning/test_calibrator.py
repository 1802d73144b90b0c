"""The calibrator learns what a plain logistic regression learns, about the tokens concerned and no others."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import Merged
from rest_local.planning.acceptance import DAMPING, RATE, SLOTS, TokenCalibrator

PRECEDING = (7, 8)


def candidates(estimates: dict[int, float]) -> Merged:
    return {token: (estimate, 0, []) for token, estimate in estimates.items()}


def probabilities(
    calibrator: TokenCalibrator, preceding: tuple[int, int], estimates: dict[int, float]
) -> dict[int, float]:
    return {token: probability for token, probability, _ in calibrator.calibrate(preceding, candidates(estimates))}


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
        odds += sum(self.weights.setdefault(name, [0.0, DAMPING])[0] for name in names)
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
        st.tuples(TOKENS, TOKENS),
        st.dictionaries(TOKENS, st.floats(0.001, 0.999), min_size=1),
        st.integers(1, 5),
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


def test_an_untrained_calibrator_changes_no_estimate() -> None:
    estimates = {1: 0.9, 2: 0.05, 150_000: 0.6}
    assert probabilities(TokenCalibrator(), PRECEDING, estimates) == pytest.approx(estimates)


def test_a_token_that_is_never_right_falls_and_others_with_its_evidence_stay() -> None:
    calibrator = TokenCalibrator()
    for _ in range(60):
        calibrator.learn([(calibrator.calibrate(PRECEDING, candidates({1: 0.5})), 9)])
        calibrator.learn([(calibrator.calibrate((3, 4), candidates({2: 0.5})), 2)])
    after_them = probabilities(calibrator, PRECEDING, {1: 0.5})[1]
    elsewhere = probabilities(calibrator, (5, 6), {1: 0.5})[1]
    other = probabilities(calibrator, (5, 6), {11: 0.5})[11]
    assert after_them < 0.05
    assert after_them < elsewhere < other
    assert other == pytest.approx(0.5, abs=0.1)


def test_new_outcomes_outweigh_old_ones() -> None:
    calibrator = TokenCalibrator()
    for right in (*[9] * 40, *[1] * 80):
        calibrator.learn([(calibrator.calibrate(PRECEDING, candidates({1: 0.3})), right)])
    assert probabilities(calibrator, PRECEDING, {1: 0.3})[1] > 0.8


@given(
    st.tuples(st.integers(-1, 1 << 20), st.integers(-1, 1 << 20)), st.integers(0, 1 << 20), st.floats(1e-6, 0.999999)
)
def test_every_token_has_valid_slots(preceding: tuple[int, int], token: int, estimate: float) -> None:
    calibrator = TokenCalibrator()
    ((_, _, used),) = calibrated = calibrator.calibrate(preceding, candidates({token: estimate}))
    assert all(0 <= slot < SLOTS for slot in used)
    calibrator.learn([(calibrated, token)])
    assert probabilities(calibrator, preceding, {token: estimate})[token] > estimate * (1 - 1e-9)
