"""One forward pass for any number of requests: plan, draft, decode, verify, commit, learn.

Contract: generations whose prompts are evaluated give roots and trees, others a part of their prompt, and all of it is
one `llama_decode`. The node budget is shared: best first over all trees by marginal gain under t(n). Whatever ends a
pass (done, an interrupt, an error), the memory cells are back at the committed tokens when `step` has returned or
raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.backend import Backend
from rest_local.decoding.faults import of_request
from rest_local.decoding.generation import Generation, Step
from rest_local.decoding.slot import Rows
from rest_local.drafting.drafter import Growth, grow_together
from rest_local.drafting.tree import DraftTree
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.planning.policy import StepCost

ABORTED = 2  # of `llama_decode`: `Context.abort` was called
Outcome = Step | RestLocalError | None  # None: a part of a prompt was evaluated; an error of one request is its own


class RequestFailed(Exception):
    """One request cannot take part in the pass, of which nothing was evaluated yet: `error` is what it ends with."""

    def __init__(self, generation: Generation, error: RestLocalError) -> None:
        super().__init__(str(error))
        self.generation, self.error = generation, error


@contextmanager
def _own_fault(generation: Generation) -> Iterator[None]:
    """What fails in here is this request's, except for a decode, which may fail for the sake of others."""
    try:
        yield
    except DecodeFailed:
        raise
    except Exception as error:
        raise RequestFailed(generation, of_request(error)) from error


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
        with _own_fault(self._generation):
            self._growth.grow()


