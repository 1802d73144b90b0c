"""Log-probabilities of a row: those of an exact log-softmax, the likeliest in a fixed order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.logprobs import logprobs_of


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
