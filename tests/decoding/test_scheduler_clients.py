"""Slots and cells between clients: equal shares of the slots, and nothing of another user in the cells."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_backend import END, FakeBackend
from support.fake_sequences import ask, check_cells, prompts_of, run, said, scheduler_of, sequence_of, submit_all
from support.prices import FixedCurve

from rest_local.decoding import scheduler as scheduling
from rest_local.decoding.request_state import RequestState
from rest_local.decoding.scheduler import Scheduler

SLOPE = FixedCurve.from_points([0, 1000], [1, 64], [[10.0, 73.0], [20.0, 83.0]])  # a token of a prompt takes 1 ms
TEXTS = [[n % END, *range(7)] for n in range(40)]


class Clock:
    """What the scheduler takes for the time, in seconds."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(**{**vars(time), "perf_counter": lambda: clock.now}))
    return clock


def of(backend: FakeBackend, client: str, prompt: list[int], n: int = 6, **options: Any) -> RequestState:
    sequence = sequence_of(backend, prompt, n, client=client, **options)
    sequence.submitted = 0.0
    return sequence


def submit(scheduler: Scheduler, backend: FakeBackend, clients: str, begin: int = 0) -> list[RequestState]:
    """One request of each of these clients, in this order."""
    sequences = [of(backend, client, TEXTS[begin + n]) for n, client in enumerate(clients)]
    submit_all(scheduler, sequences)
    return sequences


def order(scheduler: Scheduler, sequences: list[RequestState]) -> str:
    """The clients in the order in which their requests got slots."""
    found: list[RequestState] = []
    for _ in range(1000):
        found += [each for each in scheduler.admitted if each not in found]
        if not scheduler.busy:
            break
        scheduler.step()
        found += [each for each in sequences if each.has_begun and each not in found]
    assert all(each.done for each in sequences)
    return "".join(each.request.client for each in found)


@pytest.mark.usefixtures("clock")
def test_clients_take_turns() -> None:
    """Also where there is one slot, which each of them has had."""
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    assert order(scheduler, submit(scheduler, backend, "aaaabbc")) == "abcabaa"


@pytest.mark.usefixtures("clock")
def test_a_client_that_comes_later_has_its_turn_in_the_next_round() -> None:
    """After those that have theirs then: clients that come and go would keep the others waiting otherwise."""
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    first = submit(scheduler, backend, "aaaabb")
    scheduler.step()
    assert order(scheduler, [*first, *submit(scheduler, backend, "c", 10)]) == "ababcaa"


@pytest.mark.usefixtures("clock")
def test_a_free_slot_goes_to_the_client_that_has_the_fewest() -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    scheduler = scheduler_of(backend, SLOPE)
    submit(scheduler, backend, "a" * 12)
    scheduler.step()
    late = submit(scheduler, backend, "bb", 20)
    assert Counter(each.request.client for each in scheduler.admitted) == {"a": 4}
    while not late[1].has_begun:
        scheduler.step()
        held = Counter(each.request.client for each in scheduler.admitted)
        assert held["b"] == 2 or held["a"] + held["b"] <= 4
    assert len([each for each in scheduler.waiting if each.request.client == "a"]) >= 6


@pytest.mark.usefixtures("clock")
def test_a_client_that_holds_a_slot_comes_after_one_that_has_none() -> None:
    """Although it came first, and is not served more often."""
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
    assert scheduler.admitted == [long, first_of_b]


@pytest.mark.parametrize("background", [False, True])
def test_no_slot_is_given_up_for_a_client_that_has_one(clock: Clock, background: bool) -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=3)
    scheduler = scheduler_of(backend, SLOPE)
    many = [of(backend, "a", TEXTS[n], 60, background=background) for n in range(3)]
    few = [of(backend, "b", TEXTS[n], 60, background=background) for n in range(3, 6)]
    submit_all(scheduler, many)
    scheduler.step()
    submit_all(scheduler, few)
    clock.now = 1000.0
    for _ in range(5):
        scheduler.step()
        assert scheduler.admitted == [*many[:2], few[0]]


@pytest.mark.usefixtures("clock")
def test_rounds_of_clients_that_are_gone_are_forgotten() -> None:
    backend = FakeBackend(n_ctx=256)
    scheduler = scheduler_of(backend, SLOPE)
    for n in range(30):
        run(scheduler, [of(backend, f"client {n}", TEXTS[n], 1)])
    assert len(scheduler._rounds) <= 1


def test_a_client_without_a_slot_gets_one_of_another_that_has_several(clock: Clock) -> None:
    """Once it has waited as long as the text that gives way takes to be evaluated again; the answers stay."""
    backend = FakeBackend(n_ctx=1024, n_slots=2)
    scheduler = scheduler_of(backend, SLOPE)
    texts = [[1] * 50, [2] * 40, [3] * 10, [4] * 10]
    many = [of(backend, "a", texts[0], 60), of(backend, "a", texts[1], 60)]
    few = [of(backend, "b", texts[2], 30), of(backend, "b", texts[3], 30)]
    submit_all(scheduler, many)
    scheduler.step()
    scheduler.step()
    scheduler._part_ms = 1.0
    submit_all(scheduler, few)
    clock.now = 0.035
    scheduler.step()
    assert scheduler.admitted == many, "its 40 tokens take longer than that"
    clock.now = 0.045
    scheduler.step()
    assert scheduler.admitted == [many[0], few[0]]
    assert list(scheduler.waiting) == [many[1], few[1]]
    clock.now = 1000.0
    scheduler.step()
    assert scheduler.admitted == [many[0], few[0]], "each has its share"
    run(scheduler, [])
    for text, sequence in zip(texts, [*many, *few], strict=True):
        assert sequence.result.tokens == said(text, len(sequence.result.tokens))
        assert sequence.result.finish_reason == "length"


def test_no_slot_is_given_up_for_a_text_that_has_no_room(clock: Clock) -> None:
    backend = FakeBackend(n_ctx=128, n_slots=2)
    scheduler = scheduler_of(backend, SLOPE)
    many = [of(backend, "a", [1] * 40, 40), of(backend, "a", [2] * 10, 40)]
    submit_all(scheduler, many)
    scheduler.step()
    clock.now = 1000.0
    large = of(backend, "b", [3] * 100, 5)
    scheduler.submit(large)
    scheduler.step()
    assert scheduler.admitted == many
    run(scheduler, [])
    assert large.result.tokens == said([3] * 100, 5)


def test_users_share_no_cells() -> None:
    """Not those of a text that is kept, nor those of one that is being answered."""
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
    """There is nothing to share; and the wait would tell."""
    backend = FakeBackend(n_ctx=2048, n_slots=4)
    scheduler = scheduler_of(backend)
    text = prompts_of(1, 200)[0] * 3
    sequences = [sequence_of(backend, [*text, n], 5, owner=owner) for n, owner in enumerate(("one", "two", "one"))]
    submit_all(scheduler, sequences)
    scheduler.step()
    assert scheduler.admitted == sequences[:2]
    while not all(sequence.done for sequence in sequences):
        scheduler.step()
        check_cells(scheduler)
    assert [sequence.statistics.cached_tokens for sequence in sequences] == [0, 0, len(text)]