class Forward:
    """Steps over one backend. `make_room` frees cells that nobody works in, before drafts go; False: there are none.

    `chosen`: in the last step samplers were asked. Who took part in one that broke off behind that cannot go on: its
    sampler cannot go back to where its cells are.
    """

    def __init__(self, backend: Backend, make_room: Callable[[], bool] = lambda: False) -> None:
        self.backend = backend
        self._make_room = make_room
        self.chosen = False
        self._broken_off = False  # whether the last decode ended neither well nor with everything restored

    def step(self, running: Sequence[Running], prompts: Sequence[Prompt] = (), idle_cells: int = 0) -> list[Outcome]:
        """One pass. By request, those of `prompts` last: what it gave, at least a token each of those who run, or what
        went wrong with it alone.

        `idle_cells`: tokens that slots of nobody keep. Raises where nothing was evaluated: DecodeFailed, whose code 1
        means that there is no room for it in the cells, and RequestFailed.
        """
        generations = _all(running, prompts)
        before = [generation.slot.n_past for generation in generations]
        n_ctx = sum(before) + idle_cells
        done = self.chosen = self._broken_off = False
        try:
            self._draft(running, n_ctx, bool(prompts))
            begun = time.perf_counter()
            logits, decode_ms = self._decode(running, prompts)
            shared_ms = (1e3 * (time.perf_counter() - begun) - decode_ms) / max(len(running), 1)
            # what a part of a prompt takes says nothing about steps without one
            cost = StepCost(n_ctx, 0, 0, decode_ms, shared_ms, leads=not prompts, prompted=bool(prompts))
            self.chosen = True
            outcomes = [*self._take(running, logits, cost), *(_commit(part, decode_ms) for part in prompts)]
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
        beside = len(running) - 1
        for part in running:
            with _own_fault(part.generation):
                part.generation.draft(1 if prompted else part.wanted, n_ctx, beside)
        if beside > 0:
            self._share([part.generation for part in running], n_ctx, beside)
        for part in running:
            with _own_fault(part.generation):
                part.generation.prune()

    def _share(self, generations: Sequence[Generation], n_ctx: int, beside: int) -> None:
        room = min(self.backend.max_outputs, self.backend.n_batch) - 1 - beside
        for generation in generations:  # whole trees, of policies that know no costs: while there is room
            generation.cut(room)
            room -= len(generation.tree)
        growing = [(generation, growth) for generation in generations if (growth := generation.growth)]
        plan = growing[0][0].policy.together(n_ctx, room, beside) if growing else None
        if plan is not None:
            begun = time.perf_counter()
            order = grow_together([_Owned(*each) for each in growing], plan.worth, room)
            ms = 1e3 * (time.perf_counter() - begun)
            for number, (generation, _) in enumerate(growing):
                generation.grew(ms * order.count(number) / max(len(order), 1))
                generation.cut(order[: plan.best].count(number))

    def _decode(self, running: Sequence[Running], prompts: Sequence[Prompt]) -> tuple[NDArray[np.float32], float]:
        """Evaluate everything; where there is no room, without the cells of idle slots, then smaller trees, then none.

        Returns logits, and milliseconds: a GPU computes until the logits are asked for.
        """
        generations = [part.generation for part in running]
        rebuilt = False
        while True:
            rows = Rows()
            for generation in generations:
                generation.add_to(rows)
            for prompt in prompts:
                prompt.generation.slot.add_prompt(rows, prompt.generation.pending[: prompt.n])
            rows.load(self.backend.batch)
            begun = time.perf_counter()
            self._broken_off = True
            code = self.backend.decode()
            self._broken_off = code not in (0, 1, -1)
            if code == 0:
                logits = self.backend.logits(sum(rows.output)) if generations else _NOTHING
                return logits, 1e3 * (time.perf_counter() - begun)
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
                    with _own_fault(generation):
                        generation.rebuild(cut_back=code == ABORTED)
                    generation.tree = DraftTree()
            elif code == -1 and drafted:  # refused, restored
                for generation in generations:
                    generation.tree = DraftTree()
            else:
                if code not in (1, -1):
                    for generation in _all(running, prompts):
                        generation.give_up_cells()
                raise DecodeFailed(code, len(rows.token))

    def _take(self, running: Sequence[Running], logits: NDArray[np.float32], cost: StepCost) -> list[Outcome]:
        """Verify, commit and learn, request by request."""
        outcomes: list[Outcome] = []
        nodes = sum(len(part.generation.tree) for part in running)
        row = 0
        for number, generation in enumerate(part.generation for part in running):
            own, n_past = len(generation.tree), generation.slot.n_past
            mine = logits[row : row + 1 + own]
            row += 1 + own
            others = cost._replace(
                n_nodes=own, beside=len(running) - 1, nodes_beside=nodes - own, leads=cost.leads and number == 0
            )
            try:
                outcomes.append(_take_one(generation, mine, others))
            except Exception as error:  # of its sampler, say: not a reason to end the others
                generation.put_back(n_past)
                outcomes.append(of_request(error))
        return outcomes


def _take_one(generation: Generation, logits: NDArray[np.float32], cost: StepCost) -> Step:
    begun = time.perf_counter()
    step, verdict = generation.take(logits)
    driver_ms = cost.driver_ms + 1e3 * (time.perf_counter() - begun)
    generation.learn(verdict, len(step.tokens), cost._replace(n_accepted=len(verdict.path), driver_ms=driver_ms))
    return step


def _commit(part: Prompt, ms: float) -> RestLocalError | None:
    statistics = part.generation.statistics
    if statistics.steps:
        statistics.again_ms += ms
    else:
        statistics.prompt_ms += ms
    try:
        part.generation.commit_pending(part.n)
    except Exception as error:  # a checkpoint finds no memory, say; the tokens are committed all the same
        return of_request(error)
    return None


def _all(running: Sequence[Running], prompts: Sequence[Prompt]) -> list[Generation]:
    return [*(part.generation for part in running), *(part.generation for part in prompts)]


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
    return outcome


def _evaluate_pending(generation: Generation) -> None:
    forward = Forward(generation.backend)
    while generation.pending:
        (error,) = forward.step([], [Prompt(generation, min(len(generation.pending), generation.backend.n_batch))])
        if isinstance(error, RestLocalError):
            raise error


_NOTHING = np.empty((0, 0), np.float32)
