"""The counts of the scheduler, over the fake backend: time, cells, waiting sequences, predictions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.fake_backend import N_VOCAB, Draws, FakeBackend
from support.fake_sequences import ask, check_cells, prompts_of, run, said, scheduler_of, sequence_of, submit_all
from support.fake_sources import Keen, fortune
from support.prices import FLAT

from rest_local.decoding.results import Totals
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.slots import Match


class Hourly(FakeBackend):
    """Every decode takes an hour, and one in ten fails."""

    def decode(self) -> int:
        if self.calls % 10 == 9:
            self.failures[self.calls + 1] = 2
        return super().decode()


def test_what_all_requests_are_charged_is_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each that shares a pass, and what failed on the way as well."""
    backend = Hourly(n_ctx=2048, n_batch=32, n_slots=6)
    clock = SimpleNamespace(perf_counter=lambda: 3600.0 * backend.calls)
    monkeypatch.setattr("rest_local.decoding.scheduler.time", clock)
    scheduler = scheduler_of(backend)
    asked = prompts_of(12, 150)
    sequences = [sequence_of(backend, prompt, 30, sources=fortune("bush"), policy=Keen(FLAT)) for prompt in asked]
    run(scheduler, sequences)
    totals = Totals()
    for sequence in sequences:
        totals.add(sequence.statistics, len(sequence.result.tokens))
    evaluated = sum(len(prompt) - 1 for prompt in asked)
    stated = sum(sequence.statistics.prompt_tokens for sequence in sequences)
    assert totals.prompt_tokens + totals.cached_tokens == evaluated + len(asked) == stated
    assert totals.prompt_seconds > 3600 * evaluated / 32
    assert totals.predicted_seconds > 3600
    assert totals.prompt_seconds + totals.predicted_seconds == pytest.approx(3600 * backend.calls)


def test_cells_that_were_shared_are_counted_when_their_owner_has_ended() -> None:
    backend = FakeBackend(n_ctx=512, n_slots=4)
    scheduler = scheduler_of(backend)
    system = [1, 2, 3, 4] * 25
    owner = sequence_of(backend, [*system, 5], 30, ignore_end=True)
    sharers = [sequence_of(backend, [*system, n], 60) for n in (6, 7)]
    scheduler.submit(owner)
    while owner.is_prefilling or not owner.is_admitted:
        scheduler.step()
    submit_all(scheduler, sharers)
    scheduler.step()
    together = scheduler.cells_in_use()
    assert len(system) + 3 <= together < len(system) + 20  # what is shared once, not once for each
    scheduler.cancel(owner)
    scheduler.slots.evict()
    assert scheduler.cells_in_use() > len(system)
    assert scheduler.cells_in_use() == len(backend.cells) + len(sharers)
    check_cells(scheduler)


def test_a_kept_beginning_takes_cells_as_well() -> None:
    """Half of the cells are at work; the prompt that waits has most of the others already, and needs a few more."""
    backend = FakeBackend(n_ctx=200, n_slots=2)
    scheduler = scheduler_of(backend)
    ask(scheduler, [1] * 95, 1)
    first, second = sequence_of(backend, [2] * 90, 10, Draws(1)), sequence_of(backend, [*([1] * 95), *([3] * 30)], 5)
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(second)
    while not first.done:
        scheduler.step()
        assert not second.has_begun or first.done  # it would only be sent back
    run(scheduler, [])
    assert second.statistics.cached_tokens >= 95
    assert second.result.tokens == said([*([1] * 95), *([3] * 30)], 5)


def test_a_waiting_sequence_is_not_compared_with_every_slot_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(n_ctx=160, n_slots=3)
    scheduler = scheduler_of(backend)
    compared = []
    match = scheduler.slots.match

    def counted(prompt: list[int], keep: bool, user: str) -> Match:
        compared.append(len(prompt))
        return match(prompt, keep, user)

    monkeypatch.setattr(scheduler.slots, "match", counted)
    first, second = sequence_of(backend, [1] * 60, 60, Draws(1)), sequence_of(backend, [2] * 110, 5)
    for sequence in (first, second):
        scheduler.submit(sequence)
    while not first.done:
        scheduler.step()
        assert not second.is_admitted or first.done
    assert len(first.result.tokens) > 20
    assert len(compared) <= 3
    run(scheduler, [])
    assert second.result.tokens == said([2] * 110, 5)


@pytest.mark.parametrize("paused", [False, True])
def test_text_from_disk_counts_as_cached_where_the_prompt_began_only(paused: bool) -> None:
    """After a pause it is text that was evaluated before."""
    backend = FakeBackend(n_slots=2)
    slots = scheduler_of(backend).slots.slots
    sequence = sequence_of(backend, [1] * 40, 5)
    sequence.admit(slots[0])
    if paused:
        assert sequence.release() is slots[0]
        sequence.admit(slots[1])
    sequence.slot.n_past = 10
    sequence._note_restored(1000.0)
    sequence._note_restored(0.0)
    statistics = sequence.statistics
    assert statistics.cached_tokens == (0 if paused else 10)
    assert (statistics.prompt_ms > 1e6) != paused


def test_a_sequence_without_a_slot_has_no_text_in_a_draft_model() -> None:
    """It would be asked about cells of the next request there."""
    backend = FakeBackend()
    scheduler = scheduler_of(backend)
    slot = scheduler.slots.slots[0]
    text = SimpleNamespace(restart=lambda tokens, n: None, rewind=lambda n: None)
    slot.draft_text = text  # type: ignore[assignment]
    sequence = sequence_of(backend, [1] * 10, 5)
    sequence.admit(slot)
    assert sequence.sources.draft_text is text
    sequence.release()
    assert sequence.sources.draft_text is None


def test_a_context_shift_goes_on_following_the_prediction() -> None:
    prompt = [7, 8, 9, *([1, 2] * 10)]
    told = []
    for expected in ([], None):
        backend = FakeBackend(n_ctx=64)
        sequence = sequence_of(
            backend, prompt, 200, Draws(2), Sources([], N_VOCAB), Keen(FLAT),
            context_shift=True, keep_tokens=3, prediction=told[0].result.tokens if expected is None else expected,
        )  # fmt: skip
        run(scheduler_of(backend), [sequence])
        assert sequence.result.truncated
        told.append(sequence)
    without, with_it = told
    assert with_it.result.tokens == without.result.tokens
    n_said = len(with_it.result.tokens)
    assert n_said == 200
    assert with_it.statistics.by_source["prediction"]["accepted"] > 0.8 * n_said
