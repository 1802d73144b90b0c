"""The guarantee of `--exact` needs at least 256 rows on any machine, and none of them may differ."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_backend import FakeBackend, logits_of
from support.fake_sequences import sequence_of
from support.prices import FLAT

from rest_local import Engine
from rest_local.calibration import tuning
from rest_local.calibration.exactness import LEAST_ROWS, Comparison, SelfTest, guarantees_exactness, plan_segments
from rest_local.calibration.settings import EXACT
from rest_local.calibration.tuning import Tuning
from rest_local.decoding import decode_context
from rest_local.decoding.decode_context import DecodeContext
from rest_local.decoding.service import Service
from rest_local.errors import DecodeFailed, ModelError
from rest_local.llama.context import ContextSettings
from rest_local.llama.options import ModelOptions

TEXT = np.random.default_rng(3).integers(0, 20, 60).tolist()
Compute = Callable[[Sequence[int], int], np.ndarray]


def rounds_after(position: int) -> Compute:
    """A model that rounds differently in batches from a position on."""
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


def test_an_aborted_decode_costs_only_its_segment() -> None:
    backend = FakeBackend(1024)
    test = SelfTest(backend, TEXT, 16)
    while test.comparison.rows < 64:
        test.run(0.0)
    backend.failures[backend.calls + 5] = 2
    assert finish(test).to_dict()["exact"]
    backend = FakeBackend(1024)
    backend.failures[7] = -3
    with pytest.raises(DecodeFailed):
        finish(SelfTest(backend, TEXT, 16))


def test_an_interrupt_does_not_end_the_test() -> None:
    backend = FakeBackend(256)
    test = SelfTest(backend, TEXT, 16)
    backend.failures[9] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        finish(test)
    assert finish(test).to_dict()["exact"]


def test_the_part_before_the_first_token_is_bounded_by_the_time_of_a_plain_step() -> None:
    slow = SelfTest(FakeBackend(1024), TEXT, 63)
    assert not slow.begin(0.0)
    assert 0 < slow.comparison.rows < 32
    assert slow.backend.evaluated < 30
    quick = SelfTest(FakeBackend(1024), TEXT, 63)
    assert quick.begin(600.0)
    assert quick.to_dict()["exact"]


class ExactContext:
    """An exact context over a fake backend, with an unfinished self-test. `stored`: the tunings that were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compute: Compute | None = None, refuse: bool = False) -> None:
        self.opened: list[Any] = []
        model = SimpleNamespace(
            n_vocab=32, n_ctx_train=0, is_recurrent=False, is_hybrid=False, has_encoder=False, closed=False,
            options=ModelOptions(),
        )  # fmt: skip

        def open_context(_: object, settings: ContextSettings) -> Any:
            if refuse:
                raise ModelError("no memory for a context")
            backend: Any = FakeBackend(settings.n_ctx, n_batch=settings.n_batch)
            backend.compute = compute or backend.compute
            backend.close = lambda: self.opened.remove(backend)
            self.opened.append(backend)
            return backend

        monkeypatch.setattr(decode_context, "Context", open_context)
        monkeypatch.setattr(tuning, "real_text", lambda *_: TEXT)
        self.backend: Any = FakeBackend(2048)
        self.backend.settings = ContextSettings(n_ctx=2048)
        self.backend.n_ubatch, self.backend.close = 64, lambda: None
        self.backend.number_decodes = lambda number: None
        begun = SelfTest(FakeBackend(1024), TEXT, 63)
        begun.begin(0.0)
        self.tuning = Tuning(self.backend.settings, FLAT, begun.to_dict(), False, fidelity="exact")
        self.stored: list[str] = []
        monkeypatch.setattr(Tuning, "store", lambda tuning: self.stored.append(tuning.to_json()))
        self.context = DecodeContext(model, self.backend, self.tuning)  # type: ignore[arg-type]
        self.context._calibration.enabled = False  # the self-test is the only idle work here

    def idle(self, rows: int = 10_000) -> None:
        """Use idle time until `rows` rows are compared or no work is left."""
        while self.context.idle_work_in == 0 and self.tuning.rows_compared < rows:
            self.context.use_idle_time(0.0)


def test_drafting_starts_when_all_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactContext(monkeypatch)
    context = exact.context
    assert context.capability.kind == "none"
    assert "of 384 rows" in context.capability.reason
    assert not context.warnings
    sequence = sequence_of(exact.backend, [1, 2, 3], 40)
    context.scheduler.submit(sequence)
    context.scheduler.step()
    assert sequence.is_admitted
    exact.idle(rows=300)
    assert (context.capability.kind, context.tuning.exact) == ("none", False)
    assert not any(Tuning.from_json(text).exact for text in exact.stored)
    exact.idle()
    assert (context.capability.kind, context.tuning.exact) == ("chain", True)
    assert not sequence.done
    assert context.scheduler.forward.capability.kind == "chain", "in the next pass of this request, too"
    assert Tuning.from_json(exact.stored[-1]).exact
    assert not exact.opened
    assert not context.warnings


