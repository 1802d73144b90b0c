"""The guarantee of `--exact` needs at least 256 rows on any machine, and none of them may differ."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import FakeBackend, logits_of
from support.prices import FLAT

from rest_local import Engine
from rest_local.calibration import tuning
from rest_local.calibration.exactness import LEAST_ROWS, Comparison, SelfTest, guarantees_exactness, plan_segments
from rest_local.calibration.settings import EXACT
from rest_local.calibration.tuning import Tuning
from rest_local.llama.context import ContextSettings

TEXT = np.random.default_rng(3).integers(0, 20, 60).tolist()
Compute = Callable[[Sequence[int], int], np.ndarray]


def rounds_after(position: int) -> Compute:
    """Make a model that rounds differently in batches from a position on."""
    return lambda history, n: logits_of(history) * np.float32(1 + (n > 1) * (len(history) > position) * 1e-3)


def finish(test: SelfTest) -> SelfTest:
    for _ in range(10_000):
        if test.run(0.0):
            return test
    raise AssertionError("the test does not end")


@pytest.mark.parametrize("n_ctx", [8, 16, 100, 256, 959, 961, 1024, 4096])
def test_every_plan_has_enough_rows_and_fits_the_context(n_ctx: int) -> None:
    segments = plan_segments(n_ctx, 64)
    assert sum(segment.n for segment in segments) == LEAST_ROWS + 128 * (n_ctx > 960)
    assert all(segment.n > 0 and segment.position + segment.n <= n_ctx for segment in segments)
    assert max(segment.position for segment in segments) >= min(n_ctx // 2, 256) - 32


@pytest.mark.parametrize("n_ctx", [8, 100, 1024])
def test_an_exact_backend_is_exact_after_all_rows_and_not_before(n_ctx: int) -> None:
    backend = FakeBackend(n_ctx)
    test = SelfTest(backend, TEXT, 63)
    compared = 0
    while not test.run(0.0):
        assert not test.to_dict()["exact"]
        assert test.comparison.rows >= compared
        compared = test.comparison.rows
    assert test.to_dict()["exact"]
    assert test.comparison.rows == test.rows_needed >= LEAST_ROWS


def test_no_guarantee_with_one_difference_or_one_row_too_few() -> None:
    assert guarantees_exactness(Comparison(rows=384), 384)
    assert not guarantees_exactness(Comparison(rows=384, different=1), 384)
    assert not guarantees_exactness(Comparison(rows=383), 384)
    assert not guarantees_exactness(Comparison(rows=LEAST_ROWS - 1), 1)


def test_chains_of_every_size_are_compared() -> None:
    backend, sizes = FakeBackend(1024), set[int]()
    backend.compute = lambda history, n: (sizes.add(n), logits_of(history))[1]
    finish(SelfTest(backend, TEXT, 63))
    assert sizes == {1, 2, 3, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("position", [0, 60, 200, 750])
def test_a_difference_is_found_at_any_position(position: int) -> None:
    backend = FakeBackend(1024)
    backend.compute = rounds_after(position)
    found = finish(SelfTest(backend, TEXT, 16)).to_dict()
    assert found["different"] > 0
    assert not found["exact"]


def test_a_rejected_tail_that_changes_later_rows_is_found() -> None:
    """The rows of this backend change after a tail was removed."""

    class Remembers(FakeBackend):
        removed = 0

        def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
            self.removed += any(cell.pos > p0 for cell in self.cells) and p0 % 32 != 0
            return super().remove(seq, p0, p1)

    backend = Remembers(256)
    backend.compute = lambda history, n: logits_of(history) + np.float32(1e-4 * (backend.removed > 0) * (n > 1))
    assert finish(SelfTest(backend, TEXT, 16)).comparison.different > 0


def test_a_later_process_continues_where_the_first_one_stopped() -> None:
    backend = FakeBackend(1024)
    first = SelfTest(backend, TEXT, 16)
    while first.comparison.rows < 100:
        first.run(0.0)
    assert not first.complete
    known = first.to_dict()
    again = SelfTest(FakeBackend(1024), TEXT, 16, known)
    assert finish(again).comparison.rows == again.rows_needed
    assert again.backend.calls < 3 * (again.rows_needed - known["rows"])
    late = FakeBackend(1024)
    late.compute = rounds_after(300)
    assert not finish(SelfTest(late, TEXT, 16, known)).to_dict()["exact"]


def test_the_time_of_the_test_is_told_after_its_first_rows() -> None:
    backend = FakeBackend(1024)
    test = SelfTest(backend, TEXT, 63)
    assert test.begin() > 0
    assert 0 < test.comparison.rows < 32
    assert backend.evaluated < 30
    assert finish(test).begin() == 0


def test_a_stored_guarantee_on_too_few_rows_is_rejected() -> None:
    found = finish(SelfTest(FakeBackend(1024), TEXT, 63)).to_dict()
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
        assert engine.decoder.context.tuning.self_test["rows"] == 384
        assert not engine.warnings


@pytest.mark.parametrize("later", ["the next load", "doctor"])
def test_without_the_time_for_all_rows_decoding_is_plain_and_says_so(
    later: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "EXACT_TEST_S", 0.0)
        engine = load(path)
    with engine:
        assert engine.decoder.context.capability.kind == "none"
        assert engine.decoder.context.tuning.self_test["rows"] == 4
        (warning,) = engine.warnings
        assert "4 of 384 rows" in warning
        assert "until it is complete; `doctor` can do that" in warning
        stream = engine.generate([1, 2, 3] * 20, max_tokens=12, policy="rest")
        assert sum(len(piece.text) > 0 for piece in stream) > 0
        assert stream.statistics.drafted == 0
        if later == "doctor":
            engine.decoder.context.compare()
            assert engine.decoder.context.capability.kind == "chain"
            assert not engine.warnings
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "chain"
        assert engine.decoder.context.tuning.self_test["rows"] == 384


@pytest.mark.parametrize("begun", [False, True])
def test_settings_with_a_difference_are_not_chosen_and_not_tested_again(
    begun: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all settings differ, the first that work are kept, and one warning says so. `begun`: an earlier load had the
    time for the first rows alone, which did not differ.
    """
    if begun:
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "EXACT_TEST_S", 0.0)
            load(path).close()
    monkeypatch.setattr(Comparison, "add", _differs_late)
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "none"
        assert len(engine.warnings) == 1
        assert len(engine.decoder.context.tuning.unsuitable) == len(EXACT)
        first = engine.settings
    monkeypatch.setattr(Comparison, "add", None)
    with load(path) as engine:
        assert engine.decoder.context.capability.kind == "none"
        assert engine.settings == first


def _differs_late(comparison: Comparison, alone: np.ndarray, other: np.ndarray) -> None:
    comparison.rows += 1
    comparison.different += comparison.rows > 30
