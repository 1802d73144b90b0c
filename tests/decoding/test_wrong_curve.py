"""A cost curve of another speed than the machine's, measured under load say: what becomes of drafts and prompts."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.fake_backend import Draws, FakeBackend
from support.fake_sequences import prompts_of, said, scheduler_of, sequence_of
from support.fake_sources import Fortune

from rest_local.calibration.cost import SIZES, CostCurve, per_token
from rest_local.decoding.prefill import LEAST_PART, STALL_MS
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext

ROW = [0.3 * (1 + 0.06 * (n - 1)) for n in SIZES]
PER_TOKEN = 0.3 * 0.06


class Timed(FakeBackend):
    """A pass of n tokens takes 0.3 ms and 0.018 ms for each but the first. `passes`: their tokens."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.now = 0.0
        self.passes: list[int] = []

    def decode(self) -> int:
        n = self.batch.n_tokens
        self.passes.append(n)
        self.now += 1e-3 * (0.3 + PER_TOKEN * (n - 1))
        return super().decode()


class Always(Auto):
    """Looks up at every step and takes every candidate for certain."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(curve)
        self.shared.acceptance = Certain()

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        return True


class Certain(Acceptance):
    def estimate(self, cell: int) -> float:
        return 0.95


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Timed]:
    def make(n_slots: int) -> Timed:
        backend = Timed(n_ctx=8192, n_batch=512, n_slots=n_slots)
        clock = SimpleNamespace(perf_counter=lambda: backend.now)
        for module in ("forward", "scheduler", "core", "speculation", "stream"):
            monkeypatch.setattr(f"rest_local.decoding.{module}.time", clock)
        return backend

    return make


def believed(factor: float) -> CostCurve:
    return CostCurve.from_points([0], SIZES, [[factor * ms for ms in ROW]])


@pytest.mark.parametrize(("factor", "n_slots"), [(600.0, 1), (600.0, 4), (4.0, 1), (4.0, 4), (1 / 600, 4)])
def test_a_wrong_speed_is_found_without_a_plain_step(
    factor: float, n_slots: int, timed: Callable[[int], Timed]
) -> None:
    backend = timed(n_slots)
    curve = believed(factor)
    scheduler, policy = scheduler_of(backend, curve), Always(curve)
    for prompt in prompts_of(n_slots):
        scheduler.submit(sequence_of(backend, prompt, 500, Draws(1), Fortune(1, 1, 12, 1.0), policy, ignore_end=True))
    while any(sequence.text.is_prefilling for sequence in (*scheduler.queue.waiting, *scheduler.queue.admitted)):
        scheduler.step()
    backend.passes.clear()
    for _ in range(10):
        scheduler.step()
    assert min(backend.passes) > 1
    assert 0.5 < curve.expected(100)[0] / ROW[0] < 2
    assert 0.5 < per_token(curve, 100) / PER_TOKEN < 2


@pytest.mark.parametrize("factor", [1.0, 600.0, 1e9])
def test_no_curve_cuts_prompts_into_parts_that_are_quicker_than_they_may_be(
    factor: float, timed: Callable[[int], Timed]
) -> None:
    """The speed of one part tells how large the next may be, and that of a few tokens tells nothing."""
    backend = timed(2)
    scheduler = scheduler_of(backend, believed(factor))
    scheduler.submit(sequence_of(backend, [1, 2, 3], 400, Draws(2), ignore_end=True))
    for _ in range(3):
        scheduler.step()
    backend.passes.clear()
    late = sequence_of(backend, [5] * 4000, 5)
    scheduler.submit(late)
    while not late.result.tokens:
        scheduler.step()
    *parts, _last, _first_token = [n - 1 for n in backend.passes]
    assert parts[0] >= LEAST_PART
    assert set(parts[1:]) == {511}, "the first one took a twentieth of what a part may take"
    assert 512 * PER_TOKEN < STALL_MS / 2
    while not late.done:
        scheduler.step()
    assert late.result.tokens == said([5] * 4000, 5)
    short, later = sequence_of(backend, [7, 8], 1), sequence_of(backend, [6] * 2000, 1)
    for one in (short, later):
        backend.passes.clear()
        scheduler.submit(one)
        while not one.done:
            scheduler.step()
    assert backend.passes[0] == 512
