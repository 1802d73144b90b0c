"""One forward pass for any number of requests: plan, draft, submit, finish the pass before, read logits, verify.

Contract: generations whose prompts are evaluated give roots and trees, others a part of their prompt, and all of it is
one `llama_decode`. The node budget is shared: best first over all trees by marginal gain under t(n). Whatever ends a
pass (done, an interrupt, an error), the memory cells are back at the committed tokens when `step` has returned or
raised.

On a GPU `llama_decode` returns before the work is done, and reading the logits waits for it. Only what the next
submission needs stands between the two; what is left of a pass (`Taken.finish`, the text) is for the caller to do,
between the next submission and its logits (`meanwhile`), or at once where a decode returns when all is computed
(`overlaps` is False, as on a CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.faults import of_request
from rest_local.decoding.generation import Generation, Step, Taken
from rest_local.drafting.drafter import Growth, grow_together
from rest_local.drafting.tree import DraftTree
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.slot import Rows
from rest_local.planning.policy import StepCost

ABORTED = 2  # of `llama_decode`: `Context.abort` was called
Outcome = Taken | RestLocalError | None  # None: a part of a prompt was evaluated; an error of one request is its own


class RequestFailed(Exception):
    """One request cannot take part in the pass, of which nothing was evaluated yet: `error` is what it ends with."""

    def __init__(self, generation: Generation, error: RestLocalError) -> None:
        super().__init__(str(error))
        self.generation, self.error = generation, error


class _OwnFault:
    """What fails in here is this request's, except for a decode, which may fail for the sake of others. (A class: a
    generator takes three times as long, and this is entered at every node of joint trees.)
    """

    __slots__ = ("_generation",)

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, DecodeFailed):
            raise RequestFailed(self._generation, of_request(error)) from error


@dataclass
class Running:
    """A request that generates: at most `wanted` tokens in this pass."""

    generation: Generation
    wanted: int


@dataclass
class Prompt:
    """A request whose prompt is evaluated: its next `n` pending tokens."""

    generation: Generation
    n: int


class _Owned:
    """A tree that grows; what goes wrong there is its request's."""

    def __init__(self, generation: Generation, growth: Growth) -> None:
        self._generation, self._growth = generation, growth

    @property
    def best(self) -> float:
        return self._growth.best

    def grow(self) -> None:
        with _OwnFault(self._generation):
            self._growth.grow()


