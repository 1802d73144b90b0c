"""Many requests over the fake backend, whose arithmetic is exact: other requests never change an answer."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import few
from support.fake_backend import END, N_VOCAB, Draws, FakeBackend, Greedy, Recurrent, logits_of
from support.fake_sequences import (
    TREE,
    Owned,
    ask,
    check_cells,
    check_said,
    prompts_of,
    run,
    said,
    scheduler_of,
    sequence_of,
    submit_all,
)
from support.fake_sources import SHAPES, Keen, fortune
from support.prices import FLAT

from rest_local.calibration.cost import CostCurve
from rest_local.decoding.core import RequestState
from rest_local.decoding.logprobs import logprobs_of
from rest_local.decoding.prefill import LEAST_PART
from rest_local.decoding.scheduler import Scheduler
from rest_local.errors import DecodeFailed, Unexpected
from rest_local.kv_cache.backend import Capability
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off

HYBRID = Capability("chain", "fake", 16, shares=False)


@pytest.mark.parametrize(
    ("shape", "drafts", "n_slots", "keep"),
    [
        ("tree", True, 1, True), ("tree", True, 8, False), ("wrong", True, 1, False), ("wrong", True, 8, True),
        ("deep", True, 8, True), ("tree", False, 1, False), ("tree", False, 8, True),
    ],
)  # fmt: skip
def test_answers_do_not_depend_on_drafts_neighbours_or_kept_prefixes(
    shape: str, drafts: bool, n_slots: int, keep: bool
) -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=n_slots)
    scheduler = scheduler_of(backend)
    system = list(range(20))
    asked = [[*system, *prompt] for prompt in prompts_of(10)]
    sequences = [
        sequence_of(
            backend, prompt, 40, Draws(seed, 0.7) if seed % 2 else None, fortune(shape),
            Keen(FLAT) if drafts else Off(), keep_prefix=keep,
        )
        for seed, prompt in enumerate(asked)
    ]  # fmt: skip
    run(scheduler, sequences)
    for seed, (prompt, sequence) in enumerate(zip(asked, sequences, strict=True)):
        assert sequence.result.tokens == said(prompt, 40, Draws(seed, 0.7) if seed % 2 else None)
        assert sequence.error is None
        assert isinstance(sequence.speculation.verifier.sampler, Owned)
        assert sequence.speculation.verifier.sampler.closed == 1
    if keep:
        assert sum(sequence.statistics.cached_tokens for sequence in sequences) >= 20
    else:
        assert all(sequence.statistics.cached_tokens == 0 for sequence in sequences)
    drafted = sum(sequence.statistics.drafted for sequence in sequences)
    assert (drafted > 0) == drafts


def test_a_hundred_prompts_say_the_same_with_drafts() -> None:
    """RELIABILITY 25: greedy and seeded in turn, in five shapes of trees, four at a time."""
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    asked, shapes = prompts_of(100, 20), list(itertools.islice(itertools.cycle(SHAPES), 100))

    def chooser(seed: int) -> Draws | None:
        return Draws(seed, 0.8) if seed % 2 else None

    sequences = [
        sequence_of(backend, prompt, 10, chooser(seed), fortune(shape), Keen(FLAT))
        for seed, (prompt, shape) in enumerate(zip(asked, shapes, strict=True))
    ]
    run(scheduler_of(backend), sequences)
    for seed, (prompt, sequence) in enumerate(zip(asked, sequences, strict=True)):
        assert sequence.result.tokens == said(prompt, 10, chooser(seed))
    assert sum(sequence.statistics.drafted for sequence in sequences) > 1000
    for shape in SHAPES:
        statistics = [each.statistics for each, its in zip(sequences, shapes, strict=True) if its == shape]
        assert (sum(each.accepted for each in statistics) > 20) == (shape != "wrong")


def test_the_budget_is_shared_by_all() -> None:
    """Eight sequences with sources of one quality all have drafts submitted and accepted while all of them run: nodes
    go to the likeliest candidates, not to the first sequence."""
    backend = FakeBackend(n_ctx=2048, n_slots=8)
    scheduler = scheduler_of(backend)
    sequences = [
        sequence_of(backend, prompt, 400, Draws(n), fortune("deep"), Keen(FLAT))
        for n, prompt in enumerate(prompts_of(8, 5))
    ]
    submit_all(scheduler, sequences)
    drafted: list[int] = []
    while not any(sequence.done for sequence in sequences):
        drafted = [sequence.statistics.drafted for sequence in sequences]
        scheduler.step()
    assert min(drafted) > 5
    assert all(sequence.statistics.accepted for sequence in sequences)


def test_the_least_recently_used_idle_slot_goes_first() -> None:
    """Three conversations and a fourth that does not fit with them: the least recently used one makes room."""
    backend = FakeBackend(n_ctx=256, n_slots=4)
    scheduler = scheduler_of(backend)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, END, 60).tolist() for _ in range(3)]
    for text in (*texts, texts[0]):  # the first speaks again, so the second is the oldest
        ask(scheduler, text, 1)
    ask(scheduler, rng.integers(0, END, 100).tolist(), 1)
    kept = [any(slot.reusable(text) >= 50 for slot in scheduler.slots.slots) for text in texts]
    assert kept == [True, False, True]


@pytest.mark.parametrize("drafts", [True, False])
def test_log_probabilities_are_those_of_each_tokens_own_row(drafts: bool) -> None:
    """Whether it was drafted or not: the row after the text before it."""
    backend = FakeBackend(n_ctx=512, n_slots=2)
    prompts = prompts_of(2, 9)
    sequences = [
        sequence_of(backend, prompt, 60, sources=fortune("tree"), policy=Keen(FLAT) if drafts else Off(), logprobs=3)
        for prompt in prompts
    ]
    run(scheduler_of(backend), sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert (sequence.statistics.accepted > 5) == drafts
        history, expected = list(prompt), []
        for token in sequence.result.tokens:
            expected.append(logprobs_of(logits_of(history), token, 3))
            history.append(token)
        assert sequence.result.logprobs == expected


def test_a_prompt_that_begins_like_a_running_one_shares_its_cells() -> None:
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    scheduler = scheduler_of(backend)
    system = prompts_of(1, 200)[0] * 3
    first = sequence_of(backend, [*system, 1], 60)
    scheduler.submit(first)
    while first.text.is_prefilling or not first.text.has_slot:
        scheduler.step()
    before = backend.evaluated
    others = [sequence_of(backend, [*system, n, n], 5) for n in range(2, 5)]
    for other in others:
        scheduler.submit(other)
    scheduler.step()
    check_cells(scheduler)
    assert backend.evaluated - before < 20
    assert all(other.statistics.cached_tokens == len(system) for other in others)
    run(scheduler, [])
    for n, other in enumerate(others, 2):
        assert other.result.tokens == said([*system, n, n], 5)
    assert first.result.tokens == said([*system, 1], 60)


def test_requests_that_come_together_evaluate_their_common_beginning_once() -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=8)
    system = np.random.default_rng(1).integers(0, END, 300).tolist()
    sequences = [sequence_of(backend, [*system, n, n], 5) for n in range(8)]
    run(scheduler_of(backend), sequences)
    assert sum(sequence.statistics.cached_tokens for sequence in sequences) == 7 * len(system)
    assert backend.evaluated < len(system) + 8 * (2 + 5)
    for n, sequence in enumerate(sequences):
        assert sequence.result.tokens == said([*system, n, n], 5)


def test_what_an_idle_slot_keeps_goes_when_it_has_cost_as_much_as_evaluating_it_again() -> None:
    """0.01 ms a cell and pass, 1 ms a token evaluated again: 100 passes."""
    curve = CostCurve.from_points([0, 1000], [1, 64], [[10.0, 73.0], [20.0, 83.0]])
    backend = FakeBackend(n_ctx=1024, n_slots=2)
    scheduler = scheduler_of(backend, curve)
    ask(scheduler, [1] * 200, 1)
    idle = next(slot for slot in scheduler.slots.slots if slot.n_past)
    other = sequence_of(backend, [2, 3], 300, Draws(1), ignore_end=True)
    scheduler.submit(other)
    for _ in range(90):
        scheduler.step()
    assert idle.n_past == 200
    again = sequence_of(backend, [1] * 200, 1)  # another text needs it: it begins anew
    scheduler.submit(again)
    while not again.done:
        scheduler.step()
    assert again.statistics.cached_tokens == 199
    kept = 0
    while idle.n_past and not other.done:
        scheduler.step()
        kept += 1
    assert 80 <= kept <= 130
    check_cells(scheduler)


def test_holes_below_what_is_kept_cost_no_conversation_its_prefix() -> None:
    """A request that continues kept text keeps it; one with another text starts again from the lowest cell."""
    curve = CostCurve.from_points([0, 1000], [1, 64], [[10.0, 73.0], [20.0, 83.0]])
    backend = FakeBackend(n_ctx=1024, n_slots=3)
    scheduler = scheduler_of(backend, curve)
    ask(scheduler, [1] * 200, 1)
    idle = next(slot for slot in scheduler.slots.slots if slot.n_past)
    other = ask(scheduler, [2, 3], 150, Draws(1), ignore_end=True)
    assert not idle.n_past  # it has cost more than it was worth
    assert scheduler.slots.holes == 200
    follow_up = [2, 3, *other.result.tokens, 4, 5]
    second = ask(scheduler, follow_up, 3)
    assert second.statistics.cached_tokens >= 150
    ask(scheduler, [7] * 20, 3)
    assert scheduler.slots.idle_cells < 30
    assert not scheduler.slots.holes
    check_cells(scheduler)


def test_a_conversation_above_holes_starts_anew_when_they_have_cost_as_much() -> None:
    """0.01 ms a cell and pass: 200 freed cells cost 2 ms a pass, evaluating the 100 tokens above them 100 ms."""
    curve = CostCurve.from_points([0, 1000], [1, 64], [[10.0, 73.0], [20.0, 83.0]])
    backend = FakeBackend(n_ctx=1024, n_slots=2)
    scheduler = scheduler_of(backend, curve)
    ask(scheduler, [1] * 200, 1)
    text = [2] * 100
    kept = []
    for _ in range(40):
        turn = ask(scheduler, text, 9, ignore_end=True)
        check_cells(scheduler)
        kept.append(turn.statistics.cached_tokens)
    anew = [turn for turn, n in enumerate(kept) if n == 0 and turn]
    assert len(anew) == 1
    assert 10 <= anew[0] <= 30
    assert not scheduler.slots.holes


def test_a_long_prompt_is_evaluated_in_parts_while_others_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass gives each running request a token, and no part is larger than its time allows."""
    slow = CostCurve.from_points([0], [1, 64], [[10.0, 200.0]])  # 3 ms a token: 100 ms are 33
    backend = FakeBackend(n_ctx=2048, n_batch=512, n_slots=4)
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * (7 * backend.calls + 3 * backend.evaluated))
    monkeypatch.setattr("rest_local.decoding.scheduler.time", clock)
    scheduler = scheduler_of(backend, slow, overlaps=False)
    running = [sequence_of(backend, prompt, 400) for prompt in prompts_of(2, 5)]
    submit_all(scheduler, running)
    for _ in range(3):
        scheduler.step()
    late = sequence_of(backend, [5] * 600, 5)
    scheduler.submit(late)
    sizes = []
    while not late.done:
        counts = [len(sequence.result.tokens) for sequence in running]
        evaluated = backend.evaluated
        scheduler.step()
        sizes.append(backend.evaluated - evaluated)
        for sequence, count in zip(running, counts, strict=True):
            assert sequence.done or len(sequence.result.tokens) > count
    assert LEAST_PART < max(sizes) <= 33 + 2
    assert late.result.tokens == said([5] * 600, 5)


