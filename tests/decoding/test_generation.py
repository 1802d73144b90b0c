"""The step loop over the fake backend, whose arithmetic is exact: output never depends on what is drafted."""

from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_backend import END, N_VOCAB, Draws, FakeBackend, Greedy, logits_of, plain
from support.fake_sequences import TREE, Alone
from support.fake_sources import SHAPES, Fortune, Keen, fortune
from support.prices import FLAT

from rest_local.decoding.core import Pass
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import Draft, DraftTree
from rest_local.errors import PromptEmpty, PromptTooLong
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.planning.policy import StepContext, StepCost

PROMPTS = 8


def generation(
    backend: FakeBackend, sources: Fortune, chooser: Greedy | Draws, kind: Capability = TREE, slot: Slot | None = None
) -> Alone:
    return Alone(backend, slot or Slot(backend), Keen(FLAT), sources, chooser, kind, lambda token: token == END)


def run(generation: Alone, prompt: Sequence[int], n: int) -> list[int]:
    generation.evaluate(prompt)
    out: list[int] = []
    while len(out) < n and (not out or out[-1] != END) and generation.room:
        out += generation.step(n - len(out)).tokens
    return out


def prompts(n: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(0)
    for _ in range(n):
        yield rng.integers(0, END, int(rng.integers(1, 40))).tolist()


def test_sampled_frequencies_are_the_models_own() -> None:
    """Chi-square over 1 500 drafted draws of one position; 23 degrees of freedom, 0.999 quantile 49.7."""
    counts = np.zeros(N_VOCAB)
    backend, chooser = FakeBackend(), Draws(9)
    sources = Fortune(6, 8, 2, 0.7)
    task = generation(backend, sources, chooser)
    task.evaluate([3, 1, 4])
    for _ in range(1_500):
        counts[task.step(2).tokens[0]] += 1
        task.slot.rewind(2)
        del task.sequence.text.tokens[3:]
        sources.restart([3, 1, 4])
    row = logits_of([3, 1, 4]).astype(np.float64)
    expected = 1_500 * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    usual = expected >= 5
    observed = np.append(counts[usual], counts[~usual].sum())
    wanted = np.append(expected[usual], expected[~usual].sum())
    keep = wanted > 0
    assert (((observed - wanted)[keep] ** 2) / wanted[keep]).sum() < 49.7
    assert task.statistics.accepted > 75


class WithoutCoupledIds(FakeBackend):
    """Refuses a token of several ids from some call on, as llama.cpp does where a sliding window made them differ."""

    refuses_from = 4

    def decode(self) -> int:
        n = self.batch.n_tokens
        if self.calls + 1 >= self.refuses_from and (self.batch.n_ids[:n] > 1).any():
            self.calls += 1
            return -1
        return super().decode()


@pytest.mark.parametrize("first", range(1, 9))
def test_a_step_whose_ids_are_refused_is_decoded_with_one_id(first: int) -> None:
    prompt = [1, 2, 3, 4, 5]
    backend = WithoutCoupledIds(n_batch=16)
    backend.refuses_from = first
    task = generation(backend, Fortune(first, 6, 4, 0.6), Greedy())
    assert run(task, prompt, 30) == plain(prompt, Greedy(), 30)


@pytest.mark.parametrize("call", range(1, 14))
def test_an_interrupt_rewinds_to_the_committed_tokens(call: int) -> None:
    backend = FakeBackend(n_batch=8)
    backend.failures = {call: KeyboardInterrupt()}
    prompt = list(range(1, 21))
    task = generation(backend, Fortune(call, 6, 4, 0.6), Greedy())
    with pytest.raises(KeyboardInterrupt):
        run(task, prompt, 200)
    assert sorted(c.pos for c in backend.cells) == list(range(task.slot.n_past))
    assert all(0 in c.ids for c in backend.cells)
    task.chooser = Greedy()
    assert run(task, prompt, 30) == plain(prompt, Greedy(), 30)


def test_a_draft_is_never_longer_than_the_room_in_the_context() -> None:
    """The policy is told so before it looks anything up, and the tree fits without being cut afterwards."""
    limits: list[tuple[int, int]] = []

    class Watched(Keen):
        def draft(self, sources: Any, context: StepContext) -> Any:
            limits.append((context.limit, task.room))
            return super().draft(sources, context)

    backend = FakeBackend(n_ctx=48)
    task = Alone(
        backend, Slot(backend), Watched(FLAT), Fortune(1, 20, 2, 1.0), Greedy(), TREE, lambda token: token == END
    )
    task.evaluate(list(range(1, 11)))
    while task.room > 1:
        task.sequence.answer.left = 1000
        task.forward.draft(Pass([task.sequence]))
        assert len(task.sequence.speculation.tree) < task.room
        task.sequence.text.extend([0])  # One more token seems to be committed.
        task.slot.n_past += 1
    assert all(limit <= room - 1 for limit, room in limits)
    assert min(limit for limit, _ in limits) <= 1


def test_generation_runs_to_the_last_cell_of_a_small_context() -> None:
    for shape in SHAPES:
        task = generation(FakeBackend(n_ctx=64), fortune(shape), Greedy())
        prompt = [5, 6, 7]
        out = run(task, prompt, 1000)
        assert out == plain(prompt, Greedy(), len(out))
        assert out[-1] == END or len(prompt) + len(out) == 64 + 1


def test_prompts_that_do_not_fit_are_refused_with_both_numbers() -> None:
    task = generation(FakeBackend(n_ctx=64), fortune("tree"), Greedy())
    with pytest.raises(PromptTooLong, match=r"64 tokens and the context holds 64"):
        task.evaluate([1] * 64)
    with pytest.raises(PromptEmpty):
        task.evaluate([])
    assert run(task, [1] * 63, 10) == plain([1] * 63, Greedy(), 2)[:2]


def test_a_model_that_cannot_roll_back_starts_over() -> None:
    backend = FakeBackend(n_branches=1, removable=False)
    none = Capability("none", "fake")
    slot = Slot(backend)
    for prompt in ([1, 2, 3, 4], [1, 2, 9, 9, 9], [1, 2, 9, 9, 9, 4]):
        task = Alone(backend, slot, Keen(FLAT), fortune("tree"), Greedy(), none, lambda token: token == END)
        assert run(task, prompt, 20) == plain(prompt, Greedy(), 20)
        assert task.statistics.drafted == 0


@pytest.mark.parametrize("n_branches", [1, 8])
def test_chains_are_as_long_as_the_state_can_roll_back(n_branches: int) -> None:
    chain = Capability("chain", "fake", longest=3)
    widths: list[int] = []

    class Watching(FakeBackend):
        def decode(self) -> int:
            widths.append(self.batch.n_tokens)
            return super().decode()

    task = generation(Watching(n_branches=n_branches), fortune("deep"), Greedy(), chain)
    prompt = [4, 4, 2]
    assert run(task, prompt, 60) == plain(prompt, Greedy(), 60)
    assert max(widths) == 4


def test_uncommitted_cells_are_dropped_by_the_next_request() -> None:
    """An interrupt between a decode and its bookkeeping leaves such cells."""
    backend = FakeBackend()
    task = generation(backend, fortune("tree"), Greedy())
    prompt = [1, 2, 3, 4, 5, 6]
    run(task, prompt, 5)
    n_past = task.slot.n_past
    backend.batch.fill([9, 9], [n_past, n_past + 1], 0, 1, 0)
    assert backend.decode() == 0
    longer = [*task.slot.tokens, 7, 8]
    again = generation(backend, fortune("tree"), Greedy(), slot=task.slot)
    assert run(again, longer, 20) == plain(longer, Greedy(), 20)
    assert again.statistics.cached_tokens == n_past


class Clerk(Keen):
    """Drafts `drafted` after a lookup of a millisecond (None: without one), and keeps what it is told of the cost."""

    def __init__(self, drafted: list[int], lookup_us: float | None) -> None:
        super().__init__(FLAT)
        self.drafted, self.lookup_us = drafted, lookup_us
        self.watches_entropy = False  # It would look at the clock, too.
        self.told: list[StepCost] = []

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        tree = DraftTree()
        for token in self.drafted:
            tree.add(token, len(tree) - 1, 0.9, 0)
        return Draft(tree, lookup_us=self.lookup_us)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        self.told.append(done)


@pytest.mark.parametrize(
    ("drafted", "lookup_us", "lookup_ms", "driver_ms"),
    [([1, 2], 1000.0, 1.0, 9.0), ([], 1000.0, 10.0, 0.0), ([], None, None, 10.0)],
    ids=["a draft pays its own growth", "a lookup without a draft pays all of it", "no lookup"],
)
def test_what_drafting_took_is_the_lookups_or_the_drafts(
    drafted: list[int],
    lookup_us: float | None,
    lookup_ms: float | None,
    driver_ms: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock goes on by 10 ms at each look, so verifying, learning and the rest of a step take as much.

    The last two are booked with the next step.
    """
    ticks = count()
    monkeypatch.setattr(
        "rest_local.decoding.speculation.time", SimpleNamespace(perf_counter=lambda: 0.01 * next(ticks))
    )
    monkeypatch.setattr("rest_local.decoding.forward.time", SimpleNamespace(perf_counter=lambda: 0.0))
    clerk = Clerk(drafted, lookup_us)
    backend = FakeBackend()
    task = Alone(backend, Slot(backend), clerk, fortune("wrong"), Greedy(), TREE, lambda token: False)
    task.evaluate([3, 1, 4])
    for before in (0.0, 20.0):
        task.step(8)
        done = clerk.told[-1]
        assert done.lookup_ms == (None if lookup_ms is None else pytest.approx(lookup_ms))
        assert done.driver_ms == pytest.approx(driver_ms + 10.0 + before)
