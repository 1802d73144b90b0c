"""Slots and cells between clients: equal shares of the slots, and nothing of another user in the cells."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_backend import END, Draws, FakeBackend
from support.fake_sequences import ask, check_cells, prompts_of, run, said, scheduler_of, sequence_of, submit_all
from support.fake_sources import Keen, fortune
from support.prices import FLAT, FixedCurve

from rest_local.calibration.cost import CostCurve
from rest_local.decoding import scheduler as scheduling
from rest_local.decoding.core import RequestState, Slot
from rest_local.decoding.results import Totals
from rest_local.decoding.scheduler import Scheduler
from rest_local.kv_cache.slots import Match

SLOPE = FixedCurve.from_points([0, 1000], [1, 64], [[10.0, 73.0], [20.0, 83.0]])  # a token of a prompt takes 1 ms
TEXTS = [[n % END, *range(7)] for n in range(40)]


class Clock:
    """What the scheduler takes for the time, in seconds."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def of(backend: FakeBackend, client: str, prompt: list[int], n: int = 6) -> RequestState:
    return sequence_of(backend, prompt, n, client=client)


def submit(scheduler: Scheduler, backend: FakeBackend, clients: str, begin: int = 0) -> list[RequestState]:
    """Submit one request of each of these clients, in this order."""
    sequences = [of(backend, client, TEXTS[begin + n]) for n, client in enumerate(clients)]
    submit_all(scheduler, sequences)
    return sequences


def order(scheduler: Scheduler, sequences: list[RequestState]) -> str:
    """Return the clients in the order in which their requests got slots."""
    found: list[RequestState] = []
    for _ in range(1000):
        found += [each for each in scheduler.queue.admitted if each not in found]
        if not scheduler.busy:
            break
        scheduler.step()
        found += [each for each in sequences if each.speculation.sources is not None and each not in found]
    assert all(each.done for each in sequences)
    return "".join(each.request.client for each in found)


def test_clients_take_turns() -> None:
    """They do so too with one slot, which each of them has had."""
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    assert order(scheduler, submit(scheduler, backend, "aaaabbc")) == "abcabaa"


def test_a_client_that_comes_later_has_its_turn_in_the_next_round() -> None:
    """Otherwise clients that come and go would keep the others waiting."""
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    first = submit(scheduler, backend, "aaaabb")
    scheduler.step()
    assert order(scheduler, [*first, *submit(scheduler, backend, "c", 10)]) == "ababcaa"


def test_a_free_slot_goes_to_the_client_that_has_the_fewest() -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    scheduler = scheduler_of(backend, SLOPE)
    submit(scheduler, backend, "a" * 12)
    scheduler.step()
    late = submit(scheduler, backend, "bb", 20)
    assert Counter(each.request.client for each in scheduler.queue.admitted) == {"a": 4}
    while not late[1].speculation.sources:
        scheduler.step()
        held = Counter(each.request.client for each in scheduler.queue.admitted)
        assert held["b"] == 2 or held["a"] + held["b"] <= 4
    assert len([each for each in scheduler.queue.waiting if each.request.client == "a"]) >= 6


def test_a_client_that_holds_a_slot_comes_after_one_that_has_none() -> None:
    """It came first, and is not served more often."""
    backend = FakeBackend(n_ctx=1024, n_slots=2)
    scheduler = scheduler_of(backend, SLOPE)
    long, short = of(backend, "a", TEXTS[0], 60), of(backend, "a", TEXTS[1], 3)
    scheduler.submit(long)
    scheduler.submit(short)
    scheduler.step()
    next_of_a, first_of_b = of(backend, "a", TEXTS[2]), of(backend, "b", TEXTS[3])
    scheduler.submit(next_of_a)
    scheduler.submit(first_of_b)
    while not short.done:
        scheduler.step()
    scheduler.step()
    assert scheduler.queue.admitted == [long, first_of_b]


def test_rounds_of_clients_that_are_gone_are_forgotten() -> None:
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    for n in range(30):
        run(scheduler, [of(backend, f"client {n}", TEXTS[n], 1)])
    assert len(scheduler.queue._last_rounds) <= 1


def test_users_share_no_cells() -> None:
    """They share neither a text that is kept, nor one that is being answered."""
    backend = FakeBackend(n_ctx=2048, n_slots=4)
    scheduler = scheduler_of(backend)
    text = prompts_of(1, 200)[0] * 3

    def cached(owner: str, *, keep: bool = True) -> int:
        sequence = ask(scheduler, [*text, 1], 3, owner=owner, keep_prefix=keep)
        assert sequence.result.tokens == said([*text, 1], 3)
        return sequence.statistics.cached_tokens

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") == cached("two") == len(text)
    assert cached("three", keep=False) == 0
    assert cached("four") == 0, "of a text that is not kept for later requests either"
    assert cached("") == 0