def test_passes_with_a_part_of_a_prompt_teach_the_cost_curve_nothing() -> None:
    curve = CostCurve.from_points([0], [1, 64], [[1.0, 1.2]])
    backend = FakeBackend(n_ctx=2048, n_batch=64, n_slots=2)
    scheduler = scheduler_of(backend, curve)
    policy = Auto(curve)
    scheduler.submit(sequence_of(backend, [1, 2, 3], 400, Draws(2), policy=policy))
    scheduler.step()
    scheduler.step()
    policy.begin(3)  # a new request: the curve learns what was seen so far
    before = curve.ms.copy()
    scheduler.submit(sequence_of(backend, [5] * 600, 5, policy=policy))
    scheduler.step()
    assert (curve.ms == before).all()
    while scheduler.queue.admitted[-1].text.is_prefilling:
        scheduler.step()
    for _ in range(20):
        scheduler.step()
    assert (curve.ms != before).any()


def test_a_prompt_that_is_cut_off_says_what_the_cells_held() -> None:
    backend = FakeBackend(n_ctx=1024, n_batch=64)
    scheduler = scheduler_of(backend)
    for cached in (0, 64):  # the next attempt goes on where the first one was cut off
        sequence = sequence_of(backend, [1, 2, 3, 4] * 100, 5)
        scheduler.submit(sequence)
        scheduler.step()
        assert (sequence.result.timings.cached_tokens, sequence.result.timings.prompt_tokens) == (cached, 400 - cached)
        scheduler.cancel(sequence)


