"""Log-probabilities of a row: those of an exact log-softmax, the likeliest in a fixed order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.logprobs import entropy_of, logprobs_of


def _exact(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.longdouble)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


@given(st.integers(0, 2**32), st.integers(1, 3000), st.floats(0.01, 40), st.integers(0, 30), st.floats(-200, 200))
def test_they_are_the_log_softmax(seed: int, size: int, spread: float, top: int, shift: float) -> None:
    row = (np.random.default_rng(seed).standard_normal(size) * spread + shift).astype(np.float32)
    token = seed % size
    found, exact = logprobs_of(row, token, top), _exact(row)
    assert found.token == token
    assert found.logprob == pytest.approx(float(exact[token]), abs=2e-6, rel=1e-6)
    order = sorted(range(size), key=lambda i: (-row[i], i))[:top]
    assert [i for i, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx([float(exact[i]) for i in order], abs=2e-6, rel=1e-6)


def test_of_equal_logits_the_lowest_ids_come_first() -> None:
    row = np.array([1, 3, 2, 3, 2, 2, 3], np.float32)
    assert [token for token, _ in logprobs_of(row, 0, 4).top] == [1, 3, 6, 2]


def test_a_ruled_out_token_has_no_probability_and_the_row_is_only_read() -> None:
    row = np.array([0.0, -np.inf, 0.0], np.float32)
    row.flags.writeable = False
    found = logprobs_of(row, 1, 9)
    assert found.logprob == -np.inf
    assert found.top == ((0, pytest.approx(-np.log(2))), (2, pytest.approx(-np.log(2))), (1, -np.inf))


# ---- Entropy -------------------------------------------------------------------------------------------------------


def exact(logits: np.ndarray) -> float:
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max())
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


LOGIT = st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf))


@given(st.lists(LOGIT, min_size=1, max_size=400).filter(lambda row: max(row) > -math.inf))
def test_agrees_with_float64(values: list[float]) -> None:
    row = np.array(values, np.float32)
    assert entropy_of(row) == pytest.approx(exact(row), abs=1e-4)
    assert row.tolist() == np.array(values, np.float32).tolist(), "only read"


@pytest.mark.parametrize("n", [1, 2, 1000, 151_936])
def test_equal_logits_are_uniform_and_one_huge_is_certain(n: int) -> None:
    assert entropy_of(np.full(n, -7.5, np.float32)) == pytest.approx(math.log(n), abs=1e-4)
    row = np.zeros(n, np.float32)
    row[n // 2] = 3e38
    assert entropy_of(row) == pytest.approx(0.0, abs=1e-6)
    row[:] = -3e38  # the difference is beyond float32
    row[n // 2] = 3e38
    assert entropy_of(row) == pytest.approx(0.0, abs=1e-6)
    row[:] = -np.inf
    row[n // 2] = 1.0
    assert entropy_of(row) == pytest.approx(0.0, abs=1e-6)