def test_a_user_does_not_wait_for_a_prompt_of_another_that_begins_alike() -> None:
    """There is nothing to share, and the wait would give the other prompt away."""
    backend = FakeBackend(n_ctx=2048, n_slots=4)
    scheduler = scheduler_of(backend)
    text = prompts_of(1, 200)[0] * 3
    sequences = [sequence_of(backend, [*text, n], 5, owner=owner) for n, owner in enumerate(("one", "two", "one"))]
    submit_all(scheduler, sequences)
    scheduler.step()
    assert scheduler.queue.admitted == sequences[:2]
    while not all(sequence.done for sequence in sequences):
        scheduler.step()
        check_cells(scheduler)
    assert [sequence.statistics.cached_tokens for sequence in sequences] == [0, 0, len(text)]


# ---- The counts of the scheduler -----------------------------------------------------------------------------------


class Hourly(FakeBackend):
    """Every decode takes an hour, and one in ten fails."""

    def decode(self) -> int:
        if self.calls % 10 == 9:
            self.failures[self.calls + 1] = 2
        return super().decode()


def test_what_all_requests_are_charged_is_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared pass counts once, and what failed on the way counts as well."""
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
    while owner.text.is_prefilling or not owner.text.has_slot:
        scheduler.step()
    submit_all(scheduler, sharers)
    scheduler.step()
    together = scheduler.queue.cells_in_use()
    assert len(system) + 3 <= together < len(system) + 20  # what is shared once, not once for each
    scheduler.cancel(owner)
    scheduler.slots.evict()
    assert scheduler.queue.cells_in_use() > len(system)
    assert scheduler.queue.cells_in_use() == len(backend.cells) + len(sharers)
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
        assert second.speculation.sources is None or first.done  # it would only be sent back
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
        assert not second.text.has_slot or first.done
    assert len(first.result.tokens) > 20
    assert len(compared) <= 3
    run(scheduler, [])
    assert second.result.tokens == said([2] * 110, 5)


def test_a_sequence_without_a_slot_has_no_text_in_a_draft_model() -> None:
    """It would be asked about cells of the next request there."""
    backend = FakeBackend()
    scheduler = scheduler_of(backend)
    slot = scheduler.slots.slots[0]
    text = SimpleNamespace(restart=lambda tokens, n: None, rewind=lambda n: None)
    slot.draft_text = text  # type: ignore[assignment]
    sequence = sequence_of(backend, [1] * 10, 5)
    scheduler.submit(sequence)
    scheduler.step()
    assert sequence.text.is_in(slot)
    sources = sequence.speculation.sources
    assert sources is not None
    assert sources.draft_text is text
    scheduler.cancel(sequence)
    assert sources.draft_text is None


class TenTokens:
    """Puts ten tokens into a slot, five at a time."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def advance(self, seconds: float, patient: bool) -> bool:
        self._slot.n_past += 5
        return self._slot.n_past == 10

    def end(self) -> None: ...


@pytest.mark.parametrize("paused", [False, True])
def test_text_from_disk_counts_as_cached_where_the_prompt_began_only(
    paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause it counts as text that was evaluated before."""
    backend = FakeBackend(n_slots=2)
    slots = scheduler_of(backend).slots
    first, second = slots.slots
    sequence = sequence_of(backend, [1] * 40, 5)
    if paused:
        sequence.admit(first)
        assert sequence.text.leave() is first
    monkeypatch.setattr("rest_local.decoding.text.begin_restoring", lambda slots, slot: TenTokens(slot))
    sequence.admit(second, slots)
    statistics, before = sequence.statistics, sequence.statistics.prompt_ms
    while sequence.text.is_restoring:
        sequence.restore(1.0, patient=True)
    assert statistics.cached_tokens == (0 if paused else 10)
    assert (statistics.prompt_ms == before) == paused


class Timed(FakeBackend):
    """Takes 10 ms for each token, and notes how many there were."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self._clock, self.sizes = clock, list[int]()

    def decode(self) -> int:
        self._clock.now += 0.010 * self.batch.n_tokens
        self.sizes.append(self.batch.n_tokens)
        return super().decode()


@pytest.mark.parametrize("per_token_ms", [0.001, 1000.0])
def test_parts_of_prompts_go_by_the_speed_of_the_newest_whatever_the_curve_says(
    clock: Clock, per_token_ms: float
) -> None:
    backend = Timed(clock, n_ctx=2048, n_batch=128, n_slots=2)
    scheduler = scheduler_of(backend, CostCurve.from_points([0], [1, 64], [[per_token_ms, 64 * per_token_ms]]))
    scheduler.prefill.stall_ms = 400.0
    scheduler.submit(sequence_of(backend, [1, 2, 3], 100))
    scheduler.step()
    scheduler.step()
    begun = len(backend.sizes)
    long = sequence_of(backend, [5] * 600, 5)
    scheduler.submit(long)
    while not long.answer.begun:
        scheduler.step()
    parts = backend.sizes[begun + 2 : -2]  # the first goes by the curve, the last has what is left
    assert parts
    assert all(40 <= size <= 42 for size in parts), parts  # 400 ms, and the one that generates