def test_of_two_long_prompts_the_first_is_as_early_as_alone() -> None:
    backend = FakeBackend(n_ctx=2048, n_batch=64, n_slots=2)
    scheduler = scheduler_of(backend)
    sequences = [sequence_of(backend, [n] * 500, 1) for n in (1, 2)]
    submit_all(scheduler, sequences)
    for _ in range(8):
        scheduler.step()
    left = [sequence.text.n_pending for sequence in sequences if sequence.text.has_slot]
    assert min(left) == 0
    assert 0 < max(left) < 499


def test_a_short_prompt_goes_before_a_long_one_which_still_gets_on() -> None:
    backend = FakeBackend(n_ctx=2048, n_batch=64, n_slots=2)
    scheduler = scheduler_of(backend)
    long = sequence_of(backend, [9] * 1900, 1)
    scheduler.submit(long)
    for n in range(12):
        before, short = long.text.n_pending if n else 1899, sequence_of(backend, [n % 7] * 120, 1)
        scheduler.submit(short)
        passes = 0
        while not short.done:
            scheduler.step()
            passes += 1
        assert passes <= 4  # Two parts, the step, and at most one pass for the oldest.
        assert long.text.n_pending < before
    assert not long.done


@pytest.mark.parametrize("n_slots", [2, 4])
def test_requests_that_fit_alone_are_all_served_when_cells_run_out(n_slots: int) -> None:
    backend = FakeBackend(n_ctx=96, n_slots=n_slots)
    scheduler = scheduler_of(backend)
    asked = [[n % END] * (20 + 5 * n) for n in range(8)]
    sequences = [sequence_of(backend, prompt, 35, sources=fortune("wrong"), policy=Keen(FLAT)) for prompt in asked]
    run(scheduler, sequences)
    check_said(asked, sequences, 35)


