"""Who is served in the next forward pass: admission, parts of prompts, cells that run out, the end of requests.

Contract: jobs over one backend, on one thread; `step` does one forward pass for all that run. First come, first
served: a free slot goes to the longest waiting request, and where the cells run out, what goes is, in this order: idle
slots, drafts, parts of prompts, the youngest request back to the queue. So the oldest always gets on, and a request
that fits the context alone is served in the end. Long prompts are evaluated in parts that do not hold up those who
generate.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from rest_local.decoding.backend import Backend, Capability
from rest_local.decoding.forward import ABORTED, Forward, Outcome, Prompt, Running
from rest_local.decoding.generation import Step
from rest_local.decoding.job import Job
from rest_local.decoding.shift import shifted
from rest_local.decoding.slot import common_prefix
from rest_local.decoding.slots import LEAST_SHARED, Slots
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.planning.cost import LARGEST, CostCurve

log = logging.getLogger("rest_local.scheduler")

NO_ROOM = 1  # of `llama_decode`
STALL_MS = 100.0  # what a part of a prompt may add to a step of those who generate
LEAST_PART = 16  # tokens of it
LAST_PART = 32  # where memory cannot be cut back: what changes from request to request is mostly the end
CHARGED_PASSES = 16


class Scheduler:
    """Not thread safe. `curve` tells how large a part of a prompt may be.

    A job is in `waiting` (no slot), or in `admitted` (a slot, and evaluates its prompt or generates), or done.
    """

    def __init__(self, backend: Backend, capability: Capability, curve: CostCurve) -> None:
        self.backend = backend
        self._shares = capability.shares
        self.slots = Slots(backend, capability.shares)
        self.waiting: deque[Job] = deque()
        self.admitted: list[Job] = []  # the oldest first
        self._forward = Forward(backend, make_room=self.slots.evict)
        self._most = min(backend.n_batch, backend.max_outputs)  # a pass has a place for the root of each
        self._curve = curve
        self._passes = 0
        self._full = False  # somebody was sent back, and nobody has ended since
        self._turn = 0  # who of the prompts is first
        self.part_seconds: deque[float] = deque(maxlen=64)  # of passes with a part of a prompt, the newest

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.admitted)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """End it now; its slot is free for the next."""
        self._finish(job, "cancelled")

    def has(self, job: Job) -> bool:
        return job in self.admitted or job in self.waiting

    def cancel_all(self) -> None:
        """End everybody."""
        for job in (*self.admitted, *self.waiting):
            self.cancel(job)

    def step(self) -> None:
        """Admit who can be admitted, and do one forward pass."""
        self._expire()
        self._admit()
        self._shift()
        if self.admitted:
            self._pass(list(self.admitted))

    # Admission

    def _admit(self) -> None:
        while self._has_place and not (self._full and self.admitted):
            job = self.waiting[0]
            text = job.text
            match = self.slots.match(text[:-1], job.request.keep_prefix)
            if self.slots.has_holes and not self.admitted and match.kept < LEAST_SHARED:
                self.slots.forget()  # attention goes on to the highest cell in use: start again from the lowest
                match = self.slots.match(text[:-1], job.request.keep_prefix)
            if self.admitted and self._in_use() + len(text) - match.kept > self.backend.n_cells:
                return  # it would only be sent back
            if self._shares and job.request.keep_prefix and self._comes_soon(text, match.kept):
                return
            self.waiting.popleft()
            slot = self.slots.take(match)
            job.shared = match.kept if match.source else 0
            self.admitted.append(job)
            try:
                job.admit(slot, text)
            except RestLocalError as error:
                self._finish(job, "error", error)
                continue
            if job.request.max_tokens == 0 and not job.prefilling:
                self._finish(job, "length")

    @property
    def _has_place(self) -> bool:
        """Whether somebody waits, and one more could be served."""
        return bool(self.waiting) and self.slots.has_idle and len(self.admitted) < self._most

    def _comes_soon(self, text: Sequence[int], kept: int) -> bool:
        """Whether somebody is about to evaluate more of this prompt than the cells hold now: eight requests with one
        system prompt that come together then evaluate it once, and none of them later than it would be on its own.
        """
        longest = max((common_prefix(job.text[:-1], text) for job in self.admitted if job.prefilling), default=0)
        return longest >= kept + LEAST_SHARED

    def _in_use(self) -> int:
        """Cells that requests at work have, or will have when their prompts are evaluated."""
        return sum(len(job.text) - job.shared for job in self.admitted)

    def _send_back(self, job: Job) -> None:
        """To the head of the queue; what it has said so far stays, its cells go."""
        log.info("out of cells: a request waits for others to finish")
        assert job.slot is not None
        assert job.generation is not None
        job.generation.give_up_cells()
        self.admitted.remove(job)
        self.slots.release(job.slot)
        self._full = True
        job.slot = None
        self.waiting.appendleft(job)

    # One forward pass

    def _pass(self, jobs: list[Job]) -> None:
        begun = time.perf_counter()
        with_parts = True
        while True:
            running = [job for job in jobs if not job.prefilling]  # anew: a pass that fails may take cells from some
            prompts = [job for job in jobs if job.prefilling]
            parts = self._parts(prompts, len(running)) if with_parts or not running else []
            try:
                outcomes = self._forward.step(self._wanted(running), parts, self.slots.idle_cells)
            except DecodeFailed as error:
                if error.code == ABORTED and any(job.generation.cancelled for job in jobs if job.generation):
                    return
                if error.code == NO_ROOM and running and parts:
                    with_parts = False
                    continue
                if error.code == NO_ROOM and len(self.admitted) > 1:
                    self._send_back(self.admitted[-1])
                    jobs = [job for job in jobs if job in self.admitted]
                    if not jobs:
                        return
                    continue  # in the same step, or two that do not fit could push each other out for ever
                in_it = [part.generation for part in parts]
                self._failed([job for job in jobs if job in running or job.generation in in_it], error)
                return
            except BaseException:  # an interrupt: tokens were chosen that nobody will get
                if self._forward.chosen:
                    for job in running:
                        self._finish(job, "cancelled")
                raise
            if parts:
                self.part_seconds.append(time.perf_counter() - begun)
            self._charge_idle(len(running))
            for job, outcome in zip(running, outcomes, strict=True):
                self._deliver(job, outcome, begun)
            for job in prompts:
                if not job.prefilling and job.request.max_tokens == 0:
                    self._finish(job, "length")
            return

    def _wanted(self, running: list[Job]) -> list[Running]:
        return [Running(job.generation, job.answer.left) for job in running if job.generation]

    def _parts(self, prompts: list[Job], n_running: int) -> list[Prompt]:
        """Parts of prompts for one pass, another one first each time."""
        if not prompts:
            return []
        left = min(self._largest_part(n_running), self.backend.n_batch - n_running)
        self._turn = (self._turn + 1) % len(prompts)
        parts: list[Prompt] = []
        for job in (*prompts[self._turn :], *prompts[: self._turn]):
            if left > 0 and job.generation:
                n_pending = len(job.generation.pending)
                if not self._shares and n_pending > 2 * LAST_PART:
                    n_pending -= LAST_PART  # so that one checkpoint lies shortly before the end
                parts.append(Prompt(job.generation, min(left, n_pending)))
                left -= parts[-1].n
        return parts

    def _largest_part(self, n_running: int) -> int:
        """A whole batch where nobody generates; else what adds STALL_MS, on the last slope of the cost curve."""
        if not n_running:
            return self.backend.n_batch
        slope = self._curve.per_token(sum(len(job.text) for job in self.admitted))
        return max(LEAST_PART, min(self.backend.n_batch, int(STALL_MS / slope)))

    def _charge_idle(self, n_running: int) -> None:
        """Every few passes: to ask the curve costs as much as a lookup."""
        self._passes += 1
        if self._passes % CHARGED_PASSES == 0 and self.slots.idle_cells:
            per_cell = self._curve.per_cell(min(max(n_running, 1), LARGEST))
            self.slots.charge(CHARGED_PASSES * per_cell, self._curve.per_token(self._in_use()))

    def _failed(self, together: list[Job], error: DecodeFailed) -> None:
        """Nothing could be evaluated for all of them together."""
        if error.code == NO_ROOM and not together[0].prefilling:
            self._finish(together[0], "length")  # the cells are full before the context is: as if it were
        elif len(together) > 1:  # one of them may be at fault: each by itself
            for job in together:
                if job in self.admitted:  # else sent back, or ended, by the pass of another
                    self._pass([job])
        else:
            self._finish(together[0], "error", error)

    # What came of it

    def _deliver(self, job: Job, outcome: Outcome, begun: float) -> None:
        if job.done:  # cancelled by who was woken for another
            return
        if not isinstance(outcome, Step):
            self._finish(job, "error", outcome)
            return
        job.give(job.answer.take(outcome, begun))
        if job.answer.ended:
            self._finish(job, "stop")
        elif job.answer.left <= 0 or _is_late(job) or self._is_full(job):
            self._finish(job, "length")

    def _is_full(self, job: Job) -> bool:
        return job.generation is not None and job.generation.room <= 0 and not job.request.context_shift

    def _shift(self) -> None:
        """Those whose context is full go on with half of the text behind their kept tokens, evaluated anew: right for
        every kind of memory, and what the model would say to that text.
        """
        for job in self.admitted:
            generation = job.generation
            if generation is None or generation.room > 0 or generation.pending:
                continue
            text = shifted(job.text, job.request.keep_tokens, self.backend.n_ctx)
            generation.resume(generation.slot, text)
            generation.sources.restart(text)
            job.result.truncated = True

    def _expire(self) -> None:
        """End those whose time is over, wherever they are: to wait for a slot or for cells takes time as well."""
        for job in [*self.admitted, *self.waiting]:
            if _is_late(job):
                self._finish(job, "length")

    def _finish(self, job: Job, reason: str, error: RestLocalError | None = None) -> None:
        """End a job wherever it is; its slot keeps what it holds until it is needed."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.admitted:
            self.admitted.remove(job)
        self._full = False
        slot, job.slot = job.slot, None
        if slot is not None:
            self.slots.release(slot)
        job.finish(reason, error)


def _is_late(job: Job) -> bool:
    """By `prompt_seconds` before the first token, by `seconds` behind it."""
    if job.answer.begun:
        return job.request.seconds is not None and job.answer.seconds > job.request.seconds
    limit = job.request.prompt_seconds
    return limit is not None and time.perf_counter() - job.submitted > limit
