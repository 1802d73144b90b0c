"""Prices are learned between steps and in idle moments, in their share of the time, without a trace in the cells."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_backend import FakeBackend
from support.fake_sequences import said, scheduler_of, sequence_of

from rest_local.calibration.cost import ESTIMATED, SIZES, CostCurve, is_certain
from rest_local.calibration.measuring import LoadMeter, Timing, probe_slot
from rest_local.decoding import calibrating as calibration
from rest_local.decoding.calibrating import MOST_BUSY, MOST_IDLE, SHARE, Calibration
from rest_local.decoding.scheduler import Scheduler
from rest_local.kv_cache.slot import Slot
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy

PROMPT, N = [1, 2, 3, 4, 5], 12
TRUE = CostCurve.from_points([0], SIZES, [[10.0 * (0.8 + 0.2 * n) for n in SIZES]])


def estimate(slope: float = 0.9) -> CostCurve:
    """Return an estimate far too dear for a draft."""
    return CostCurve.from_points([0], SIZES, [[10.0 * (1 - slope + slope * n) for n in SIZES]], ESTIMATED)


def make(scheduler: Scheduler, curve: CostCurve, *, enabled: bool = True) -> Calibration:
    return Calibration(scheduler, curve, lambda: [7, 8, 9], LoadMeter(lambda: 0), enabled=enabled)


class Probed:
    """In the place of `probe_slot`: batches take what TRUE says."""

    def __init__(self, busy: bool = False) -> None:
        self.sizes: list[int] = []
        self.busy = busy

    def __call__(self, slot: Slot, tokens: Sequence[int], meter: Any) -> Timing:
        self.sizes.append(len(tokens))
        return Timing(float(TRUE.expected(0)[len(tokens) - 1]), self.busy)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probed:
    result = Probed()
    monkeypatch.setattr(calibration, "probe_slot", result)
    return result


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    result = [100.0]
    # Not in the module `time`: the loops of servers in other threads would sleep until their time comes again.
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: result[0]))
    return result


def idle(curve: CostCurve, policy: str = "auto") -> Calibration:
    """Be idle after a request of this policy."""
    backend = FakeBackend(n_ctx=512)
    scheduler = scheduler_of(backend)
    calibrating = make(scheduler, curve)
    scheduler.submit(sequence_of(backend, PROMPT, 5, policy=make_policy(policy, estimate())))
    while scheduler.busy:
        scheduler.step()
        calibrating.after_pass(1e-9)
    return calibrating


def test_between_steps_prices_heal_within_their_share_of_the_time(probed: Probed) -> None:
    backend = FakeBackend(n_ctx=512)
    scheduler, curve = scheduler_of(backend), estimate()
    calibrating = make(scheduler, curve)
    scheduler.submit(sequence_of(backend, PROMPT, 400, policy=Auto(estimate())))
    steps = 0
    while scheduler.busy and steps < 300:
        scheduler.step()
        curve.observe(1, 10, 10.0)
        calibrating.after_pass(0.050)  # Other work makes this pass longer, so that 300 passes are enough.
        steps += 1
    spent = sum(float(TRUE.expected(0)[n - 1]) for n in probed.sizes)
    assert 0 < spent <= 1.2 * SHARE * steps * 50.0
    assert max(probed.sizes) <= calibration.LARGEST_BETWEEN
    for n in (2, 3, 4, 6, 8, 12, 16):
        ratio = curve.expected(0)[n - 1] / curve.expected(0)[0]
        assert ratio == pytest.approx(TRUE.expected(0)[n - 1] / 10.0, rel=0.3)


def certain() -> CostCurve:
    curve = TRUE.copy()
    for _ in range(20):
        for n in SIZES:
            curve.observe(n, 0, float(TRUE.expected(0)[n - 1]))
    return curve


@pytest.mark.parametrize(
    ("curve", "policy", "shares"),
    [(certain(), "auto", True), (estimate(), "off", True), (estimate(), "auto", False)],
    ids=["all is certain", "nothing is drafted", "memory that cannot be cut back"],
)
def test_nothing_is_measured_without_need(probed: Probed, curve: CostCurve, policy: str, shares: bool) -> None:
    backend = FakeBackend(n_ctx=512)
    scheduler = scheduler_of(backend)
    calibrating = make(scheduler, curve, enabled=shares)
    scheduler.submit(sequence_of(backend, PROMPT, 20, policy=make_policy(policy, curve)))
    while scheduler.busy:
        scheduler.step()
        calibrating.after_pass(10.0)
    assert probed.sizes == []
    assert calibrating.wakes_in() is None


def test_idle_moments_measure_every_size_and_end(probed: Probed, now: list[float]) -> None:
    curve = estimate()
    calibrating = idle(curve)
    now[0] += 100.0
    while calibrating.wakes_in() == 0:
        before = len(probed.sizes)
        calibrating.use_idle_time()
        assert len(probed.sizes) - before <= 2
    assert is_certain(curve, 0)
    assert set(SIZES[1:]) & set(probed.sizes)
    assert len(probed.sizes) <= 2 * MOST_IDLE


def test_a_batch_takes_a_small_share_of_the_idle_time_before_it(probed: Probed, now: list[float]) -> None:
    curve = estimate()
    calibrating = idle(curve)
    waits = calibrating.wakes_in()
    assert waits
    assert waits >= 1.0  # That is at least a hundred plain steps of 10 ms.
    now[0] += 0.9 * waits
    assert calibrating.wakes_in() == pytest.approx(0.1 * waits)
    now[0] += 0.1 * waits
    assert calibrating.wakes_in() == 0
    calibrating.use_idle_time()
    calibrating.after_pass(0.01)  # the next request
    assert calibrating.wakes_in()


def test_without_drafting_idle_time_is_left_alone(probed: Probed, now: list[float]) -> None:
    for calibrating in (make(scheduler_of(FakeBackend(n_ctx=512)), estimate()), idle(estimate(), "off")):
        now[0] += 3600.0
        assert calibrating.wakes_in() is None
    assert probed.sizes == []


def test_a_busy_machine_is_left_alone_and_settles_nothing(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    probed = Probed(busy=True)
    monkeypatch.setattr(calibration, "probe_slot", probed)
    curve = estimate()
    calibrating = idle(curve)
    probed.sizes.clear()
    now[0] += 100.0
    while calibrating.wakes_in() == 0:
        calibrating.use_idle_time()
    assert len(probed.sizes) <= 2 * MOST_BUSY
    assert not is_certain(curve, 0)
    calibrating.after_pass(0.01)  # a request came: the next pause is looked at again
    assert calibrating.wakes_in()


@pytest.mark.parametrize("n_slots", [1, 2])
def test_a_batch_in_a_slot_leaves_its_cells_and_answers_as_they_were(n_slots: int) -> None:
    """The fake backend asserts that every token sees exactly its own text."""
    backend = FakeBackend(n_ctx=256, n_slots=n_slots)
    scheduler = scheduler_of(backend)
    sequence = sequence_of(backend, PROMPT, N)
    scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
        for slot in scheduler.slots.slots:
            before = [(cell.pos, cell.token, set(cell.ids)) for cell in backend.cells]
            assert probe_slot(slot, [1, 2, 3, 4] * 4) is not None
            assert [(cell.pos, cell.token, set(cell.ids)) for cell in backend.cells] == before
    assert sequence.result.tokens == said(PROMPT, N)


def test_no_room_and_a_decode_that_is_broken_off_cost_nothing_but_time() -> None:
    backend = FakeBackend(n_ctx=32)
    scheduler = scheduler_of(backend)
    sequence = sequence_of(backend, PROMPT, N)
    scheduler.submit(sequence)
    scheduler.step()
    slot = scheduler.slots.slots[0]
    assert probe_slot(slot, [1] * 32) is None
    for code in (1, 2, -2):
        backend.failures[backend.calls + 1] = code
        held = len(backend.cells)
        assert probe_slot(slot, [1] * 4) is None
        assert len(backend.cells) == held
    while scheduler.busy:
        scheduler.step()
    assert sequence.result.tokens == said(PROMPT, N)