@pytest.mark.parametrize("code", [1, 2, -1, -2])
@pytest.mark.parametrize("at", [*range(1, 7), 9, 12, 14])
def test_a_failing_decode_changes_no_answer(code: int, at: int) -> None:
    """The N-th call fails. A sequence that is not served gets an error, and all others the right answer."""
    backend = FakeBackend(n_ctx=512, n_slots=3)
    scheduler = scheduler_of(backend)
    asked = prompts_of(4, 30)
    backend.failures = {at: code}
    sequences = [sequence_of(backend, prompt, 12, sources=fortune("wrong"), policy=Keen(FLAT)) for prompt in asked]
    run(scheduler, sequences)
    assert not backend.failures
    check_said(asked, sequences, 12)


@pytest.mark.parametrize("code", [2, -1, -2])
@pytest.mark.parametrize("at", range(1, 12))
def test_decodes_that_keep_failing_end_requests_and_the_next_works(code: int, at: int) -> None:
    backend = FakeBackend(n_ctx=512, n_slots=3)
    scheduler = scheduler_of(backend)
    backend.failures = dict.fromkeys(range(at, at + 60), code)
    asked = prompts_of(4, 80)
    sequences = [sequence_of(backend, prompt, 12) for prompt in asked]
    run(scheduler, sequences)
    assert any(isinstance(sequence.error, DecodeFailed) for sequence in sequences)
    for prompt, sequence in zip(asked, sequences, strict=True):
        assert sequence.error is not None or sequence.result.tokens == said(prompt, 12)
        assert sequence.error is None or sequence.result.finish_reason == "error"
    backend.failures = {}
    after = ask(scheduler, asked[0], 12)
    assert after.result.tokens == said(asked[0], 12)