def test_a_caller_that_waits_gets_the_whole_test_and_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ExactContext(monkeypatch).context
    context.compare(0.0)
    assert context.idle_work_in == 0
    assert context.capability.kind == "none"
    context.compare(math.inf)
    assert context.idle_work_in is None
    assert context.capability.kind == "chain"


def test_a_difference_found_later_leaves_drafting_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exact = ExactContext(monkeypatch, rounds_after(150))
    with caplog.at_level(logging.WARNING):
        exact.idle()
        exact.idle()
    assert exact.context.capability.kind == "none"
    assert len(exact.context.warnings) == len(caplog.records) == 1
    assert "decoding plainly" in exact.context.warnings[0]
    kept = Tuning.from_json(exact.stored[-1])
    assert not kept.exact
    assert kept.unsuitable == [exact.backend.settings]
    assert not exact.opened


def test_a_self_test_without_memory_leaves_drafting_off_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactContext(monkeypatch, refuse=True)
    exact.idle()
    assert exact.context.capability.kind == "none"
    assert not exact.tuning.exact
    assert len(exact.context.warnings) == 1
    assert "no memory" in exact.context.warnings[0]


def test_the_background_test_takes_its_share_of_the_time_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactContext(monkeypatch)
    for _ in range(5):
        exact.context.after_pass(0.0)
    assert not exact.opened  # no time is earned yet
    exact.context.after_pass(1e6)
    assert exact.opened[0].calls == 1
    while exact.context.idle_work_in == 0:
        exact.context.after_pass(1e6)
    assert exact.tuning.exact


def test_a_stored_guarantee_on_too_few_rows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactContext(monkeypatch)
    exact.idle()
    whole = exact.tuning
    assert Tuning.from_json(whole.to_json()).exact
    few = replace(whole, self_test={**whole.self_test, "rows": 32})
    assert not Tuning.from_json(few.to_json()).exact
    for damage in ({"rows": -5}, {"different": "many"}, {"flips": 9}):
        with pytest.raises(ValueError, match=r"not a comparison|invalid literal"):
            Tuning.from_json(replace(whole, self_test={**whole.self_test, **damage}).to_json())


def test_settings_with_a_difference_are_not_chosen_again(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """After a difference that a service finds later, the next start takes the next settings. If all settings differ,
    the first that work are kept and not tested again.
    """
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "SELF_TEST_S", 0.0)
    path = tiny_model("llama", quant="Q8_0")
    tried = []
    with monkeypatch.context() as patch:
        patch.setattr(Comparison, "add", _differs_late)
        for _ in range(len(EXACT) + 2):
            with Engine.load(path, n_ctx=256, threads=1, exact=True) as engine:
                tried.append(tuple(engine.settings[key] for key in ("flash_attention", "cache_type_k", "cache_type_v")))
                while engine.use_idle_time(1.0):
                    pass
                assert engine.capability.kind == "none"
                assert len(engine.warnings) == 1
    assert tried[:-2] == list(EXACT)
    assert tried[-2] == tried[-1]


def _differs_late(comparison: Comparison, alone: np.ndarray, other: np.ndarray) -> None:
    comparison.rows += 1
    comparison.different += comparison.rows > 30


def test_the_first_answer_on_a_slow_machine_is_plain_and_a_service_completes_the_test(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "SELF_TEST_S", 0.0)
    path = tiny_model("llama", quant="Q8_0")
    with Engine.load(path, n_ctx=1024, threads=1, exact=True) as engine:
        assert engine.capability.kind == "none"
        assert engine.self_test["rows"] == 4
        stream = engine.generate([1, 2, 3] * 20, max_tokens=12, policy="rest")
        assert sum(len(piece.text) > 0 for piece in stream) > 0
        assert stream.statistics.drafted == 0
    with Engine.load(path, n_ctx=1024, threads=1, exact=True) as engine:
        began_with = engine.self_test["rows"]
        assert 4 <= began_with < 384
        service = Service(engine)
        try:
            for _ in range(10_000):
                if service.run(lambda engine: engine.capability.kind) == "chain":
                    break
            assert engine.self_test["exact"]
        finally:
            service.close()
    with Engine.load(path, n_ctx=1024, threads=1, exact=True) as engine:
        assert engine.capability.kind == "chain"
        assert engine.self_test["rows"] == 384
