"""The loop: which requests take part in the next forward pass, the pass, and what came of it.

Contract: requests over one backend, on one thread; `step` does one forward pass for all that are admitted.

- `RequestQueue` says which requests have a slot, `Prefill` how much of which prompt a pass has, and `Forward` has the
  stages of a pass. All of it is called from here, and nothing calls back.
- Where the device computes on its own, the text of a pass is delivered once the next pass is submitted. No pass is
  submitted for an answer that has ended: its tokens say so, and where there are stop strings, its text is read first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rest_local.calibration.cost import LARGEST, CostCurve, per_cell, per_token
from rest_local.decoding.core import Outcome, Pass, RequestState, error_of
from rest_local.decoding.forward import ABORTED, Forward, RequestFailed
from rest_local.decoding.prefill import Prefill
from rest_local.decoding.queue import RequestQueue
from rest_local.drafting.models.drafter import Drafter
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import LOST
from rest_local.kv_cache.slots import Slots
from rest_local.llama.projector import Rows

NO_ROOM = 1  # `llama_decode` returns it.
RESTORING_S = 0.5  # Cells are read from disk so long before something else is looked for.
CHARGED_PASSES = 16


class PassTimes:
    """Charges the time of passes to the requests in them, and to the cells of idle slots."""

    def __init__(self, slots: Slots, queue: RequestQueue, curve: CostCurve) -> None:
        self.generating = 0  # Passes that generated tokens.
        self._slots, self._queue, self._curve = slots, queue, curve
        self._uncharged_ms = 0.0  # The end of the steps before.
        self._charged_until = 0.0
        self._uncharged_passes = 0

    def begin_step(self) -> None:
        self._charged_until = time.perf_counter()

    def end_step(self) -> None:
        """Leave the time since the last pass of the step to the next step."""
        self._uncharged_ms += 1e3 * (time.perf_counter() - self._charged_until)

    def charge(self, done: Pass) -> None:
        """Share the time since the last pass out by tokens, so that what all are charged is the time that passed."""
        now = time.perf_counter()
        ms, self._uncharged_ms = self._uncharged_ms + 1e3 * (now - self._charged_until), 0.0
        self._charged_until = now
        counts = [1 + len(state.speculation.tree) + state.speculation.n_prompt for state in done.running]
        each = ms / (sum(counts) + sum(n for _, n in done.parts))
        for state, n in zip(done.running, counts, strict=True):
            state.statistics.count_share(n * each, state.speculation.n_prompt > 0)
        for state, n in done.parts:
            state.statistics.count_share(n * each, is_prompt=True)
        self._uncharged_passes += done.n_decodes
        n_running = len(done.running)
        self.generating += done.n_decodes if n_running else 0
        # Not for every pass, because asking the curve costs as much as a lookup.
        if self._uncharged_passes >= CHARGED_PASSES and (self._slots.idle_cells or self._slots.holes):
            cell_ms = per_cell(self._curve, min(max(n_running, 1), LARGEST))
            self._slots.charge(self._uncharged_passes * cell_ms, per_token(self._curve, self._queue.cells_in_use()))
            self._uncharged_passes = 0


class Scheduler:
    """Makes the forward passes of a context: admits requests, drafts, evaluates prompts, verifies. Not thread safe.

    `curve` tells how large a part of a prompt may be. `overlaps`, `frame_ms`, `drafter`: as for `Forward`; `joins`: as
    for `Prefill`.
    """

    def __init__(
        self,
        backend: Backend,
        capability: Capability,
        curve: CostCurve,
        overlaps: bool | None = None,
        frame_ms: float = 0.0,
        drafter: Drafter | None = None,
        joins: Callable[[int, int], bool] | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        shares, in_order = capability.shares, capability.shares and capability.kind == "chain"
        self.backend = backend
        self.slots = Slots(backend, shares, capability.copies, in_order, sessions, drafter)
        self.forward = Forward(backend, capability, self.slots, overlaps, frame_ms, drafter)
        self.prefill = Prefill(backend, curve, shares, joins if shares and drafter is None else None)
        self.queue = RequestQueue(backend, self.slots, shares)
        self.times = PassTimes(self.slots, self.queue, curve)

    @property
    def busy(self) -> bool:
        return bool(self.queue.waiting or self.queue.admitted)

    def submit(self, state: RequestState) -> None:
        self.queue.add(state)

    def step(self) -> Pass | None:
        """Admit the requests that can be admitted, and do one forward pass. Return None if all wait for images."""
        self.times.begin_step()
        queue = self.queue
        while (found := queue.admit()) is not None:
            self._try(found[0], self._start)
        restoring = False
        for state in list(queue.admitted):
            text = state.text
            restoring |= text.is_restoring
            if text.is_prefilling and text.images:
                self._try(state, _encode_next)
        if restoring:
            self._restore()
        done = self._pass([each for each in queue.admitted if not each.text.is_restoring])
        self.times.end_step()
        return done

    @property
    def awaited(self) -> list[Future[Rows]]:
        texts = [state.text for state in self.queue.admitted if state.text.images]
        return [rows for text in texts if (rows := text.images.missing_at(text.slot.n_past)) is not None]

    def deliver(self) -> None:
        """Finish what the last pass left to be done, request by request."""
        for state in [each for each in self.queue.admitted if each.undelivered is not None]:
            self._try(state, RequestState.deliver)

    def _try(self, state: RequestState, call: Callable[[RequestState], object]) -> None:
        """Call a function for a request. If it raises, the request ends with that error."""
        try:
            call(state)
        except Exception as error:
            self._fail(state, error)

    def cancel(self, state: RequestState) -> None:
        """End a request now. Its slot is free for the next one."""
        self._finish(state, "cancelled")

    def cancel_all(self) -> None:
        for state in self.queue:
            self.cancel(state)

    # Before a pass

    def _start(self, state: RequestState) -> None:
        state.admit(state.text.slot, self.slots)
        if not state.text.is_restoring:
            self._note_prompt(state)

    def _note_prompt(self, state: RequestState) -> None:
        """Report how much of the prompt is evaluated, and end the request if no more than that was asked for."""
        state.report_progress()
        if state.request.max_tokens == 0 and not state.text.is_prefilling:
            self._finish(state, "length")

    def _restore(self) -> None:
        """Go on reading the cells of prompts. While others generate, take no longer than a part of a prompt may."""
        restoring = [state for state in self.queue.admitted if state.text.is_restoring]
        others = len(self.queue.admitted) > len(restoring)
        for state in restoring:
            seconds = 1e-3 * self.prefill.stall_ms / len(restoring) if others else RESTORING_S
            try:
                state.restore(seconds, patient=not others)
                if not state.text.is_restoring:
                    self._note_prompt(state)
            except Exception as error:
                self._fail(state, error)

    # One forward pass

    def _pass(self, states: list[RequestState]) -> Pass | None:
        """Do one forward pass for these, or another one with less in it. Return None if there is nothing to do."""
        begun = time.perf_counter()
        planned = self.prefill.plan(states, self.slots.idle_cells) if states else None
        at_work, forward = planned, self.forward
        while at_work is not None:
            planned = at_work
            try:
                forward.draft(at_work)
                forward.submit(at_work)
                self.deliver()  # The pass before, while a device computes this one.
                for state, error in forward.draft_ahead(at_work):
                    self._fail(state, error)
                logits = forward.logits(at_work)
                outcomes = forward.verify(at_work, logits)
                forward.go_on(at_work, outcomes)
            except (DecodeFailed, RequestFailed) as error:
                forward.undo(at_work)
                at_work = self._plan_again(states, at_work, error)
            except BaseException:
                forward.undo(at_work)
                if at_work.chosen:  # An interrupt: tokens were chosen that will not be delivered.
                    for state in at_work.running:
                        self._finish(state, "cancelled")
                raise
            else:
                self._hand_out(at_work, outcomes, begun)
                break
        return planned

    def _plan_again(self, states: list[RequestState], tried: Pass, error: DecodeFailed | RequestFailed) -> Pass | None:
        """Plan another pass, now that nothing was evaluated. Return None if no request is left in this step."""
        if isinstance(error, RequestFailed):
            self._finish(error.state, "error", error.error)
        still, with_parts = [each for each in states if each in self.queue.admitted], tried.with_parts
        if isinstance(error, DecodeFailed):
            if error.code == ABORTED and any(each.left for each in still):
                return None  # They end before the next pass, which the others get.
            if error.code == NO_ROOM and tried.parts and not all(each.text.is_prefilling for each in still):
                with_parts = False
            elif error.code == NO_ROOM and len(self.queue.admitted) > 1:
                self.queue.make_room()
                # In the same step, or two that do not fit could push each other out for ever.
                still = [each for each in still if each in self.queue.admitted]
            else:
                self._give_up(tried.states, error)
                return None
        return self.prefill.plan(still, self.slots.idle_cells, with_parts)

    def _give_up(self, together: Sequence[RequestState], error: DecodeFailed) -> None:
        """Evaluate each of these by itself, or end the request, because all together could not be evaluated."""
        first = together[0]
        images = first.text.images
        evaluated_again = error.code == LOST and first.text.is_prefilling and not images.lost
        if error.code == NO_ROOM and not first.text.is_prefilling:
            self._finish(first, "length")  # The cells are full, as if the context were.
        elif len(together) > 1 or evaluated_again:
            images.lost |= len(together) == 1
            for state in together:  # One of them may be at fault.
                if state in self.queue.admitted:  # Else the pass of another has sent it back, or ended it.
                    self._pass([state])
        else:
            self._finish(first, "error", error)

    # What came of it

    def _hand_out(self, done: Pass, outcomes: list[Outcome], begun: float) -> None:
        ms = 1e3 * (time.perf_counter() - begun)
        n_prompts = sum(state.speculation.n_prompt for state in done.running) + sum(n for _, n in done.parts)
        if n_prompts:
            self.queue.unblock()
        generate = n_prompts > 0 and any(not state.speculation.n_prompt for state in done.running)
        self.prefill.learn(n_prompts, ms, generate, done.n_decodes)
        self.times.charge(done)
        for state, outcome in zip(done.states, outcomes, strict=True):
            if not state.done:  # It failed while the pass was computed, or was cancelled when another was delivered.
                try:
                    if isinstance(outcome, RestLocalError):
                        self._finish(state, "error", outcome)
                    elif outcome is None:  # A part of its prompt was evaluated.
                        self._note_prompt(state)
                    else:
                        state.receive(outcome, begun)
                        if state.answer.ended:
                            self._finish(state, "stop")
                        elif state.answer.left <= 0 or state.text.room <= 0:
                            self._finish(state, "length")
                except Exception as error:
                    self._fail(state, error)
        if not self.forward.overlaps:
            self.deliver()

    def _fail(self, state: RequestState, error: Exception) -> None:
        """End a request with an error.

        After an unexpected one its cells are freed, because their content is unknown.
        """
        if not isinstance(error, RestLocalError) and state.text.has_slot:
            state.text.slot.clear()
        self._finish(state, "error", error_of(error))

    def _finish(self, state: RequestState, reason: str, error: RestLocalError | None = None) -> None:
        """End a request wherever it is. Its slot keeps its tokens until the cells are needed."""
        self.queue.remove(state)
        state.finish(reason, error)


def _encode_next(state: RequestState) -> None:
    """Have the next image of a prompt encoded."""
    text = state.text
    wanted = lambda: not (state.done or state.left)  # noqa: E731
    state.statistics.prompt_ms += text.images.look_ahead(text.slot.n_past, wanted)
