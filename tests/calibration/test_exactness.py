"""The comparison finds every difference, and none on an exact backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.fake_backend import FakeBackend, logits_of

from rest_local.calibration.exactness import compare_chains, compare_trees

TEXT = np.random.default_rng(3).integers(0, 20, 60).tolist()


def test_an_exact_backend_has_no_difference() -> None:
    for compare in (compare_chains, compare_trees):
        backend = FakeBackend()
        result = compare(backend, TEXT, 16)
        assert result.exact
        assert result.rows > 40
        assert backend.cells == []


def test_a_prefix_tests_a_longer_context() -> None:
    """The backend rounds differently only after 100 tokens, which only a prefix reaches."""
    backend = FakeBackend()
    backend.compute = lambda history, n: logits_of(history) * np.float32(1 + (n > 1) * (len(history) > 100) * 1e-3)
    assert compare_chains(backend, TEXT, 16).exact
    assert not compare_chains(backend, TEXT, 16, TEXT + TEXT).exact


def test_rounding_by_batch_size_is_found() -> None:
    def rounded(history: Sequence[int], n: int) -> np.ndarray:
        return logits_of(history) + np.float32(1e-4 if n > 1 else 0.0)

    def flipped(history: Sequence[int], n: int) -> np.ndarray:
        row = logits_of(history)
        return row if n == 1 else -row

    for compare in (compare_chains, compare_trees):
        backend = FakeBackend()
        backend.compute = rounded
        result = compare(backend, TEXT, 16)
        assert not result.exact
        assert result.flips == 0
        backend.compute = flipped
        result = compare(backend, TEXT, 16)
        assert result.flips > 0
        assert result.largest_gap > 0
        assert result.to_dict()["flips_per_10000"] > 100