def test_cells_return_to_the_baseline_after_requests_that_accept_nothing() -> None:
    backend = FakeBackend(n_ctx=128, n_slots=2)
    scheduler = scheduler_of(backend)
    prompt = [1, 2, 3]
    for _ in range(50):
        sequence = sequence_of(backend, prompt, 3, sources=fortune("wrong"), policy=Keen(FLAT))
        scheduler.submit(sequence)
        while not sequence.done:
            scheduler.step()
        assert sequence.statistics.accepted == 0
    check_cells(scheduler)
    assert len(backend.cells) <= 2 * (len(prompt) + 3)
    scheduler.slots.forget()
    assert not backend.cells


@pytest.mark.parametrize("at", range(12))
def test_cancelling_at_any_step_frees_the_slot_and_leaves_the_others(at: int) -> None:
    backend = FakeBackend(n_ctx=512, n_batch=16, n_slots=2)
    scheduler = scheduler_of(backend)
    asked = [[3] * 50, [4] * 30, [5] * 3]
    sequences = [sequence_of(backend, prompt, 8) for prompt in asked]
    submit_all(scheduler, sequences)
    for _ in range(at):
        scheduler.step()
    was_done = sequences[0].done
    scheduler.cancel(sequences[0])
    check_cells(scheduler)
    assert sequences[0].done
    assert was_done or sequences[0].result.finish_reason == "cancelled"
    run(scheduler, [])
    for prompt, sequence in list(zip(asked, sequences, strict=True))[1:]:
        assert sequence.result.tokens == said(prompt, 8)
    assert said(asked[0], 8)[: len(sequences[0].result.tokens)] == sequences[0].result.tokens


