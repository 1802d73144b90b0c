"""What goes wrong with one of many, or takes too long, over the fake backend: the others get their answers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fake_backend import N_VOCAB, FakeBackend, Greedy, Recurrent
from support.fake_sequences import ask, check_cells, check_said, run, said, scheduler_of, sequence_of
from support.fake_sources import Keen, fortune
from support.prices import FLAT

from rest_local.decoding.core import RequestState
from rest_local.decoding.forward import ABORTED
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import Growth
from rest_local.errors import GenerationError
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.planning.auto import Auto
from rest_local.planning.plan import StepOverhead


def test_a_request_sent_back_while_each_is_tried_by_itself_loses_no_tokens() -> None:
    """The pass fails for both together, then for the first alone for want of cells: the second goes back to the queue
    and must not be evaluated in a slot that it has no more.
    """
    for refused in range(2, 9):
        backend = FakeBackend(n_ctx=256, n_slots=2)
        scheduler = scheduler_of(backend)
        asked = [[3] * 20, [4] * 30]
        sequences = [sequence_of(backend, prompt, 8) for prompt in asked]
        backend.failures = {1: -2, 2: -2, refused: 1}
        run(scheduler, sequences)
        check_said(asked, sequences, 8)


@pytest.mark.parametrize("n_batch", [1, 2, 3])
def test_more_slots_than_a_batch_has_places_wait_for_each_other(n_batch: int) -> None:
    backend = FakeBackend(n_ctx=256, n_batch=n_batch, n_slots=6)
    asked = [[n] for n in range(6)]  # nothing to evaluate before they generate
    sequences = [sequence_of(backend, prompt, 10, sources=fortune("bush"), policy=Keen(FLAT)) for prompt in asked]
    run(scheduler_of(backend), sequences)
    check_said(asked, sequences, 10)


def test_idle_slots_go_before_drafts_do() -> None:
    backend = FakeBackend(n_ctx=64, n_slots=2)
    scheduler = scheduler_of(backend)
    ask(scheduler, [1] * 40, 2)
    sequence = sequence_of(backend, [2] * 15, 12, sources=fortune("deep"), policy=Keen(FLAT))
    calls = backend.calls
    run(scheduler, [sequence])
    assert sum(slot.n_past for slot in scheduler.slots.slots) < 40
    statistics = sequence.statistics
    assert backend.calls - calls <= 1 + statistics.steps + 1  # one was refused, and done again as it was
    assert sequence.result.tokens == said([2] * 15, 12)


BREAKS: dict[str, Callable[[RequestState], tuple[object, str]]] = {
    "draft": lambda sequence: (sequence.speculation.policy, "draft"),
    "prune": lambda sequence: (sequence.speculation, "prune"),
    "choose": lambda sequence: (sequence.speculation.verifier.sampler, "sample"),
    "learn": lambda sequence: (sequence.speculation.policy, "learn"),
    "checkpoint": lambda sequence: (sequence.text.slot.checkpoints, "keep"),
    "tell": lambda sequence: (sequence.answer, "take"),
    "end": lambda sequence: (sequence.speculation.verifier.sampler, "close"),
}


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("place", ["admit", *BREAKS])
def test_an_unexpected_fault_ends_only_its_own_request(
    place: str, call: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The n-th call fails. The fault is told and logged, the others get their answers, the cells stay in order."""
    backend = FakeBackend(n_ctx=512, n_batch=16, n_slots=3)
    scheduler = scheduler_of(backend)
    asked = [[n] * 40 for n in range(6)]
    calls, sources = [], fortune("bush")

    def breaking(slot: Slot) -> Lookup:
        where, name = (sources, "restart") if place == "admit" else BREAKS[place](sequences[1])
        whole = getattr(where, name)

        def breaks(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == call:
                raise MemoryError("none is left")
            return whole(*arguments, **options)

        monkeypatch.setattr(where, name, breaks)
        return sources

    sequences = [
        sequence_of(backend, prompt, 12, None, fortune("bush"), Keen(FLAT), connect=breaking if n == 1 else None)
        for n, prompt in enumerate(asked)
    ]
    run(scheduler, sequences)
    for n, (prompt, sequence) in enumerate(zip(asked, sequences, strict=True)):
        if n != 1:
            assert (sequence.error, sequence.result.tokens) == (None, said(prompt, 12))
    broken = sequences[1]
    assert said(asked[1], 12)[: len(broken.result.tokens)] == broken.result.tokens
    if len(calls) < call:  # what is done once for each request
        assert place in ("admit", "end")
        return
    assert isinstance(broken.error, GenerationError)
    assert isinstance(broken.error.__cause__, MemoryError)
    assert broken.result.finish_reason == "error"
    assert "none is left" in caplog.text
    monkeypatch.undo()
    again = [sequence_of(backend, prompt, 12) for prompt in asked]
    run(scheduler, again)
    assert [sequence.result.tokens for sequence in again] == [said(prompt, 12) for prompt in asked]


@pytest.mark.parametrize(("error", "kept"), [(MemoryError("none is left"), 0), (GenerationError("expected"), 20)])
def test_the_cells_of_a_request_that_failed_unexpectedly_are_given_up(
    error: Exception, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known what they hold. An error that was expected leaves them as they are."""
    backend = FakeBackend()
    scheduler = scheduler_of(backend)
    sequence = sequence_of(backend, [1] * 20, 5)

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(sequence.answer, "receive", fails)
    run(scheduler, [sequence])
    assert sequence.result.finish_reason == "error"
    assert scheduler.slots.slots[0].n_past == len(backend.cells) == kept


@pytest.mark.parametrize("waits", [True, False])
def test_recurrent_state_of_a_pass_that_was_broken_off_is_not_trusted(waits: bool) -> None:
    """The pass may not be done again, because its owner has left, and the next request shares the beginning."""
    backend = Recurrent()
    scheduler = scheduler_of(backend, capability=Capability("chain", "fake", 16, shares=False))
    sequence = sequence_of(backend, [1, 2, 3] * 7, 12)
    scheduler.submit(sequence)
    while len(sequence.text.tokens) < 24:
        scheduler.step()
    assert backend.restored == []
    backend.failures[backend.calls + 1] = ABORTED
    if not waits:
        sequence.leave()
    scheduler.step()
    assert backend.restored == [20]
    assert backend.is_right()
    if not waits:
        assert sequence.text.slot.n_past == 20
    run(scheduler, [])
    assert sequence.result.tokens == said([1, 2, 3] * 7, 12)


class Interrupted(Greedy):
    """Ctrl-C while its n-th token is chosen."""

    def __init__(self, n: int) -> None:
        self._left = n

    def sample(self, logits: np.ndarray) -> int:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return super().sample(logits)


def test_an_interrupt_between_two_sequences_makes_no_answer_wrong() -> None:
    """The first has chosen a token that was not delivered: it cannot go on, because its sampler cannot go back."""
    backend = FakeBackend(n_slots=3)
    scheduler = scheduler_of(backend)
    asked = [[1, 2], [3, 4], [5, 6]]
    sequences = [sequence_of(backend, p, 20, Interrupted(4) if p == [3, 4] else None) for p in asked]
    with pytest.raises(KeyboardInterrupt):
        run(scheduler, sequences)
    check_cells(scheduler)
    run(scheduler, [])
    for prompt, sequence in zip(asked, sequences, strict=True):
        truth = said(prompt, 20)
        assert sequence.result.tokens == truth[: len(sequence.result.tokens)]
        assert sequence.result.finish_reason == "cancelled" or sequence.result.tokens == truth


class Stubborn(FakeBackend):
    """Refuses to cut back a tail now and then, and has one block of logits, which every decode writes over."""

    def __init__(self, *arguments: int, **named: int) -> None:
        super().__init__(*arguments, **named)
        self.removals = 0
        self.block = np.zeros((64, N_VOCAB), np.float32)

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        self.removals += p0 > 0
        return not (p0 > 0 and self.removals % 20 == 0) and super().remove(seq, p0, p1)

    def logits(self, n_outputs: int) -> np.ndarray:
        self.block[:n_outputs] = super().logits(n_outputs)
        return self.block[:n_outputs]

    def decode(self) -> int:
        self.block[:] = np.nan
        return super().decode()


def test_a_pass_that_was_broken_off_costs_that_pass_only() -> None:
    """What was evaluated before stays: an abort that was meant for another must not evaluate a long text again."""
    backend = FakeBackend(n_ctx=1024, n_batch=64, n_slots=2)
    scheduler = scheduler_of(backend)
    asked = [[1] * 300, [2] * 300]
    sequences = [sequence_of(backend, prompt, 20) for prompt in asked]
    backend.failures = dict.fromkeys((3, 8, 20, 24), 2)
    run(scheduler, sequences)
    check_said(asked, sequences, 20)
    assert not backend.failures
    assert backend.evaluated <= 2 * (299 + 20)


def test_cells_that_cannot_be_cut_back_do_not_change_other_answers() -> None:
    backend = Stubborn(n_ctx=1024, n_slots=3)
    asked = [[1, 2], [3, 4], [5, 6]]
    sequences = [sequence_of(backend, prompt, 60, None, fortune("bush"), Keen(FLAT)) for prompt in asked]
    run(scheduler_of(backend), sequences)
    check_said(asked, sequences, 60)
    assert backend.removals > 100


def test_a_fault_while_trees_grow_together_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of all requests grow in one loop; below the root more is read, and a draft model asked."""
    monkeypatch.setattr(Acceptance, "estimate", lambda self, cell: 0.9)
    monkeypatch.setattr(TokenCalibrator, "calibrate", lambda self, bigram, candidates: [])
    backend = FakeBackend(n_ctx=512, n_slots=3)
    asked = [[n] * 40 for n in range(3)]
    sequences = [sequence_of(backend, prompt, 12, None, fortune("deep"), Keen(FLAT)) for prompt in asked]
    grow, grown = Growth.grow, []

    def breaks(self: Growth) -> None:
        grown.append(self)
        if self is sequences[1].speculation.drafted.growth:
            raise IndexError("no such row")
        grow(self)

    monkeypatch.setattr(Growth, "grow", breaks)
    run(scheduler_of(backend), sequences)
    assert len(grown) > 5
    assert isinstance(sequences[1].error, GenerationError)
    for n in (0, 2):
        assert (sequences[n].error, sequences[n].result.tokens) == (None, said(asked[n], 12))


class Silenced:
    """A draft sequence that must not be queried. Its times are those of an aborted pass."""

    step_ms = query_ms = 1000.0
    can_ask = False

    def begin_step(self) -> None:
        self.step_ms = self.query_ms = 0.0


def test_what_a_pass_that_broke_off_took_is_not_booked_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative milliseconds made every price worse from step to step, for as long as the engine lived."""
    backend = FakeBackend(n_ctx=512)
    sources, policy = fortune("deep"), Auto(FLAT)
    monkeypatch.setattr(sources, "draft_text", Silenced(), raising=False)
    sequence = ask(scheduler_of(backend), [3] * 40, 30, None, sources, policy)
    assert sequence.result.tokens == said([3] * 40, 30)
    assert 0.0 < policy.shared.driver.lookup < 10.0
    assert 0.0 < policy.shared.driver.step < 10.0
    assert sequence.statistics.model_ms == 0.0


def test_no_clock_makes_a_price_negative() -> None:
    driver = StepOverhead()
    for _ in range(100):
        driver.learn_lookup(-15.0)
        driver.learn_step(0, -15.0)
        driver.learn_step(8, -15.0)
    assert min(driver.lookup, driver.step, driver.tree) > 0.0
