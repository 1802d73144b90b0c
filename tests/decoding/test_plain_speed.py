"""An answer is compared with plain decoding only where its speed is known, and then rightly: on fixed clocks."""

import random
from types import SimpleNamespace

import pytest
from support.fake_backend import FakeBackend
from support.fake_sequences import prompts_of, scheduler_of, sequence_of, submit_all
from support.fake_sources import Fortune

from rest_local.calibration.cost import ESTIMATED, SIZES, CostCurve
from rest_local.decoding.core import RequestState
from rest_local.decoding.results import ENOUGH_STEPS
from rest_local.drafting.sources import SourceRows
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy

PLAIN_MS, ATTENTION = 10.0, 0.0002  # The time of a step, and the share that each token of context adds.
PROMPT = [1, 2, 3, 4, 5]


class Machine(FakeBackend):
    """A step of n tokens takes 10 ms and 1.5 ms for each but the first, more with the context, up to a tenth more by
    chance, and `dearer` times as long after a step of another size.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_slots: int = 1, dearer: float = 1.0) -> None:
        super().__init__(n_ctx=8192, n_slots=n_slots)
        self._size, self._dearer, noise = 0, dearer, 0.1
        self.now, self._noise, self._random = 0.0, noise, random.Random(1)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in ("forward", "scheduler", "core", "speculation", "stream"):
            monkeypatch.setattr(f"rest_local.decoding.{module}.time", clock)

    def decode(self) -> int:
        ms = (PLAIN_MS + 1.5 * (self.batch.n_tokens - 1)) * (1 + ATTENTION * len(self.cells))
        ms *= self._dearer if self.batch.n_tokens != self._size else 1.0
        self._size = self.batch.n_tokens
        self.now += 1e-3 * ms * (1 + self._noise * self._random.random())
        return super().decode()


class Always(Auto):
    def looks_up(self, at: object, repeats: object) -> bool:
        return True


class InParts(Fortune):
    """Finds something for 10 steps, then nothing for 10, and so on."""

    def __init__(self, truth: float) -> None:
        super().__init__(1, 2, 8, truth)
        self._steps = 0

    def rows(self, *_: object, **__: object) -> list[SourceRows]:
        self._steps += 1
        return super().rows() if self._steps // 10 % 2 == 0 else []


def estimate(factor: float = 1.0) -> CostCurve:
    """Return what is known when a model is first loaded, perhaps wrongly."""
    return CostCurve.from_points([0], SIZES, [[factor * (9 + n) for n in SIZES]], ESTIMATED)


def decoded(machine: Machine, curve: CostCurve, n: int, truth: float | None = None) -> RequestState:
    """Decode one answer of n tokens. `truth` of the drafts is right, and with None nothing is looked up."""
    sources, policy = (None, make_policy("off", curve)) if truth is None else (InParts(truth), Always(curve))
    sequence = sequence_of(machine, PROMPT, n, sources=sources, policy=policy, ignore_end=True)
    scheduler = scheduler_of(machine, curve)
    scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    return sequence


@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("truth", [0.3, 0.6, 0.9])
def test_a_fresh_answer_says_nothing_or_is_right_within_a_tenth(
    truth: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, curve, known = Machine(monkeypatch), estimate(factor), 0
    for n in (8, 20, 40, 80, 160, 320):
        plain = decoded(machine, curve, n).result.timings.predicted_ms
        sequence = decoded(machine, curve, n, truth)
        statistics = sequence.statistics
        stated = statistics.plain_step_ms(curve, measured=False)
        if statistics.plain.n < ENOUGH_STEPS and curve.plain_steps < ENOUGH_STEPS:
            assert stated == 0.0
        if stated:
            known += 1
            assert n * stated == pytest.approx(plain, rel=0.1)
    assert known


def test_plain_steps_after_drafts_do_not_make_plain_decoding_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, curve = Machine(monkeypatch, dearer=2.0), estimate()
    plain = decoded(machine, curve, 320).result.timings.predicted_ms
    statistics = decoded(machine, curve, 320, 0.6).statistics
    assert statistics.plain.n >= ENOUGH_STEPS
    assert 320 * statistics.plain_step_ms(curve, measured=False) == pytest.approx(plain, rel=0.1)


def test_a_curve_that_was_measured_is_believed_from_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    curve = CostCurve.from_points([0, 2048], SIZES, [[(10.5 + 1.5 * n) * (1 + k) for n in SIZES] for k in (0, 0.4)])
    plain = decoded(machine, curve, 60).result.timings.predicted_ms
    statistics = decoded(machine, curve, 60, 0.9).statistics
    assert statistics.plain.n < ENOUGH_STEPS
    assert statistics.plain_step_ms(curve, measured=False) == 0.0
    assert 60 * statistics.plain_step_ms(curve, measured=True) == pytest.approx(plain, rel=0.15)
    far = statistics.plain_step_ms(estimate(), measured=True)
    assert far == 0.0, "of a length that was not measured"


def test_requests_that_share_their_passes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, curve = Machine(monkeypatch, n_slots=2), estimate()
    scheduler = scheduler_of(machine, curve)
    sequences = [sequence_of(machine, prompt, 50, ignore_end=True) for prompt in prompts_of(2)]
    submit_all(scheduler, sequences)
    while scheduler.busy:
        scheduler.step()
    assert [sequence.statistics.plain.n for sequence in sequences] == [49, 49]
    assert [sequence.statistics.plain_step_ms(curve, measured=True) for sequence in sequences] == [0.0, 0.0]
