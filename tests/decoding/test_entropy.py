"""Entropy of a row of logits against the same in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.logprobs import entropy_of


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


def test_threads_do_not_share_buffers() -> None:
    rows = [(np.random.default_rng(n).standard_normal(20_000) * (1 + n)).astype(np.float32) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(entropy_of, rows * 25))
    assert found == pytest.approx([exact(row) for row in rows] * 25, abs=1e-3)
