"""A comparison of drafts with plain steps finds every bit that differs."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.fake_backend import FakeBackend, logits_of

from rest_local.calibration.exactness import compare_drafts, rows_alone

TEXT = np.random.default_rng(3).integers(0, 20, 80).tolist()


def _backend() -> FakeBackend:
    return FakeBackend(n_ctx=512, n_slots=2)


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_an_exact_backend_has_no_difference(drafts: str) -> None:
    backend = _backend()
    reference = rows_alone(backend, TEXT)
    result = compare_drafts(backend, TEXT, reference, drafts, 16)  # type: ignore[arg-type]
    assert result.exact
    assert result.rows >= len(TEXT) - 1
    assert backend.cells == []


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_rounding_by_batch_size_is_found(drafts: str) -> None:
    def rounded(history: Sequence[int], n: int) -> np.ndarray:
        return logits_of(history) + np.float32(1e-4 if n > 1 else 0.0)

    def flipped(history: Sequence[int], n: int) -> np.ndarray:
        row = logits_of(history)
        return row if n == 1 else -row

    backend = _backend()
    reference = rows_alone(backend, TEXT)
    backend.compute = rounded
    result = compare_drafts(backend, TEXT, reference, drafts, 16)  # type: ignore[arg-type]
    assert not result.exact
    assert result.flips == 0
    backend.compute = flipped
    result = compare_drafts(backend, TEXT, reference, drafts, 16)  # type: ignore[arg-type]
    assert result.flips > 0
    assert result.largest_gap > 0
    assert result.to_dict()["flips_per_10000"] > 100