class Life(RuleBasedStateMachine):
    """Submit, step, cancel, evict in any order: after every step the cells are those of the slots' tokens."""

    def memory(self) -> tuple[FakeBackend, Capability]:
        return FakeBackend(n_ctx=80, n_batch=16, n_slots=3), TREE

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.capability = self.memory()
        self.sequences: list[tuple[list[int], int, RequestState]] = []

    @initialize(frame_ms=st.sampled_from([0.0, 4.0]), joined=st.sampled_from([0, 6, 16]))
    def start(self, frame_ms: float, joined: int) -> None:
        """Begin with a scheduler that does one pass in a step, or up to four."""
        self.scheduler: Scheduler = scheduler_of(
            self.backend, capability=self.capability, frame_ms=frame_ms, joined=joined
        )

    @rule(
        common=st.integers(0, 40), prompt=st.lists(st.integers(0, N_VOCAB - 2), min_size=1, max_size=30),
        n=st.integers(0, 40), keep=st.booleans(), drafts=st.booleans(),
        client=st.sampled_from("aab"), owner=st.sampled_from(["", "", "other"]),
    )  # fmt: skip
    def submit(
        self,
        common: int,
        prompt: list[int],
        n: int,
        keep: bool,
        drafts: bool,
        client: str,
        owner: str,
    ) -> None:
        prompt = [*range(20), *range(20)][:common] + prompt  # so that cells are shared
        sources = fortune("bush") if drafts else None
        policy = Keen(FLAT) if drafts else Off()
        sequence = sequence_of(
            self.backend, prompt, n, sources=sources, policy=policy, keep_prefix=keep,
            client=client, owner=owner,
        )  # fmt: skip
        self.sequences.append((prompt, n, sequence))
        self.scheduler.submit(sequence)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.step()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        self.scheduler.cancel(self.sequences[which % len(self.sequences)][2])

    @rule()
    def evict(self) -> None:
        self.scheduler.slots.evict()

    @rule(code=st.sampled_from([2, -1, -2]), after=st.integers(1, 3))
    def fail(self, code: int, after: int) -> None:
        self.backend.failures = {self.backend.calls + after: code}

    @invariant()
    def cells_are_accounted_for(self) -> None:
        check_cells(self.scheduler)

    @invariant()
    def cells_at_work_are_counted(self) -> None:
        """Check that each cell counts once, shared or not, and that those to come count."""
        at_work = [sequence for sequence in self.scheduler.queue.admitted if sequence.text.has_slot]
        ids = sum((1 << each.text.slot.branches.n) - 1 << each.text.slot.branches.first_id for each in at_work)
        held = sum(bool(cell.mask & ids) for cell in self.backend.cells)
        to_come = sum(sequence.text.n_pending + 1 + sequence.text.slot.n_again for sequence in at_work)
        assert self.scheduler.queue.cells_in_use() == held + to_come

    @invariant()
    def answers_are_right(self) -> None:
        for prompt, n, sequence in self.sequences:
            truth = said(prompt, n)
            assert truth[: len(sequence.result.tokens)] == sequence.result.tokens
            complete = sequence.done and sequence.result.finish_reason in ("stop", "length")
            full = len(prompt) + len(sequence.result.tokens) > self.backend.n_ctx
            assert not complete or sequence.result.tokens == truth or full

    def teardown(self) -> None:
        self.backend.failures = {}
        while self.scheduler.busy:
            self.scheduler.step()
        self.answers_are_right()
        assert all(sequence.done for _, _, sequence in self.sequences)
        assert self.scheduler.slots.idle_cells == sum(slot.n_past for slot in self.scheduler.slots.slots)


TestLife = Life.TestCase
TestLife.settings = settings(few(25), stateful_step_count=30)


class RecurrentLife(Life):
    """The same with memory that evaluates accepted tokens again, beside parts of prompts."""

    def memory(self) -> tuple[FakeBackend, Capability]:
        return Recurrent(n_ctx=160, n_batch=16, n_slots=4), HYBRID


TestRecurrentLife = RecurrentLife.TestCase
TestRecurrentLife.settings = settings(few(25), stateful_step_count=30)


def test_tokens_that_are_evaluated_again_and_parts_of_prompts_fit_one_batch() -> None:
    backend = Recurrent(n_ctx=1024, n_batch=16, n_slots=4)
    asked = prompts_of(12, 60)
    sequences = [sequence_of(backend, each, 30, sources=fortune("bush"), policy=Keen(FLAT)) for each in asked]
    run(scheduler_of(backend, capability=HYBRID), sequences)
    check_said(asked, sequences, 30)
    assert backend.restored


