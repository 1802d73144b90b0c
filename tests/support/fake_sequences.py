"""Sequences over the fake backend: scripted sources, byte text, and a check of every memory cell."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from support.fake_backend import END, Draws, FakeBackend, Greedy, cells_of, plain
from support.prices import FLAT

from benchmarks.wall import evaluate_prompt, step_alone
from rest_local.calibration.cost import CostCurve
from rest_local.decoding.core import Request, RequestState, Slot
from rest_local.decoding.forward import Forward
from rest_local.decoding.results import Statistics
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.stream import Answer, Piece, Result
from rest_local.decoding.verify import Relaxed, TokenConstraint, Verifier
from rest_local.drafting.models.drafter import DraftText
from rest_local.drafting.sources import Lookup, SourceRows
from rest_local.kv_cache.backend import Capability
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.policy import Off, Policy

TREE = Capability("tree", "fake")


class Silent:
    """Sources that know nothing."""

    draft_text: DraftText | None = None

    def restart(self, tokens: Sequence[int]) -> None: ...
    def predict(self, tokens: Sequence[int]) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def rows(self, *_: object, **__: object) -> list[SourceRows]:
        return []

    def rows_after(self, *_: object, **__: object) -> list[SourceRows]:
        return []

    def repeats(self, n: int = 8) -> bool:
        return False


class Owned:
    """A chooser that knows whether it was closed, and is asked nothing after that."""

    def __init__(self, chooser: Greedy | Draws) -> None:
        self.chooser, self.closed = chooser, 0

    def sample(self, logits: Any) -> int:
        assert not self.closed
        return self.chooser.sample(logits)

    def accept(self, token: int) -> None:
        self.chooser.accept(token)

    def close(self) -> None:
        self.closed += 1


def scheduler_of(
    backend: FakeBackend,
    curve: CostCurve = FLAT,
    capability: Capability = TREE,
    overlaps: bool | None = None,
    frame_ms: float = 0.0,
    joined: int = 0,
) -> Scheduler:
    joins = (lambda n, end: n <= joined) if joined else None
    return Scheduler(backend, capability, curve, overlaps, frame_ms, joins=joins)


def sequence_of(
    backend: FakeBackend,
    prompt: Sequence[int],
    n: int,
    chooser: Greedy | Draws | None = None,
    sources: Any = None,
    policy: Policy | None = None,
    finished: Callable[[Result], None] = lambda result: None,
    connect: Callable[[Slot], Lookup] | None = None,
    **options: Any,
) -> RequestState:
    """Return a sequence whose every token is the letter of its number. END ends it."""
    request = Request(list(prompt), max_tokens=n, **options)
    answer = Answer(Statistics(), Detokenizer(lambda token: bytes([97 + token])), n, request.stop, is_end)
    chosen = (policy or Off()).fork()
    lookup = sources or Silent()
    verifier = Verifier(Owned(chooser or Greedy()), is_end, n_logprobs=request.logprobs)
    return RequestState(
        request, chosen, verifier, answer,
        connect or (lambda slot: lookup), lambda sequence: finished(sequence.result),
    )  # fmt: skip


def is_end(token: int) -> bool:
    return token == END


class Alone:
    """A slot in which one sequence after another is decoded by itself, without a scheduler."""

    def __init__(
        self,
        backend: FakeBackend,
        slot: Slot,
        policy: Policy,
        sources: Lookup,
        chooser: Any,
        capability: Capability = TREE,
        ends: Callable[[int], bool] = is_end,
        relaxed: Relaxed | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.slot, self.policy, self.sources, self.chooser = slot, policy, sources, chooser
        self.forward = Forward(backend, capability)
        self._ends, self._relaxed, self._constraint = ends, relaxed, constraint
        self.sequence = self.begin([])

    def begin(self, prompt: Sequence[int]) -> RequestState:
        """Return a new sequence, without a slot."""
        answer = Answer(Statistics(), Detokenizer(lambda token: b""), 0, (), lambda token: False)
        verifier = Verifier(Owned(self.chooser), self._ends, relaxed=self._relaxed, constraint=self._constraint)
        self.sequence = RequestState(Request(prompt), self.policy, verifier, answer, lambda slot: self.sources)
        return self.sequence

    @property
    def statistics(self) -> Statistics:
        return self.sequence.statistics

    @property
    def room(self) -> int:
        return self.sequence.text.room

    def evaluate(self, prompt: Sequence[int]) -> None:
        """Begin a sequence and evaluate its prompt."""
        self.begin(prompt).admit(self.slot)
        evaluate_prompt(self.forward, self.sequence)

    def step(self, wanted: int) -> Piece:
        """Make one pass of at most so many tokens."""
        self.sequence.answer.left = wanted
        return step_alone(self.forward, self.sequence)


def submit_all(scheduler: Scheduler, sequences: Iterable[RequestState]) -> None:
    for sequence in sequences:
        scheduler.submit(sequence)


def run(scheduler: Scheduler, sequences: Sequence[RequestState]) -> None:
    """Submit all and step until nothing is left to do."""
    submit_all(scheduler, sequences)
    steps = 0
    while scheduler.busy:
        scheduler.step()
        check_cells(scheduler)
        steps += 1
        assert steps < 100_000


def ask(scheduler: Scheduler, prompt: Sequence[int], n: int, *more: Any, **options: Any) -> RequestState:
    """Submit one request (`sequence_of`), and step to its end with all others."""
    assert isinstance(scheduler.backend, FakeBackend)
    sequence = sequence_of(scheduler.backend, prompt, n, *more, **options)
    run(scheduler, [sequence])
    return sequence


def check_cells(scheduler: Scheduler) -> None:
    """Check that the first id of a slot holds exactly the committed tokens, and the others a beginning of them.

    Tokens that are evaluated again are exempt, and no other id holds anything.
    """
    backend = scheduler.backend
    assert isinstance(backend, FakeBackend)
    held, ids = cells_of(backend.cells), 0
    for slot in scheduler.slots.slots:
        expected = list(enumerate(slot.tokens[: slot.n_past - slot.n_again]))
        assert held(slot.branches.first_id) == expected
        for seq in range(slot.branches.first_id + 1, slot.branches.first_id + slot.branches.n):
            cells = held(seq)
            assert cells == expected[: len(cells)]
        ids |= (1 << slot.branches.n) - 1 << slot.branches.first_id
    assert all(cell.mask & ~ids == 0 for cell in backend.cells)


def prompts_of(n: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(n)
    return [rng.integers(0, END, int(rng.integers(1, longest))).tolist() for _ in range(n)]


def said(prompt: Sequence[int], n: int, chooser: Greedy | Draws | None = None) -> list[int]:
    """Return what plain decoding says, without the end token."""
    tokens = plain(prompt, chooser or Greedy(), n)
    return tokens[:-1] if tokens and tokens[-1] == END else tokens


def check_said(prompts: Iterable[Sequence[int]], sequences: Iterable[RequestState], n: int) -> None:
    """Check that each request is answered as by greedy plain decoding of n tokens. Prompts may be left over."""
    for prompt, sequence in zip(prompts, sequences, strict=False):
        assert (sequence.error, sequence.result.tokens) == (None, said(prompt, n))
