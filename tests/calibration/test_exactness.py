"""A comparison of drafts with plain steps finds every bit that differs, and `--exact` needs at least 256 equal rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import FakeBackend, logits_of
from support.prices import FLAT

from rest_local import Engine
from rest_local.calibration.exactness import (
    LEAST_ROWS,
    Comparison,
    compare_drafts,
    guarantees_exactness,
    self_test,
    self_test_parts,
)
from rest_local.calibration.settings import EXACT
from rest_local.calibration.tuning import Tuning
from rest_local.llama.context import ContextSettings

TEXT = np.random.default_rng(3).integers(0, 20, 80).tolist()
Compute = Callable[[Sequence[int], int], np.ndarray]


def rounds_after(position: int) -> Compute:
    """Make a model that rounds differently in batches from a position on."""
    return lambda history, n: logits_of(history) * np.float32(1 + (n > 1) * (len(history) > position) * 1e-3)


@pytest.mark.parametrize("drafts", ["chains", "trees"])
@pytest.mark.parametrize("begin", [0, 30])
def test_an_exact_backend_has_no_difference_in_any_row(drafts: str, begin: int) -> None:
    backend = FakeBackend(n_ctx=512, n_slots=2)
    result = compare_drafts(backend, TEXT, drafts, 16, begin)  # type: ignore[arg-type]
    assert result.exact
    assert result.rows == len(TEXT) - begin
    assert backend.cells == []


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_rounding_by_batch_size_is_found(drafts: str) -> None:
    def flipped(history: Sequence[int], n: int) -> np.ndarray:
        row = logits_of(history)
        return row if n == 1 else -row

    backend = FakeBackend(n_ctx=512, n_slots=2)
    backend.compute = lambda history, n: logits_of(history) + np.float32(1e-4 if n > 1 else 0.0)
    result = compare_drafts(backend, TEXT, drafts, 16)  # type: ignore[arg-type]
    assert not result.exact
    assert result.flips == 0
    backend.compute = flipped
    result = compare_drafts(backend, TEXT, drafts, 16)  # type: ignore[arg-type]
    assert result.flips > 0
    assert result.largest_gap > 0
    assert result.to_dict()["flips_per_10000"] > 100


@pytest.mark.parametrize("n_ctx", [8, 16, 100, 256, 959, 961, 1024, 4096])
def test_every_plan_has_enough_rows_and_fits_the_context(n_ctx: int) -> None:
    first, *others = self_test_parts(n_ctx, 63)
    assert first == (0, 0, 4)
    assert sum(end - begin for _, begin, end in others) == LEAST_ROWS + 128 * (n_ctx > 960)
    assert all(0 <= begin < end <= n_ctx for _, begin, end in others)
    assert len({offset + begin for offset, begin, _ in others}) == len(others)


@pytest.mark.parametrize("n_ctx", [8, 100, 1024])
def test_an_exact_backend_passes_the_whole_plan(n_ctx: int) -> None:
    announced: list[tuple[int, float]] = []
    found = self_test(FakeBackend(n_ctx), TEXT, 63, lambda rows, seconds: announced.append((rows, seconds)))
    ((rows, seconds),) = announced
    assert found.rows == 4 + rows >= LEAST_ROWS
    assert seconds > 0
    assert guarantees_exactness(found)


def test_no_guarantee_with_one_difference_or_one_row_too_few() -> None:
    assert guarantees_exactness(Comparison(rows=LEAST_ROWS))
    assert not guarantees_exactness(Comparison(rows=LEAST_ROWS, different=1))
    assert not guarantees_exactness(Comparison(rows=LEAST_ROWS - 1))


def test_chains_of_every_size_are_compared() -> None:
    backend, sizes = FakeBackend(1024), set[int]()
    backend.compute = lambda history, n: (sizes.add(n), logits_of(history))[1]
    self_test(backend, TEXT, 63)
    assert sizes >= {1, 2, 3, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("position", [0, 60, 200, 750])
def test_a_difference_is_found_at_any_position(position: int) -> None:
    backend = FakeBackend(1024)
    backend.compute = rounds_after(position)
    assert self_test(backend, TEXT, 16).different > 0
    assert (backend.calls < 30) is (position == 0)  # Unsuitable settings are known after a few steps.


def test_a_rejected_tail_that_changes_later_rows_is_found() -> None:
    """The rows of this backend change after a tail was removed."""

    class Remembers(FakeBackend):
        removed = 0

        def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
            self.removed += any(cell.pos > p0 for cell in self.cells)
            return super().remove(seq, p0, p1)

    backend = Remembers(256)
    backend.compute = lambda history, n: logits_of(history) + np.float32(1e-4 * (backend.removed > 0) * (n > 1))
    assert self_test(backend, TEXT, 16).different > 0


def test_a_stored_guarantee_on_too_few_rows_is_rejected() -> None:
    found = self_test(FakeBackend(1024), TEXT, 63).to_dict()
    whole = Tuning(ContextSettings(n_ctx=2048), FLAT, found, True, fidelity="exact")
    assert Tuning.from_json(whole.to_json()).exact
    assert not Tuning.from_json(replace(whole, self_test={**found, "rows": 32}).to_json()).exact
    for damage in ({"rows": -5}, {"different": "many"}, {"flips": 9}):
        with pytest.raises(ValueError, match=r"not a comparison|invalid literal"):
            Tuning.from_json(replace(whole, self_test={**found, **damage}).to_json())


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    return tiny_model("llama", quant="Q8_0")


def load(path: Path) -> Engine:
    return Engine.load(path, n_ctx=1024, threads=1, exact=True)


def test_an_exact_engine_drafts_from_its_first_request_on(path: Path) -> None:
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "chain"
        assert engine.decoder.context.tuning.self_test["exact"]
        assert engine.decoder.context.tuning.self_test["rows"] == 388
        assert not engine.warnings


def test_settings_with_a_difference_are_not_chosen_and_not_tested_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all settings differ, the first that work are kept, and one warning says so."""
    tested: list[int] = []

    def differs_late(comparison: Comparison, alone: np.ndarray, other: np.ndarray) -> None:
        comparison.rows += 1
        comparison.different += comparison.rows > 30
        tested.extend([1] * (comparison.rows == 31))

    monkeypatch.setattr(Comparison, "add", differs_late)
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "none"
        assert len(engine.warnings) == 1
        assert len(tested) == len(EXACT)
        first = engine.settings
    monkeypatch.setattr(Comparison, "add", None)
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "none"
        assert engine.settings == first