@pytest.mark.parametrize("call", range(2, 9))
@pytest.mark.parametrize("fault", [1, -1, -2, 2, KeyboardInterrupt()])
def test_a_fault_among_steps_that_are_done_at_once_changes_no_token(call: int, fault: int | BaseException) -> None:
    backend = FakeBackend(n_ctx=64)
    backend.failures = {call: fault}
    scheduler = scheduler_of(backend, frame_ms=8.0)
    prompt = [1, 2, 3]
    sequence = sequence_of(backend, prompt, 30)
    scheduler.submit(sequence)
    while scheduler.busy:
        with contextlib.suppress(KeyboardInterrupt):
            scheduler.step()
        check_cells(scheduler)
    tokens = sequence.result.tokens
    assert tokens == said(prompt, 30)[: len(tokens)]
    assert len(tokens) == 30 or fault not in (-1, -2, 2)  # 1: the cells are full, which ends the only request


class Failing(Greedy):
    """Chooses so many tokens, and fails."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._left = n

    def sample(self, logits: np.ndarray) -> int:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("of the sampler")
        return super().sample(logits)


@pytest.mark.parametrize("n", range(6))
def test_a_sampler_that_fails_among_steps_that_are_done_at_once_ends_its_own_request(n: int) -> None:
    backend = FakeBackend(n_ctx=64)
    scheduler = scheduler_of(backend, frame_ms=8.0)
    failed = ask(scheduler, [1, 2, 3], 30, Failing(n))
    assert isinstance(failed.error, Unexpected)
    assert failed.result.tokens == said([1, 2, 3], 30)[: len(failed.result.tokens)]
    assert ask(scheduler, [4, 5], 12).result.tokens == said([4, 5], 12)


@pytest.mark.parametrize("n_batch", [8, 64])
@pytest.mark.parametrize("others", [0, 2])
def test_the_end_of_a_prompt_and_the_first_step_are_one_pass(n_batch: int, others: int) -> None:
    for n_prompt in (1, 2, 7, 8, 9, 17):
        passes, told = [], []
        for joined in (0, n_batch):
            backend = FakeBackend(n_batch=n_batch, n_slots=4)
            scheduler = scheduler_of(backend, joined=joined)
            before = [sequence_of(backend, [7, number], 30) for number in range(others)]
            submit_all(scheduler, before)
            for _ in range(3):
                scheduler.step()
            sequence = sequence_of(backend, list(range(n_prompt)), 6, logprobs=2)
            scheduler.submit(sequence)
            begun = backend.calls
            while not sequence.answer.begun:
                scheduler.step()
                check_cells(scheduler)
            passes.append(backend.calls - begun)
            run(scheduler, [])
            told.append((sequence.result.tokens, sequence.result.logprobs, sequence.statistics.steps))
            assert sequence.statistics.prompt_tokens == n_prompt
            assert all(each.result.tokens == said([7, number], 30) for number, each in enumerate(before))
        assert told[0] == told[1]
        assert told[0][0] == said(list(range(n_prompt)), 6)
        saved = passes[0] - passes[1]
        assert saved == (n_prompt > 1) if n_batch == 64 else saved >= 0, (n_prompt, passes)  # a root needs a place


@pytest.mark.parametrize("n", range(1, 12))
def test_text_that_comes_at_once_ends_where_the_answer_ends(n: int) -> None:
    text = "".join(chr(97 + token) for token in said([5, 6], 40))
    scheduler = scheduler_of(FakeBackend(n_ctx=64), frame_ms=100.0)
    limited = ask(scheduler, [5, 6], n)
    assert limited.result.text == text[:n]
    stopped = ask(scheduler, [5, 6], 40, stop=(text[n : n + 2],))
    assert stopped.result.text == text[: text.index(text[n : n + 2])]
    full = ask(scheduler_of(FakeBackend(n_ctx=2 + n), frame_ms=100.0), [5, 6], 40)
    assert full.result.tokens == said([5, 6], n + 1)
    assert full.result.finish_reason == "length"
