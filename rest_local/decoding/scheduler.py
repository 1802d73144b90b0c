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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.decoding.faults import of_request
from rest_local.decoding.forward import ABORTED, Forward, Outcome, Prompt, RequestFailed, Running
from rest_local.decoding.job import Job
from rest_local.decoding.shift import shifted
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.slot import Slot, common_prefix, count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Match, Slots

log = logging.getLogger("rest_local.scheduler")

NO_ROOM = 1  # of `llama_decode`
STALL_MS = 100.0  # what a part of a prompt may add to a step of those who generate
LEAST_PART = 16  # tokens of it
LAST_PART = 32  # where memory cannot be cut back: what changes from request to request is mostly the end
CHARGED_PASSES = 16


@dataclass
class _Pass:
    """One forward pass to try: some of the admitted, of whom some generate and some have a part of their prompts."""

    jobs: list[Job]  # whom it was planned for; who of them has no part is not in it
    with_parts: bool
    running: list[Job]
    prompts: list[Job]
    parts: list[Prompt]  # of `prompts`, in their order

    @property
    def served(self) -> list[Job]:
        return [*self.running, *self.prompts]


class Scheduler:
    """Not thread safe. `curve` tells how large a part of a prompt may be. `overlaps`: as for `Forward`.

    Where the device computes on its own, the text of a pass is delivered once the next pass is submitted. No pass is
    submitted for an answer that has ended: its tokens say so, and where there are stop strings, its text is read first.

    A job is in `waiting` (no slot), or in `admitted` (a slot, and evaluates its prompt or generates), or done.
    """

    def __init__(
        self, backend: Backend, capability: Capability, curve: CostCurve, overlaps: bool | None = None
    ) -> None:
        self.backend = backend
        self._shares = capability.shares
        self.slots = Slots(backend, capability.shares)
        self.waiting: deque[Job] = deque()
        self.admitted: list[Job] = []  # the oldest first
        self._forward = Forward(backend, self.slots.evict, overlaps)
        self._most = min(backend.n_batch, backend.max_outputs)  # a pass has a place for the root of each
        self._curve = curve
        self._passes = 0
        self._full = False  # somebody was sent back, and nobody has ended since
        self._held: Job | None = None  # waits, as was found out, until somebody ends or gets on with a prompt
        self._unbooked_ms = 0.0  # of the steps before
        self._unbooked_since = 0.0  # in this one
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
        self._unbooked_since = time.perf_counter()
        self._expire()
        self._admit()
        self._shift()
        if self.admitted:
            self._pass(list(self.admitted))
        self._unbooked_ms += 1e3 * (time.perf_counter() - self._unbooked_since)

    def deliver(self) -> None:
        """Give out what the last pass left to be done, request by request."""
        for job in list(self.admitted):
            with self._own_fault(job):
                job.deliver()

    # Admission

    def _admit(self) -> None:
        while self._has_place and not (self._full and self.admitted) and self.waiting[0] is not self._held:
            job = self.waiting[0]
            text = job.text
            match = self.slots.match(text[:-1], job.request.keep_prefix)
            if not self.admitted and self.slots.starts_anew(match.kept):
                self.slots.forget()
                match = self.slots.match(text[:-1], job.request.keep_prefix)
            if self.admitted and self._has_to_wait(job, text, match):
                self._held = job
                return
            self.waiting.popleft()
            self._start(job, text, match)

    def _has_to_wait(self, job: Job, text: Sequence[int], match: Match) -> bool:
        """Whether it would only be sent back, or evaluate what somebody else is about to."""
        kept = (match.source or match.slot, match.kept)
        if self._in_use(kept) + len(text) - match.kept > self.backend.n_cells:
            return True
        return self._shares and job.request.keep_prefix and self._comes_soon(text, match.kept)

    def _start(self, job: Job, text: Sequence[int], match: Match) -> None:
        slot = self.slots.take(match)
        self.admitted.append(job)
        with self._own_fault(job):
            job.admit(slot, text)
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

    def _in_use(self, *more: tuple[Slot, int]) -> int:
        """Cells that requests at work have, or will have when their prompts are evaluated; and so many of `more`."""
        return count_cells([*((job.slot, job.n_tokens) for job in self.admitted if job.slot is not None), *more])

    def _send_back(self, job: Job) -> None:
        """To the head of the queue; what it has said so far stays, its cells go."""
        log.info("out of cells: a request waits for others to finish")
        assert job.slot is not None
        assert job.generation is not None
        job.generation.give_up_cells()
        self.admitted.remove(job)
        self.slots.release(job.slot)
        self._full = True
        self._held = None
        job.slot = None
        self.waiting.appendleft(job)
        with self._own_fault(job):
            job.deliver()

    # One forward pass

    def _pass(self, jobs: Sequence[Job]) -> None:
        """One forward pass for these; where it cannot be done, another one for fewer of them or with less in it."""
        begun = time.perf_counter()
        tried = self._plan(jobs)
        while tried is not None:
            try:
                running = self._wanted(tried.running)
                outcomes = self._forward.step(running, tried.parts, self.slots.idle_cells, self.deliver)
            except (DecodeFailed, RequestFailed) as error:
                tried = self._instead(tried, error)
                continue
            except BaseException:  # an interrupt: tokens were chosen that nobody will get
                if self._forward.chosen:
                    for job in tried.running:
                        self._finish(job, "cancelled")
                raise
            self._hand_out(tried, outcomes, begun)
            return

    def _plan(self, jobs: Sequence[Job], with_parts: bool = True) -> _Pass | None:
        """A pass for these, None for nobody. Without parts of prompts only where somebody generates: all get on."""
        running = [job for job in jobs if not job.prefilling]  # anew each time: one that failed may have taken cells
        prompts = [job for job in jobs if job.prefilling]
        taken = self._parts(prompts, len(running)) if with_parts or not running else []
        if not jobs:
            return None
        return _Pass(list(jobs), with_parts, running, [job for job, _ in taken], [part for _, part in taken])

    def _instead(self, tried: _Pass, error: DecodeFailed | RequestFailed) -> _Pass | None:
        """What to try now that nothing was evaluated; None where nobody is left to be served in this step."""
        if isinstance(error, RequestFailed):
            at_fault = next(job for job in tried.served if job.generation is error.generation)
            self._finish(at_fault, "error", error.error)
            return self._plan([job for job in tried.jobs if not job.done], tried.with_parts)
        if error.code == ABORTED and any(job.left for job in tried.jobs):
            return None  # they end before the next pass, which the others get
        if error.code == NO_ROOM and tried.running and tried.parts:
            return self._plan(tried.jobs, with_parts=False)
        if error.code == NO_ROOM and len(self.admitted) > 1:
            self._send_back(self.admitted[-1])
            # in the same step, or two that do not fit could push each other out for ever
            return self._plan([job for job in tried.jobs if job in self.admitted], tried.with_parts)
        self._fail(tried.served, error)
        return None

    def _fail(self, together: list[Job], error: DecodeFailed) -> None:
        """Nothing could be evaluated for these together."""
        if error.code == NO_ROOM and not together[0].prefilling:
            self._finish(together[0], "length")  # the cells are full before the context is: as if it were
        elif len(together) > 1:  # one of them may be at fault: each by itself
            for job in together:
                if job in self.admitted:  # else sent back, or ended, by the pass of another
                    self._pass([job])
        else:
            self._finish(together[0], "error", error)

    def _wanted(self, running: list[Job]) -> list[Running]:
        return [Running(job.generation, job.answer.left) for job in running if job.generation]

    def _parts(self, prompts: list[Job], n_running: int) -> list[tuple[Job, Prompt]]:
        """Parts of prompts for one pass, another one first each time."""
        if not prompts:
            return []
        left = min(self._largest_part(n_running), self.backend.n_batch - n_running)
        self._turn = (self._turn + 1) % len(prompts)
        parts: list[tuple[Job, Prompt]] = []
        for job in (*prompts[self._turn :], *prompts[: self._turn]):
            if left > 0 and job.generation:
                n_pending = len(job.generation.pending)
                if not self._shares and n_pending > 2 * LAST_PART:
                    n_pending -= LAST_PART  # so that one checkpoint lies shortly before the end
                part = Prompt(job.generation, min(left, n_pending))
                parts.append((job, part))
                left -= part.n
        return parts

    def _largest_part(self, n_running: int) -> int:
        """A whole batch where nobody generates; else what adds STALL_MS, on the last slope of the cost curve."""
        if not n_running:
            return self.backend.n_batch
        slope = self._curve.per_token(sum(job.n_tokens for job in self.admitted))
        return max(LEAST_PART, min(self.backend.n_batch, int(STALL_MS / slope)))

    def _charge_idle(self, n_running: int) -> None:
        """Every few passes: to ask the curve costs as much as a lookup."""
        self._passes += 1
        if self._passes % CHARGED_PASSES == 0 and (self.slots.idle_cells or self.slots.holes):
            per_cell = self._curve.per_cell(min(max(n_running, 1), LARGEST))
            self.slots.charge(CHARGED_PASSES * per_cell, self._curve.per_token(self._in_use()))

    # What came of it

    def _hand_out(self, done: _Pass, outcomes: Sequence[Outcome], begun: float) -> None:
        self._book(done)
        if done.parts:
            self._held = None  # there is more to share now
            self.part_seconds.append(time.perf_counter() - begun)
        self._charge_idle(len(done.running))
        for job, outcome in zip(done.served, outcomes, strict=True):
            if not job.done:  # it failed while the pass was computed, or another one's owner was woken and cancelled it
                with self._own_fault(job):
                    self._receive(job, outcome, begun)
        if not self._forward.overlaps:
            self.deliver()

    def _book(self, done: _Pass) -> None:
        """Share the time since the last pass out by tokens, so that what all are charged is the time that passed."""
        now = time.perf_counter()
        ms, self._unbooked_ms = self._unbooked_ms + 1e3 * (now - self._unbooked_since), 0.0
        self._unbooked_since = now
        counts = [1 + len(job.generation.tree) for job in done.running if job.generation]
        each = ms / (sum(counts) + sum(part.n for part in done.parts))
        for job, n in zip(done.running, counts, strict=True):
            job.answer.statistics.answer_share_ms += n * each
        for part in done.parts:
            statistics = part.generation.statistics
            if statistics.steps:  # text of an answer, evaluated anew
                statistics.answer_share_ms += part.n * each
            else:
                statistics.prompt_share_ms += part.n * each

    def _receive(self, job: Job, outcome: Outcome, begun: float) -> None:
        if isinstance(outcome, RestLocalError):
            self._finish(job, "error", outcome)
            return
        if outcome is None:  # a part of its prompt
            if not job.prefilling and job.request.max_tokens == 0:
                self._finish(job, "length")
            return
        job.receive(outcome, begun)
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
        for job in list(self.admitted):
            generation = job.generation
            if generation is None or generation.room > 0 or generation.pending:
                continue
            text = shifted(job.text, job.request.keep_tokens, self.backend.n_ctx)
            with self._own_fault(job):
                generation.resume(generation.slot, text)
                generation.sources.restart(text)
            job.result.truncated = True
            self._held = None

    def _expire(self) -> None:
        """End those whose time is over, wherever they are: to wait for a slot or for cells takes time as well."""
        for job in [*self.admitted, *self.waiting]:
            if _is_late(job):
                self._finish(job, "length")

    @contextmanager
    def _own_fault(self, job: Job) -> Iterator[None]:
        """What fails in here ends this request. Its cells are given up where nobody knows what they hold."""
        try:
            yield
        except RestLocalError as error:
            self._finish(job, "error", error)
        except Exception as error:
            if job.slot is not None:
                job.slot.clear()
            self._finish(job, "error", of_request(error))

    def _finish(self, job: Job, reason: str, error: RestLocalError | None = None) -> None:
        """End a job wherever it is; its slot keeps what it holds until it is needed."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.admitted:
            self.admitted.remove(job)
        self._full = False
        self._held = None
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
