"""One forward pass for any number of requests: draft, submit, finish the pass before, read logits, verify.

Contract:

- Requests that generate give roots and trees, others a part of their prompt. All of it is one `llama_decode`.
- The node budget is shared: best first over all trees, by marginal gain under t(n).
- Whatever ends a pass (success, an interrupt, an error), the cells are back at the committed tokens when `step` has
  returned or raised.

On a GPU `llama_decode` returns before the work is done, and reading the logits waits for it. Only what the next
submission needs stands between the two. The rest of a pass (`RequestState.deliver`) is left to the caller: between the
next submission and its logits (`meanwhile`), or at once where a decode returns with everything computed (`overlaps` is
False, as on a CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.images import ImageRows
from rest_local.decoding.request_state import RequestState, VerifiedStep, error_of
from rest_local.decoding.results import PassClock, Step
from rest_local.drafting.growth import Draft
from rest_local.drafting.models.drafter import Drafter, DraftText, Evaluated
from rest_local.drafting.tree import DraftTree
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability, EvaluatesRows
from rest_local.kv_cache.slot import BatchBuilder, Slot
from rest_local.planning.plan import TreeFailed
from rest_local.planning.policy import StepCost

ABORTED = 2  # of `llama_decode`: `Context.abort` was called
Part = tuple[RequestState, int]  # a request, and how many of its pending tokens the pass evaluates
Outcome = VerifiedStep | RestLocalError | None  # None: of a part of a prompt; an error concerns one request


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
    """Steps over one backend.

    `capability`: which drafts the model can verify; it may change between two steps. `make_room` frees the cells of an
    idle slot, so that drafts can stay; False: there is none. `overlaps`: the device computes on its own after `decode`
    returns; None to measure it.

    `frame_ms`: the time in which a reader sees one piece of text. Steps that are faster may come several at a time.

    `chosen`: the last step has asked samplers. If it broke off after that, its requests cannot go on: a sampler cannot
    go back to where the cells are.
    """

    def __init__(
        self,
        backend: Backend,
        capability: Capability,
        make_room: Callable[[], bool] = lambda: False,
        overlaps: bool | None = None,
        frame_ms: float = 0.0,
    ) -> None:
        self.backend, self.capability = backend, capability
        self.overlaps = bool(overlaps)
        self.chosen = False
        self.n_passes = 1  # in the last step
        self._frame_ms = frame_ms
        self.drafter: Drafter | None = None
        self._measured = overlaps is None
        self._make_room = make_room
        self._spare_s = 0.0  # for which the last pass was waited for, with what was drafted ahead in that time
        self._ahead_s = 0.0  # that drafting ahead took in this pass
        self._usual_ahead_s = 0.0  # that it takes
        self._broken_off = False  # whether the last decode ended neither well nor with everything restored

    def step(
        self,
        running: Sequence[RequestState],
        parts: Sequence[Part] = (),
        idle_cells: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
        ahead: Callable[[RequestState], None] = RequestState.draft_ahead,
    ) -> list[Outcome]:
        """One pass. By request, those of `parts` last: what it gave, at least a token for each of `running`, or the
        error of that request alone.

        `idle_cells`: tokens that idle slots keep. `meanwhile`: called once, when the pass is submitted. `ahead`: called
        for each of `running` after that, where the device computes long enough. Raises DecodeFailed and RequestFailed
        where nothing was evaluated (code 1: there is no room for it in the cells), and what `meanwhile` and `ahead`
        raise.
        """
        states = _all(running, parts)
        slots = [state.slot for state in states]  # a request that ends meanwhile has none
        texts = [] if self.drafter is None else [state.sources.draft_text for state in states]
        before = [slot.n_past for slot in slots]
        clock = PassClock(sum(before) + idle_cells, len(running), bool(parts))
        done = self.chosen = self._broken_off = False
        try:
            self._draft(running, clock)
            self._submit(running, parts, clock)
            meanwhile()
            if self.overlaps and not parts and self.drafter is None:
                self._draft_ahead(running, ahead)
            logits = self._read_logits(running, clock)
            self.chosen = True
            outcomes = self._take(running, slots, logits, clock) + _commit(parts, slots[len(running) :], clock)
            self.n_passes = 1
            if len(states) == 1 and self.drafter is None and isinstance(taken := outcomes[0], VerifiedStep):
                self._go_on(states[0], slots[0], taken, clock)
            done = True
            if self.drafter is not None:
                held = list(zip(slots, before, texts, strict=True))
                self.drafter.observe(_evaluated(running, parts, held, outcomes, clock.again))
            return outcomes
        finally:
            if not done:
                for slot, n_past in zip(slots, before, strict=True):
                    _put_back(slot, n_past, self._broken_off)

    # Drafts

    def _draft(self, running: Sequence[RequestState], clock: PassClock) -> None:
        """A tree for each request; then, of all trees together, the nodes that are worth it. Nothing is drafted in a
        pass with a part of a prompt: a draft has no cheap place in such a batch.
        """
        n_other, n_again = len(running) - 1, sum(state.slot.n_again for state in running)
        for state in running:
            with _ErrorsOf(state):
                leaves = state.slot.n_branches if self.capability.kind == "tree" else 1
                limit = 0 if clock.prompted else self._limit(state, n_other + n_again)
                state.draft(limit, leaves, clock.n_ctx, n_other, n_again)
                if not n_other:
                    state.prune()
        if n_other > 0:
            self._share(running, clock)
            for state in running:
                with _ErrorsOf(state):
                    state.prune()

    def _limit(self, state: RequestState, n_other: int) -> int:
        """Most nodes of a tree: by the answer, the context, the batch and the model."""
        if self.capability.kind == "none":
            return 0
        places = min(self.backend.max_outputs, self.backend.n_batch) - n_other
        return max(0, min(min(state.answer.left, state.room, places) - 1, self.capability.longest))

    def _share(self, running: Sequence[RequestState], clock: PassClock) -> None:
        n_other = len(running) - 1
        n_again = sum(state.slot.n_again for state in running)
        room = max(0, min(self.backend.max_outputs, self.backend.n_batch) - 1 - n_other - n_again)
        for state in running:  # whole trees, of policies that know no costs: while there is room
            state.tree = state.tree.cut(room)
            room -= len(state.tree)
        growing = [state for state in running if state.drafted.growth]
        if growing:
            drafts = [state.drafted for state in growing]
            begun, asked = time.perf_counter(), _asked_ms(drafts)
            try:
                order, best = growing[0].policy.grow_together(drafts, clock.n_ctx, room, n_other)
            except TreeFailed as failed:
                with _ErrorsOf(growing[failed.number]):
                    raise failed.__cause__ or failed from None
            ms = (1e3 * (time.perf_counter() - begun) - _asked_ms(drafts) + asked) / max(len(order), 1)
            for number, state in enumerate(growing):
                state.clock.draft += ms * order.count(number)
                state.tree = state.tree.cut(order[:best].count(number))

    # The pass

    def _submit(self, running: Sequence[RequestState], parts: Sequence[Part], clock: PassClock) -> None:
        """Have everything evaluated. Without room: without cells of idle slots, then with smaller trees, then none."""
        states = _all(running, parts)
        clock.begun = time.perf_counter()
        rebuilt = False
        while True:
            batch = BatchBuilder()
            image = _image_of(running, parts)
            for state in running:
                state.add_to(batch)
            for state, n in parts:
                slot = state.slot
                slot.add_prompt(batch, state.tokens[slot.n_past : slot.n_past + n])
            if image is None:
                batch.load(self.backend.batch)
            clock.submitting = time.perf_counter()
            self._broken_off = True
            if image is None:
                code = self.backend.decode()
            else:
                assert isinstance(self.backend, EvaluatesRows)
                rows, pos, causal = image
                code = self.backend.decode_rows(rows, pos, batch.first_id[0], batch.n_ids[0], causal=causal)
            self._broken_off = code not in (0, 1, -1)
            if code == 0:
                clock.submitted = time.perf_counter()
                clock.n_nodes = sum(len(state.tree) for state in running)
                clock.again = [state.slot.n_again for state in running]
                return
            if code == 1 and self._make_room():
                continue
            if code == 1 and any(len(state.tree) for state in running):  # no room, restored
                for state in running:
                    state.tree = state.tree.cut(len(state.tree) // 2)
            elif code == ABORTED and any(state.left for state in states):
                raise DecodeFailed(code, len(batch.token))
            elif (code == ABORTED or code < -1) and not rebuilt:  # partly applied
                rebuilt = True
                for state in states:
                    with _ErrorsOf(state):
                        state.slot.rebuild(cut_back=code == ABORTED)
                    state.tree = DraftTree()
            elif code == -1 and _simplify(running, states):  # refused, restored
                continue
            else:
                if code not in (1, -1):
                    for state in states:
                        state.slot.clear()
                raise DecodeFailed(code, len(batch.token))

    def _draft_ahead(self, running: Sequence[RequestState], ahead: Callable[[RequestState], None]) -> None:
        """Prepare the next drafts, where the last pass left the time that this takes."""
        if self._spare_s < self._usual_ahead_s:
            self._usual_ahead_s *= 0.99  # so that it is tried again in some hundred passes
            return
        begun = time.perf_counter()
        for state in running:
            if not state.done:
                ahead(state)
        self._ahead_s = time.perf_counter() - begun
        self._usual_ahead_s += 0.1 * (self._ahead_s - self._usual_ahead_s)

    def _read_logits(self, running: Sequence[RequestState], clock: PassClock) -> NDArray[np.float32]:
        """Wait for the pass: float32 [roots and nodes, n_vocab], overwritten by the next one.

        A pass of prompts alone is waited for as well, or the first step of an answer would be charged with it.
        """
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

    def _take(
        self, running: Sequence[RequestState], slots: list[Slot], logits: NDArray[np.float32], clock: PassClock
    ) -> list[Outcome]:
        """Verify and commit, request by request."""
        outcomes: list[Outcome] = []
        row = 0
        for number, state in enumerate(running):
            slot, own = slots[number], 1 + len(state.tree)
            n_past, mine = slot.n_past, logits[row : row + own]
            row += own
            if state.done:  # it ended while the pass was computed
                _put_back(slot, n_past)
                outcomes.append(None)
                continue
            try:
                outcomes.append(state.take(mine, clock, number == 0, self.overlaps))
            except Exception as error:  # of its sampler, say: not a reason to end the others
                _put_back(slot, n_past)
                outcomes.append(error_of(error))
        return outcomes

    def _go_on(self, state: RequestState, slot: Slot, taken: VerifiedStep, clock: PassClock) -> None:
        """Do the next steps of the only request at once, as long as its policy has nothing to decide and nobody could
        see their text one by one. Each takes a few calls beside the decode; all other work is done once for all.

        A decode that fails is undone, and left to the next step.
        """
        backend, chooser, tokens = self.backend, state.chooser, taken.verdict.tokens
        most = min(state.free_steps(taken), int(self._frame_ms / max(clock.decode_ms, 1.0)) - 1)
        free: list[StepCost] = []
        token = tokens[-1]
        while len(free) < most and not state.ends(token):
            begun, n_past = time.perf_counter(), slot.n_past
            backend.batch.replace(token, slot.position(n_past))
            self._broken_off = True
            code = backend.decode()
            self._broken_off = code not in (0, 1, -1)
            if code:
                _put_back(slot, n_past, self._broken_off)
                break
            row = backend.logits(1)[0]
            decode_ms = 1e3 * (time.perf_counter() - begun)
            token = chooser.sample(row)
            chooser.accept(token)
            tokens.append(token)
            slot.n_past += 1
            state.tokens.append(token)
            free.append(StepCost(n_past, 0, 0, decode_ms, 1e3 * (time.perf_counter() - begun) - decode_ms))
        if free:
            state.note_free_steps(free)
            self.n_passes += len(free)

    # One request by itself, without a scheduler

    def evaluate_prompt(self, state: RequestState) -> None:
        """Evaluate what an admitted request has pending; an interrupt keeps what is done. Raises DecodeFailed."""
        while state.is_prefilling:
            (error,) = self.step([], [(state, min(state.n_pending, self.backend.n_batch))])
            if isinstance(error, RestLocalError):
                raise error

    def step_alone(self, state: RequestState) -> Step:
        """One pass for one request: a token or more. Raises DecodeFailed, the cells being cleared; as the sampler."""
        self.evaluate_prompt(state)
        begun = time.perf_counter()
        try:
            (outcome,) = self.step([state])
        except RequestFailed as failed:
            raise failed.error from failed
        if isinstance(outcome, RestLocalError):
            raise outcome
        assert outcome is not None
        state.answer.receive(outcome.verdict.tokens, begun)
        return state.finish_step(outcome)


def _asked_ms(drafts: Sequence[Draft]) -> float:
    """Milliseconds that a drafting model has taken in this step."""
    return sum(drafted.model_budget.text.step_ms for drafted in drafts if drafted.model_budget)


def _commit(parts: Sequence[Part], slots: list[Slot], clock: PassClock) -> list[Outcome]:
    """What became of the parts of prompts."""
    outcomes: list[Outcome] = []
    for (state, n), slot in zip(parts, slots, strict=True):
        statistics = state.statistics
        if statistics.steps:
            statistics.again_ms += clock.decode_ms
        else:
            statistics.prompt_ms += clock.decode_ms
        try:
            slot.commit(n, state.ends_at_cut(n))
            outcomes.append(None)
        except Exception as error:  # a checkpoint finds no memory, say; the tokens are committed all the same
            outcomes.append(error_of(error))
    return outcomes


def _evaluated(
    running: Sequence[RequestState],
    parts: Sequence[Part],
    held: Sequence[tuple[Slot, int, DraftText | None]],
    outcomes: Sequence[Outcome],
    again: Sequence[int],
) -> list[Evaluated]:
    """What a drafting model learns from this pass: the committed tokens, and their rows in the batch. `held`: by
    request, its slot, the tokens in it before the pass, and what the model knows of its text. `again`: the tokens
    before its root that were evaluated again.
    """
    found: list[Evaluated] = []
    row = 0
    for state, (slot, n_past, text), outcome, before in zip(running, held, outcomes, again, strict=False):
        row += before
        if isinstance(outcome, VerifiedStep) and text is not None:
            order = state.layout.order if state.layout else []
            rows = [row, *(row + 1 + order.index(node) for node in outcome.verdict.path)]
            if slot.n_past == n_past + len(rows):
                found.append(Evaluated(text, n_past, slot.tokens[n_past : slot.n_past], rows))
        row += 1 + len(state.tree)
    for (slot, n_past, text), (_, n) in zip(held[len(running) :], parts, strict=True):
        if text is not None and slot.n_past == n_past + n:
            found.append(Evaluated(text, n_past, slot.tokens[n_past : n_past + n], range(row, row + n)))
        row += n
    return found


def _put_back(slot: Slot, n_past: int, broken_off: bool = False) -> None:
    """Undo a failed pass: `n_past` tokens are committed, or what memory allows. `broken_off`: see `Slot.rewind`."""
    slot.rewind(min(n_past, slot.n_past), broken_off)


def _image_of(running: Sequence[RequestState], parts: Sequence[Part]) -> ImageRows | None:
    """The rows of an image, which are a pass of their own: llama.cpp takes tokens or rows."""
    if running or len(parts) != 1 or not parts[0][0].at_image:
        return None
    (state, n) = parts[0]
    with _ErrorsOf(state):
        return state.images.rows(state.slot, n)


def _all(running: Sequence[RequestState], parts: Sequence[Part]) -> Sequence[RequestState]:
    return [*running, *(state for state, _ in parts)] if parts else running


def _simplify(running: Sequence[RequestState], states: Sequence[RequestState]) -> bool:
    """Drop the trees and the ids of branches, which llama.cpp may have refused; whether there were any."""
    simpler = False
    for state in running:
        simpler |= len(state.tree) > 0
        state.tree = DraftTree()
    for state in states:
        simpler |= state.slot.release_branches()
    return simpler


_NOTHING = np.empty((0, 0), np.float32)
