"""The stages of a forward pass for any number of requests: draft, submit, read logits, verify.

Contract:

- Requests that generate give roots and trees, others a part of their prompt. All of it is one `llama_decode`.
- The node budget is shared: best first over all trees, by marginal gain under t(n).
- Whatever ends a pass (success, an interrupt, an error), the cells are back at the committed tokens after `verify`, or
  after `undo`.

On a GPU `llama_decode` returns before the work is done, and reading the logits waits for it. Only what the next
submission needs stands between the two. The rest of a pass (`RequestState.deliver`) is left to the caller: between the
next submission and its logits, or at once where a decode returns with everything computed (`overlaps` is False, as on
a CPU).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.core import Outcome, Part, Pass, RequestState, Slot, StepResult, error_of
from rest_local.decoding.images import ImageRows
from rest_local.decoding.results import PassClock
from rest_local.drafting.models.drafter import Drafter, Evaluated
from rest_local.drafting.tree import Draft
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability, EvaluatesRows
from rest_local.kv_cache.slot import BatchBuilder, rebuild
from rest_local.kv_cache.slots import Slots
from rest_local.planning.plan import TreeFailed
from rest_local.planning.policy import StepCost

ABORTED = 2  # `llama_decode` returns it if it was aborted.
_NOTHING = np.empty((0, 0), np.float32)


class RequestFailed(Exception):
    """One request cannot take part in the pass, of which nothing was evaluated yet: `error` is what it ends with."""

    def __init__(self, state: RequestState, error: RestLocalError) -> None:
        super().__init__(str(error))
        self.state, self.error = state, error


class _ErrorsOf:
    """Turns an error in its block into a `RequestFailed`, except for a failed decode, which may be due to others."""

    __slots__ = ("_state",)

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, DecodeFailed):
            raise RequestFailed(self._state, error_of(error)) from error


class Forward:
    """The stages of a pass over one backend, in order: `draft`, `submit`, `draft_ahead`, `logits`, `verify`, `go_on`.

    If one of them fails, `undo` takes the place of the rest. `capability`: which drafts the model can verify; it may
    change between two steps. `slots`: idle ones give up their cells, so that drafts can stay. `overlaps`: the device
    computes on its own after `decode` returns; None to measure it. `frame_ms`: the time in which a reader sees one
    piece of text. Steps that are faster may come several at a time.
    """

    def __init__(
        self,
        backend: Backend,
        capability: Capability,
        slots: Slots | None = None,
        overlaps: bool | None = None,
        frame_ms: float = 0.0,
        drafter: Drafter | None = None,
    ) -> None:
        self.backend, self.capability = backend, capability
        self.overlaps = bool(overlaps)
        self._frame_ms = frame_ms
        self.drafter = drafter
        self._measured = overlaps is None
        self._slots = slots
        # Seconds of waiting for the last pass, those of them that drafting ahead took, and what it usually takes.
        self._spare_s = self._ahead_s = self._usual_ahead_s = 0.0

    def undo(self, at_work: Pass) -> None:
        """Restore the cells as they were before a pass that cannot be finished."""
        for slot, n_past in zip(at_work.slots, at_work.before, strict=True):
            _put_back(slot, n_past, at_work.broken_off)

    # Drafts

    def draft(self, at_work: Pass) -> None:
        """Draft a tree for each request, then take the nodes of all trees that are worth it. Raises RequestFailed.

        Nothing is drafted in a pass with a part of a prompt: a draft has no cheap place in such a batch.
        """
        running, clock = at_work.running, at_work.clock
        n_other, n_again = len(running) - 1, sum(state.text.slot.n_again for state in running)
        for state in running:
            with _ErrorsOf(state):
                leaves = state.text.slot.branches.n if self.capability.kind == "tree" else 1
                limit = 0 if clock.prompted else self._limit(state, n_other + n_again)
                state.speculation.draft(limit, leaves, clock.n_ctx, n_other, n_again)
                if not n_other:
                    state.speculation.prune()
        if n_other > 0:
            self._share(running, clock)
            for state in running:
                with _ErrorsOf(state):
                    state.speculation.prune()

    def _limit(self, state: RequestState, n_other: int) -> int:
        """Return the most nodes that a tree may have: by the answer, the context, the batch and the model."""
        if self.capability.kind == "none":
            return 0
        places = min(self.backend.max_outputs, self.backend.n_batch) - n_other
        return max(0, min(min(state.answer.left, state.text.room, places) - 1, self.capability.longest))

    def _share(self, running: Sequence[RequestState], clock: PassClock) -> None:
        n_other = len(running) - 1
        n_again = sum(state.text.slot.n_again for state in running)
        room = max(0, min(self.backend.max_outputs, self.backend.n_batch) - 1 - n_other - n_again)
        for state in running:  # Policies that know no costs have whole trees, while there is room.
            state.speculation.cut(room)
            room -= len(state.speculation.tree)
        growing = [state for state in running if state.speculation.drafted.growth]
        if growing:
            drafts = [state.speculation.drafted for state in growing]
            begun, asked = time.perf_counter(), _asked_ms(drafts)
            try:
                order, best = growing[0].speculation.policy.grow_together(drafts, clock.n_ctx, room, n_other)
            except TreeFailed as failed:
                with _ErrorsOf(growing[failed.number]):
                    raise failed.__cause__ or failed from None
            ms = (1e3 * (time.perf_counter() - begun) - _asked_ms(drafts) + asked) / max(len(order), 1)
            for number, state in enumerate(growing):
                state.speculation.clock.draft += ms * order.count(number)
                state.speculation.cut(order[:best].count(number))

    # The pass

    def submit(self, at_work: Pass) -> None:
        """Have everything evaluated. If there is no room, free the cells of idle slots, then halve the trees.

        Raises DecodeFailed if nothing was evaluated (code 1: there is no room in the cells), and RequestFailed.
        """
        running, parts, states, clock = at_work.running, at_work.parts, at_work.states, at_work.clock
        clock.begun = time.perf_counter()
        rebuilt = False
        while True:
            batch = BatchBuilder()
            image = _image_of(running, parts)
            for state in running:
                state.speculation.add_to(batch)
            for state, n in parts:
                slot = state.text.slot
                batch.add_prompt(slot, state.text.tokens[slot.n_past : slot.n_past + n])
            if image is None:
                batch.load(self.backend.batch)
            clock.submitting = time.perf_counter()
            at_work.broken_off = True
            if image is None:
                code = self.backend.decode()
            else:
                assert isinstance(self.backend, EvaluatesRows)
                rows, pos, causal = image
                code = self.backend.decode_rows(rows, pos, batch.first_id[0], batch.n_ids[0], causal=causal)
            at_work.broken_off = code not in (0, 1, -1)
            if code == 0:
                clock.submitted = time.perf_counter()
                clock.n_nodes = sum(len(state.speculation.tree) for state in running)
                clock.again = [state.text.slot.n_again for state in running]
                for state in running:
                    if state.speculation.n_prompt:
                        state.text.slot.commit(state.speculation.n_prompt, is_turn=True)
                return
            if code == 1 and self._slots is not None and self._slots.evict():
                continue
            if code == 1 and any(len(state.speculation.tree) for state in running):  # There was no room.
                for state in running:
                    state.speculation.cut(len(state.speculation.tree) // 2)
            elif code == ABORTED and any(state.left for state in states):
                raise DecodeFailed(code, len(batch.token))
            elif (code == ABORTED or code < -1) and not rebuilt:  # It was partly applied.
                rebuilt = True
                for state in states:
                    with _ErrorsOf(state):
                        rebuild(state.text.slot, cut_back=code == ABORTED)
                    state.speculation.cut(0)
            elif code == -1 and _simplify(running, states):  # It was refused.
                continue
            else:
                if code not in (1, -1):
                    for state in states:
                        state.text.slot.clear()
                raise DecodeFailed(code, len(batch.token))

    def draft_ahead(self, at_work: Pass) -> list[tuple[RequestState, Exception]]:
        """Prepare the next drafts while the device computes, if the last pass left enough time for that.

        Return the requests that failed, with their errors.
        """
        if not self.overlaps or at_work.clock.prompted or self.drafter is not None:
            return []
        if self._spare_s < self._usual_ahead_s:
            self._usual_ahead_s *= 0.99  # It is tried again in some hundred passes.
            return []
        begun, failed = time.perf_counter(), []
        for state in at_work.running:
            try:
                if not state.done:
                    state.speculation.draft_ahead(state.answer.left)
            except Exception as error:
                failed.append((state, error))
        self._ahead_s = time.perf_counter() - begun
        self._usual_ahead_s += 0.1 * (self._ahead_s - self._usual_ahead_s)
        return failed

    def logits(self, at_work: Pass) -> NDArray[np.float32]:
        """Wait for the pass: float32 [roots and nodes, n_vocab], overwritten by the next one.

        A pass of prompts alone is waited for as well, or the first step of an answer would be charged with it.
        """
        running, clock = at_work.running, at_work.clock
        begun = time.perf_counter() - self._ahead_s
        if running:
            logits = self.backend.logits(clock.n_running + clock.n_nodes)
        else:
            logits = _NOTHING
            self.backend.synchronize()
        clock.ready = time.perf_counter()
        self._spare_s, self._ahead_s = clock.ready - begun, 0.0
        if self._measured:
            self.overlaps = clock.ready - begun > clock.submitted - clock.submitting
        return logits

    def verify(self, at_work: Pass, logits: NDArray[np.float32]) -> list[Outcome]:
        """Verify, commit and learn, request by request. Return the outcome of each, those of `parts` last.

        An outcome is at least one token for a request that generates, or the error of that request alone.
        """
        running, slots, clock = at_work.running, at_work.slots, at_work.clock
        at_work.chosen = True
        outcomes: list[Outcome] = []
        row = 0
        for number, state in enumerate(running):
            slot, own = slots[number], 1 + len(state.speculation.tree)
            n_past, mine = slot.n_past, logits[row : row + own]
            row += own
            if state.done:  # It ended while the pass was computed.
                _put_back(slot, n_past)
                outcomes.append(None)
                continue
            try:
                outcomes.append(state.speculation.take(mine, clock, number == 0, self.overlaps))
            except Exception as error:  # Its sampler may fail, which is no reason to end the others.
                _put_back(slot, n_past)
                outcomes.append(error_of(error))
        outcomes += _commit(at_work.parts, slots[len(running) :], clock)
        if self.drafter is not None:
            self.drafter.observe(_evaluated(at_work, outcomes))
        return outcomes

    def go_on(self, at_work: Pass, outcomes: list[Outcome]) -> None:
        """Do the next steps of the only request at once, as long as its policy has nothing to decide and nobody could
        see their text one by one. Each takes a few calls beside the decode; all other work is done once for all.

        A decode that fails is undone, and left to the next step. An error of the sampler becomes the outcome.
        """
        result = outcomes[0]
        if len(outcomes) > 1 or self.drafter is not None or not isinstance(result, StepResult):
            return
        state, slot, clock = at_work.running[0], at_work.slots[0], at_work.clock
        answer, speculation, verifier = state.answer, state.speculation, state.speculation.verifier
        if not answer.begun or len(result.tree) or result.rows or speculation.n_prompt or not verifier.is_plain:
            return
        most = min(speculation.policy.free_steps, answer.left - 1, state.text.room)
        most = min(most, int(self._frame_ms / max(clock.decode_ms, 1.0)) - 1)
        backend, sampler, tokens = self.backend, verifier.sampler, result.verdict.tokens
        free: list[StepCost] = []
        token = tokens[-1]
        while len(free) < most and not verifier.ends(token):
            begun, n_past = time.perf_counter(), slot.n_past
            backend.batch.replace(token, slot.position(n_past))
            at_work.broken_off = True
            code = backend.decode()
            at_work.broken_off = code not in (0, 1, -1)
            if code:
                _put_back(slot, n_past, at_work.broken_off)
                break
            row = backend.logits(1)[0]
            decode_ms = 1e3 * (time.perf_counter() - begun)
            try:
                token = sampler.sample(row)
                sampler.accept(token)
            except Exception as error:  # It is no reason to end the service.
                _put_back(slot, n_past)
                outcomes[0] = error_of(error)
                break
            tokens.append(token)
            slot.n_past += 1
            free.append(StepCost(n_past, 0, 0, decode_ms, 1e3 * (time.perf_counter() - begun) - decode_ms))
        if free:
            new = tokens[-len(free) :]
            state.text.extend(new)
            assert speculation.sources is not None
            speculation.sources.extend(new)
            slot.checkpoints.keep_in_answer(slot.n_past)
            speculation.policy.learn_free(free)
            state.statistics.count_free(free, speculation.drafted.skipped)
            at_work.n_decodes += len(free)


def _asked_ms(drafts: Sequence[Draft]) -> float:
    """Return the milliseconds that a drafting model has taken in this step."""
    return sum(drafted.model_budget.text.step_ms for drafted in drafts if drafted.model_budget)


def _commit(parts: Sequence[Part], slots: list[Slot], clock: PassClock) -> list[Outcome]:
    """Commit the parts of prompts, and return the outcome of each."""
    outcomes: list[Outcome] = []
    for (state, n), slot in zip(parts, slots, strict=True):
        state.statistics.count_prompt(clock.decode_ms)
        try:
            slot.commit(n, state.text.ends_at_cut(n))
            outcomes.append(None)
        except Exception as error:  # A checkpoint may find no memory; the tokens are committed all the same.
            outcomes.append(error_of(error))
    return outcomes


def _evaluated(at_work: Pass, outcomes: Sequence[Outcome]) -> list[Evaluated]:
    """Return the committed tokens of this pass and their rows in the batch, which a drafting model learns from."""
    found: list[Evaluated] = []
    row = 0
    followed = zip(at_work.states, at_work.slots, at_work.before, strict=True)
    held = [(slot, n_past, None if state.text.images else slot.draft_text) for state, slot, n_past in followed]
    for state, (slot, n_past, text), outcome, again in zip(
        at_work.running, held, outcomes, at_work.clock.again, strict=False
    ):
        row += again  # These tokens stand before its root.
        if isinstance(outcome, StepResult) and text is not None:
            order = layout.order if (layout := state.speculation.layout) else []
            rows = [row, *(row + 1 + order.index(node) for node in outcome.verdict.path)]
            if slot.n_past == n_past + len(rows):
                found.append(Evaluated(text, n_past, slot.tokens[n_past : slot.n_past], rows))
        row += 1 + len(state.speculation.tree)
    for (slot, n_past, text), (_, n) in zip(held[len(at_work.running) :], at_work.parts, strict=True):
        if text is not None and slot.n_past == n_past + n:
            found.append(Evaluated(text, n_past, slot.tokens[n_past : n_past + n], range(row, row + n)))
        row += n
    return found


def _put_back(slot: Slot, n_past: int, broken_off: bool = False) -> None:
    """Undo a failed pass: `n_past` tokens are committed, or what memory allows. `broken_off`: see `Slot.rewind`."""
    slot.rewind(min(n_past, slot.n_past), broken_off)


def _image_of(running: Sequence[RequestState], parts: Sequence[Part]) -> ImageRows | None:
    """Return the rows of an image, which are a pass of their own: llama.cpp takes tokens or rows."""
    if running or len(parts) != 1 or not parts[0][0].text.at_image:
        return None
    (state, n) = parts[0]
    with _ErrorsOf(state):
        return state.text.images.rows(state.text.slot, n)


def _simplify(running: Sequence[RequestState], states: Sequence[RequestState]) -> bool:
    """Drop the trees and the ids of branches, which llama.cpp may have refused. Return True if there were any."""
    simpler = False
    for state in running:
        simpler |= len(state.speculation.tree) > 0
        state.speculation.cut(0)
    for state in states:
        simpler |= state.text.slot.branches.release()
    return simpler