class Forward:
    """Steps over one backend. `make_room` frees the cells of an idle slot, so that drafts need not go; False: there is
    none. `overlaps`: the device computes on its own after `decode` returns; None to measure it.

    `chosen`: the last step has asked samplers. If it broke off after that, its requests cannot go on: a sampler cannot
    go back to where the cells are.
    """

    def __init__(
        self, backend: Backend, make_room: Callable[[], bool] = lambda: False, overlaps: bool | None = None
    ) -> None:
        self.backend = backend
        self.overlaps = bool(overlaps)
        self.chosen = False
        self._measured = overlaps is None
        self._make_room = make_room
        self._broken_off = False  # whether the last decode ended neither well nor with everything restored

    def step(
        self,
        running: Sequence[Running],
        prompts: Sequence[Prompt] = (),
        idle_cells: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """One pass. By request, those of `prompts` last: what it gave, at least a token each of those who run, or what
        went wrong with it alone.

        `idle_cells`: tokens that idle slots keep. `meanwhile`: called once, when the pass is submitted. Raises
        where nothing was evaluated: DecodeFailed, whose code 1 means that there is no room for it in the cells, and
        RequestFailed; and what `meanwhile` raises.
        """
        generations = _all(running, prompts)
        before = [generation.slot.n_past for generation in generations]
        n_ctx = sum(before) + idle_cells
        done = self.chosen = self._broken_off = False
        try:
            self._draft(running, n_ctx, bool(prompts))
            times = self._submit(running, prompts)
            meanwhile()
            logits = self._read_logits(running, times)
            self.chosen = True
            outcomes = [*self._take(running, logits, n_ctx, times, bool(prompts)), *_commit(prompts, times)]
            done = True
            return outcomes
        finally:
            if not done:
                for generation, n_past in zip(generations, before, strict=True):
                    generation.put_back(n_past, self._broken_off)

    def _draft(self, running: Sequence[Running], n_ctx: int, prompted: bool) -> None:
        """A tree for each; then of all of them together what is worth it. Nobody drafts beside a part of a prompt,
        whose tokens leave a draft no cheap place in the batch.
        """
        n_other = len(running) - 1
        for part in running:
            with _OwnFault(part.generation):
                part.generation.draft(1 if prompted else part.wanted, n_ctx, n_other)
        if n_other > 0:
            self._share([part.generation for part in running], n_ctx, n_other)
        for part in running:
            with _OwnFault(part.generation):
                part.generation.prune()

    def _share(self, generations: Sequence[Generation], n_ctx: int, n_other: int) -> None:
        room = min(self.backend.max_outputs, self.backend.n_batch) - 1 - n_other
        for generation in generations:  # whole trees, of policies that know no costs: while there is room
            generation.cut(room)
            room -= len(generation.tree)
        growing = [(generation, growth) for generation in generations if (growth := generation.growth)]
        plan = growing[0][0].policy.joint_plan(n_ctx, room, n_other) if growing else None
        if plan is not None:
            begun = time.perf_counter()
            order = grow_together([_Owned(*each) for each in growing], plan.worth, room)
            ms = 1e3 * (time.perf_counter() - begun)
            for number, (generation, _) in enumerate(growing):
                generation.grew(ms * order.count(number) / max(len(order), 1))
                generation.cut(order[: plan.best].count(number))

    def _submit(self, running: Sequence[Running], prompts: Sequence[Prompt]) -> _Times:
        """Have everything evaluated; where there is no room, without the cells of idle slots, then smaller trees, then
        none.
        """
        generations = [part.generation for part in running]
        times = _Times(time.perf_counter())
        rebuilt = False
        while True:
            rows = Rows()
            for generation in generations:
                generation.add_to(rows)
            for prompt in prompts:
                prompt.generation.slot.add_prompt(rows, prompt.generation.pending[: prompt.n])
            rows.load(self.backend.batch)
            times.submitting = time.perf_counter()
            self._broken_off = True
            code = self.backend.decode()
            self._broken_off = code not in (0, 1, -1)
            if code == 0:
                times.submitted = time.perf_counter()
                return times
            drafted = any(len(generation.tree) for generation in generations)
            if code == 1 and self._make_room():
                continue
            if code == 1 and drafted:  # no room, restored
                for generation in generations:
                    generation.cut(len(generation.tree) // 2)
            elif code == ABORTED and any(generation.cancelled for generation in _all(running, prompts)):
                raise DecodeFailed(code, len(rows.token))
            elif (code == ABORTED or code < -1) and not rebuilt:  # partly applied
                rebuilt = True
                for generation in _all(running, prompts):
                    with _OwnFault(generation):
                        generation.rebuild(cut_back=code == ABORTED)
                    generation.tree = DraftTree()
            elif code == -1 and _simplify(generations, _all(running, prompts)):  # refused, restored
                continue
            else:
                if code not in (1, -1):
                    for generation in _all(running, prompts):
                        generation.give_up_cells()
                raise DecodeFailed(code, len(rows.token))

    def _read_logits(self, running: Sequence[Running], times: _Times) -> NDArray[np.float32]:
        """Wait for the pass: float32 [roots and nodes, n_vocab], overwritten by the next one.

        A pass of prompts alone is waited for as well, or the first step of an answer would be charged with it.
        """
        begun = time.perf_counter()
        if running:
            logits = self.backend.logits(sum(1 + len(part.generation.tree) for part in running))
        else:
            logits = _NOTHING
            self.backend.synchronize()
        times.ready = time.perf_counter()
        if self._measured:
            self.overlaps = times.ready - begun > times.submitted - times.submitting
        return logits

    def _take(
        self, running: Sequence[Running], logits: NDArray[np.float32], n_ctx: int, times: _Times, prompted: bool
    ) -> list[Outcome]:
        """Verify, commit and account for it, request by request."""
        outcomes: list[Outcome] = []
        nodes = sum(len(part.generation.tree) for part in running)
        n_other = len(running) - 1
        batch_ms = times.batch_ms / len(running) if running else 0.0
        row = 0
        for number, generation in enumerate(part.generation for part in running):
            own, n_past = len(generation.tree), generation.slot.n_past
            mine = logits[row : row + 1 + own]
            row += 1 + own
            if generation.over:  # ended while the pass was computed
                generation.put_back(n_past)
                outcomes.append(None)
                continue
            # what a part of a prompt takes says nothing about steps without one
            updates_curve = number == 0 and not prompted
            cost = StepCost(
                n_ctx, own, 0, times.decode_ms, batch_ms, None, n_other, nodes - own, updates_curve, 0.0, prompted
            )
            try:
                outcomes.append(generation.take(mine, cost, self.overlaps))
            except Exception as error:  # of its sampler, say: not a reason to end the others
                generation.put_back(n_past)
                outcomes.append(of_request(error))
        return outcomes


@dataclass(slots=True)
class _Times:
    """When a pass was begun to be put together, submitted (the decode that succeeded), and computed: seconds."""

    begun: float
    submitting: float = 0.0
    submitted: float = 0.0
    ready: float = 0.0

    @property
    def decode_ms(self) -> float:
        return 1e3 * (self.ready - self.submitting)

    @property
    def batch_ms(self) -> float:
        """Building the batch, and submissions that failed."""
        return 1e3 * (self.submitting - self.begun)


def _commit(parts: Sequence[Prompt], times: _Times) -> list[Outcome]:
    """What became of the parts of prompts."""
    outcomes: list[Outcome] = []
    for part in parts:
        statistics = part.generation.statistics
        if statistics.steps:
            statistics.again_ms += times.decode_ms
        else:
            statistics.prompt_ms += times.decode_ms
        try:
            part.generation.commit_pending(part.n)
            outcomes.append(None)
        except Exception as error:  # a checkpoint finds no memory, say; the tokens are committed all the same
            outcomes.append(of_request(error))
    return outcomes


def _all(running: Sequence[Running], prompts: Sequence[Prompt]) -> list[Generation]:
    return [*(part.generation for part in running), *(part.generation for part in prompts)]


def _simplify(running: Sequence[Generation], everyone: Sequence[Generation]) -> bool:
    """Drop the trees and the ids of branches, which llama.cpp may have refused; whether there were any."""
    simpler = False
    for generation in running:
        simpler |= len(generation.tree) > 0
        generation.tree = DraftTree()
    for generation in everyone:
        simpler |= generation.slot.release_branches()
    return simpler


def evaluate_prompt(generation: Generation, prompt: Sequence[int]) -> None:
    """Begin a request and evaluate its whole prompt. Raises PromptEmpty, PromptTooLong, DecodeFailed. Interruptible
    between batches: what is evaluated stays.
    """
    generation.begin(prompt)
    _evaluate_pending(generation)


def step_alone(generation: Generation, wanted: int) -> Step:
    """One forward pass for one request: at least one and at most `wanted` tokens. Raises DecodeFailed after the state
    was cleared, and what the sampler raises.
    """
    _evaluate_pending(generation)
    try:
        (outcome,) = Forward(generation.backend).step([Running(generation, wanted)])
    except RequestFailed as failed:
        raise failed.error from failed
    if isinstance(outcome, RestLocalError):
        raise outcome
    assert outcome is not None
    return outcome.finish()


def _evaluate_pending(generation: Generation) -> None:
    forward = Forward(generation.backend)
    while generation.pending:
        (error,) = forward.step([], [Prompt(generation, min(len(generation.pending), generation.backend.n_batch))])
        if isinstance(error, RestLocalError):
            raise error


_NOTHING = np.empty((0, 0), np.float32)
