"""Which requests take part in the next forward pass: admission, parts of prompts, cells that run out, the end.

Contract: requests over one backend, on one thread; `step` does one forward pass for all that are admitted.

- A free slot goes to the client that has the fewest. Of several they take turns, and of one client the request that
  has waited longest is first. Where a client has no slot and another one at least two, the youngest request of the
  client that has the most gives up its slot, once the other one has waited as long as evaluating its text again takes.
- Where the cells run out, these go, in this order: idle slots, drafts, parts of prompts, the youngest request (back to
  the queue). So the oldest always makes progress, and a request that fits the context alone is served in the end.
- Requests in the background have no part in a pass while others are admitted, and give up their slots and cells to
  them; they go on later from what their slots hold, or from their text.
- Long prompts are evaluated in parts, so that they do not hold up requests that generate.
- Images are evaluated in passes of their own, and no two of these follow each other while others could progress. A
  request whose image is not encoded yet waits for it, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.decoding.forward import ABORTED, Forward, Outcome, Part, RequestFailed
from rest_local.decoding.request_state import RequestState, error_of
from rest_local.drafting.models.drafter import Drafter
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import LOST, Slot, count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Match, Slots
from rest_local.llama.placeholders import common_prefix, is_first, whole
from rest_local.llama.projector import Rows

log = logging.getLogger("rest_local.scheduler")

NO_ROOM = 1  # of `llama_decode`
STALL_MS = 100.0  # what a part of a prompt may add to a step of requests that generate
HELD_S = 0.001  # between two looks at slots that are all held, to be saved to a file or restored
LEAST_PART = 16  # tokens of it, and least of a part whose time tells how many more another may have
RESTORING_S = 0.5  # of cells from elsewhere, between two looks at what else there is to do
CHARGED_PASSES = 16
SHIFT_KEEPS = 0.5  # of the text after the kept tokens


@dataclass
class _Pass:
    """One forward pass to try."""

    states: list[RequestState]  # for which it was planned; not all of them have a part in it
    with_parts: bool
    running: list[RequestState]
    parts: list[Part]

    @property
    def served(self) -> list[RequestState]:
        return [*self.running, *(state for state, _ in self.parts)]


class Scheduler:
    """Not thread safe. `curve` tells how large a part of a prompt may be. `overlaps`, `frame_ms`, `drafter`: as for
    `Forward`.

    Where the device computes on its own, the text of a pass is delivered once the next pass is submitted. No pass is
    submitted for an answer that has ended: its tokens say so, and where there are stop strings, its text is read first.

    A request is in `waiting` (no slot), or in `admitted` (a slot), or done.

    `stall_ms`: what a part of a prompt may add to a step of requests that generate.

    `joined`: the last tokens of a prompt and the first step of its answer are one pass if they are at most so many,
    which saves a plain step before the first token. 0 where the number of rows in a pass can change a bit: an answer
    would depend on how much of its prompt the cells held.
    """

    def __init__(
        self,
        backend: Backend,
        capability: Capability,
        curve: CostCurve,
        overlaps: bool | None = None,
        frame_ms: float = 0.0,
        drafter: Drafter | None = None,
        joined: int = 0,
        sessions: Sessions | None = None,
    ) -> None:
        self.backend = backend
        in_order = capability.shares and capability.kind == "chain"
        self.slots = Slots(backend, capability.shares, capability.copies, in_order, sessions)
        self.forward = Forward(backend, capability, self.slots, overlaps, frame_ms, drafter)
        self.waiting: deque[RequestState] = deque()
        self.admitted: list[RequestState] = []  # the oldest first
        self.stall_ms = STALL_MS
        self.part_seconds: deque[float] = deque(maxlen=64)  # of passes with a part of a prompt, the newest
        # What a token of a prompt added to the newest pass with LEAST_PART of them or more; 0: there was none.
        self._part_ms = 0.0
        self._plain_pass_s = 0.0  # The newest pass without a part of a prompt took so long.
        self._shares = capability.shares
        self._joined = joined if capability.shares and drafter is None else 0
        self._most = min(backend.n_batch, backend.max_outputs)  # a pass has a place for the root of each
        self._curve = curve
        self.n_decodes = 1  # in the newest pass
        self._uncharged_passes = 0
        self.generating = 0  # of them, passes that generated tokens
        self._full = False  # a request was sent back, and none has ended since
        self._held: RequestState | None = None  # has to wait until another one ends or gets on with its prompt
        self._uncharged_ms = 0.0  # of the steps before
        self._charged_to = 0.0  # in this step
        self._turn = 0  # which of the prompts is first
        self._round = 0  # of the request that was admitted last
        self._rounds: dict[str, int] = {}  # of the last request of each client, where that is to come
        self.was_image = False  # the newest pass evaluated an image

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.admitted)

    def submit(self, state: RequestState) -> None:
        client = state.request.client
        state.round = self._rounds[client] = max(self._round, self._rounds.get(client, 0)) + 1
        if state.request.background:
            self.waiting.append(state)
        else:
            self.waiting.insert(self._n_before_background, state)

    def step(self) -> bool:
        """Admit the requests that can be admitted, and do one forward pass; False where all wait for images."""
        self._charged_to = time.perf_counter()
        self._expire()
        self._admit()
        self._shift()
        self._look_ahead()
        if any(each.is_restoring for each in self.admitted):
            self._restore()
        served = [each for each in self.admitted if not each.is_restoring]
        first = [each for each in served if not each.request.background]
        done = self._pass(first) or self._pass([each for each in served if each.request.background])
        if self.waiting and not self.admitted:
            time.sleep(HELD_S)
        self._uncharged_ms += 1e3 * (time.perf_counter() - self._charged_to)
        return done

    @property
    def awaited(self) -> list[Future[Rows]]:
        return [future for state in self.admitted if (future := state.waits_for) is not None]

    def _look_ahead(self) -> None:
        """Have the next image of each prompt encoded; one that cannot be ends its request."""
        for state in list(self.admitted):
            if state.images and state.is_prefilling:
                self._try(state, state.look_ahead)

    def deliver(self) -> None:
        """Finish what the last pass left to be done, request by request."""
        for state in [each for each in self.admitted if each.is_undelivered]:
            self._try(state, state.deliver)

    def _try(self, state: RequestState, call: Callable[..., object], *given: object) -> None:
        """Call it; an error ends the request."""
        try:
            call(*given)
        except Exception as error:
            self.fail(state, error)

    def has(self, state: RequestState) -> bool:
        return state in self.admitted or state in self.waiting

    def cancel(self, state: RequestState) -> None:
        """End it now; its slot is free for the next."""
        self._finish(state, "cancelled")

    def cancel_all(self) -> None:
        for state in (*self.admitted, *self.waiting):
            self.cancel(state)

    # Admission

    def _admit(self) -> None:
        while (state := self._next()) is not None:
            text, keep, user = state.tokens[:-1], state.request.keep_prefix, state.request.owner
            match = self.slots.match(text, keep, user)
            if not self.admitted and self.slots.starts_anew(match.kept):
                self.slots.forget()
                match = self.slots.match(text, keep, user)
            lacks_cells = bool(self.admitted) and self._lacks_cells(state, match)
            if lacks_cells and self._give_way(state):
                continue
            if lacks_cells or self._comes_soon(state, match.kept):
                self._held = state
                return
            self.waiting.remove(state)
            self._round = max(self._round, state.round)
            self._rounds = {client: last for client, last in self._rounds.items() if last > self._round}
            slot = self.slots.take(match)
            self.admitted.append(state)
            self._try(state, self._start, state, slot)

    def _start(self, state: RequestState, slot: Slot) -> None:
        request = state.request
        slot.owner = slot.owner.passed_to(request.owner, request.keep_prefix, bool(request.session))
        state.admit(slot, self.slots)
        if not state.is_restoring:
            self._begin(state)

    def _begin(self, state: RequestState) -> None:
        """The cells hold what there was of its prompt."""
        state.report_progress()
        self._end_without_answer(state)

    def _end_without_answer(self, state: RequestState) -> None:
        """End a request that only has its prompt evaluated, when it is."""
        if state.request.max_tokens == 0 and not state.is_prefilling:
            self._finish(state, "length")

    def _restore(self) -> None:
        """Go on reading the cells of prompts; while others generate, for the time that a part of a prompt may take."""
        restoring = [state for state in self.admitted if state.is_restoring]
        others = len(self.admitted) > len(restoring)
        for state in restoring:
            seconds = 1e-3 * self.stall_ms / len(restoring) if others else RESTORING_S
            self._try(state, self._restore_more, state, seconds, not others)

    def _restore_more(self, state: RequestState, seconds: float, patient: bool) -> None:
        if state.restore(seconds, patient):
            self._begin(state)

    def _next(self) -> RequestState | None:
        """The request that is to be admitted now, if one may be."""
        if not self.waiting:
            return None
        clients = Counter(each.request.client for each in self.admitted)
        others = [each for each in self.admitted if not each.request.background]
        if not self._has_place and len(others) == len(self.admitted):
            shared = len(clients) == len(others) or all(each.request.client in clients for each in self.waiting)
            if shared:  # the usual case where requests wait: none has to give way
                return None
        ready = islice(self.waiting, self._n_before_background or None)
        first = min(ready, key=lambda each: (clients[each.request.client], each.round), default=None)
        if first is None or first is self._held or (first.request.background and others):
            return None
        if self._full and (self.admitted if first.request.background else others):
            return None
        if not self._has_place and not self._give_way(first):
            self._give_share(first, clients)
        return first if self._has_place else None

    def _give_share(self, first: RequestState, clients: Counter[str]) -> None:
        """Send the youngest request of the client with the most slots back to the queue for one whose client has none,
        if that has waited long enough and would have the cells.
        """
        most = max(clients.values(), default=0)
        if clients[first.request.client] or most < 2:
            return
        youngest = next(each for each in reversed(self.admitted) if clients[each.request.client] == most)
        per_token = self._part_ms or self._curve.per_token(self.cells_in_use())
        waited = 1e3 * (time.perf_counter() - first.submitted)
        stay = [(each.slot, len(each.tokens)) for each in self.admitted if each is not youngest and each.is_admitted]
        if waited >= per_token * len(youngest.tokens) and count_cells(stay) + len(first.tokens) <= self.backend.n_cells:
            self._leave(youngest)

    def _give_way(self, state: RequestState) -> bool:
        """Send the youngest in the background back to the queue for a request that is not; whether there was one."""
        youngest = next((each for each in reversed(self.admitted) if each.request.background), None)
        if youngest is None or state.request.background:
            return False
        self._leave(youngest)
        return True

    @property
    def _n_before_background(self) -> int:
        """How many wait before the first in the background."""
        return next((n for n, each in enumerate(self.waiting) if each.request.background), len(self.waiting))

    @property
    def _has_place(self) -> bool:
        """Whether a request waits, and one more could be served."""
        return bool(self.waiting) and self.slots.has_idle and len(self.admitted) < self._most

    def _lacks_cells(self, state: RequestState, match: Match) -> bool:
        """Whether it would only be sent back."""
        kept = (match.source or match.slot, match.kept)
        return self.cells_in_use(kept) + len(state.tokens) - match.kept > self.backend.n_cells

    def _comes_soon(self, state: RequestState, kept: int) -> bool:
        """Whether another request is about to evaluate more of this prompt than the cells hold now. So eight requests
        with one system prompt that come together evaluate it once, and none of them later than it would be on its own.
        """
        if not self._shares or not state.request.keep_prefix:
            return False
        kind = (state.request.owner, state.request.background)
        together = [other for other in self.admitted if (other.request.owner, other.request.background) == kind]
        prefilling = (other.tokens[:-1] for other in together if other.is_prefilling)
        longest = max((common_prefix(text, state.tokens) for text in prefilling), default=0)
        return longest >= kept + LEAST_SHARED

    def cells_in_use(self, *more: tuple[Slot, int]) -> int:
        """Cells that admitted requests have, or will have after their prompts, and `more`; shared ones count once."""
        admitted = ((state.slot, len(state.tokens)) for state in self.admitted if state.is_admitted)
        return count_cells([*admitted, *more])

    def _send_back(self, state: RequestState) -> None:
        """To the head of the queue, because there are not enough cells."""
        log.info("out of cells: a request waits for others to finish")
        self._leave(state)
        self._full = True

    def _leave(self, state: RequestState) -> None:
        """To the head of the queue, or of those in the background; its text stays, its cells are freed."""
        self.slots.free(state.slot)
        self._leave_slot(state)
        self._held = None
        self.waiting.insert(self._n_before_background if state.request.background else 0, state)
        self._try(state, state.deliver)

    # One forward pass

    def _pass(self, states: list[RequestState]) -> bool:
        """One forward pass for these, or another one for fewer or with less in it. False: there was nothing to do."""
        begun = time.perf_counter()
        tried, forward = self._plan(states), self.forward
        if tried is None:
            return False
        while tried is not None:
            at_work = forward.begin(tried.running, tried.parts, self.slots.idle_cells)
            try:
                forward.draft(at_work)
                forward.submit(at_work)
                self.deliver()  # the pass before, while a device computes this one
                for state, error in forward.draft_ahead(at_work):
                    self.fail(state, error)
                logits = forward.logits(at_work)
                outcomes = forward.verify(at_work, logits)
                forward.go_on(at_work, outcomes)
            except (DecodeFailed, RequestFailed) as error:
                forward.undo(at_work)
                tried = self._plan_again(tried, error)
            except BaseException:
                forward.undo(at_work)
                if forward.chosen:  # an interrupt: tokens were chosen that will not be delivered
                    for state in tried.running:
                        self._finish(state, "cancelled")
                raise
            else:
                self.n_decodes = at_work.n_decodes
                self._hand_out(tried, outcomes, begun)
                break
        return True

    def _plan(self, states: list[RequestState], with_parts: bool = True) -> _Pass | None:
        """A pass for these, None for none. Without parts of prompts only where some generate: all make progress."""
        if not states:
            return None
        running = [each for each in states if not each.is_prefilling]  # anew: one that failed may have taken cells
        prompts = [each for each in states if each.is_prefilling]
        parts: list[Part] = []
        was_image, self.was_image = self.was_image, False
        if prompts and (with_parts or not running):
            texts = [each for each in prompts if not each.at_image]
            image = None if was_image and (running or texts) else self._image_part(prompts, len(running))
            if image is not None:
                self.was_image = True
                return _Pass(states, with_parts, [], [image])
            parts = self._parts(texts, running) if texts else []
            if self._joined:
                whole = [
                    state for state, n in parts if n == state.n_pending <= self._joined and state.request.max_tokens
                ]
                running += whole
                parts = [(state, n) for state, n in parts if state not in whole]
        return _Pass(states, with_parts, running, parts) if running or parts else None

    def _plan_again(self, tried: _Pass, error: DecodeFailed | RequestFailed) -> _Pass | None:
        """What to try now that nothing was evaluated; None where no request is left to be served in this step."""
        if isinstance(error, RequestFailed):
            self._finish(error.state, "error", error.error)
            return self._plan([each for each in tried.states if not each.done], tried.with_parts)
        if error.code == ABORTED and any(each.left for each in tried.states):
            return None  # they end before the next pass, which the others get
        if error.code == NO_ROOM and tried.parts and not all(each.is_prefilling for each in tried.states):
            return self._plan(tried.states, with_parts=False)
        if error.code == NO_ROOM and len(self.admitted) > 1:
            if not self._give_way(tried.served[0]):
                self._send_back(self.admitted[-1])
            # in the same step, or two that do not fit could push each other out for ever
            return self._plan([each for each in tried.states if each in self.admitted], tried.with_parts)
        self._fail(tried.served, error)
        return None

    def _fail(self, together: list[RequestState], error: DecodeFailed) -> None:
        """Nothing could be evaluated for these together."""
        if error.code == NO_ROOM and not together[0].is_prefilling:
            self._finish(together[0], "length")  # the cells are full before the context is: as if it were
        elif len(together) > 1 or self._may_evaluate_again(together[0], error):
            for state in together:  # one of them may be at fault: each by itself
                if state in self.admitted:  # else sent back, or ended, by the pass of another
                    self._pass([state])
        else:
            self._finish(together[0], "error", error)

    def _may_evaluate_again(self, state: RequestState, error: DecodeFailed) -> bool:
        """Whether its cells were lost, images among them, for the first time."""
        again = error.code == LOST and state.is_prefilling and not state.lost_images
        state.lost_images |= again
        return again

    def _image_part(self, prompts: list[RequestState], n_running: int) -> Part | None:
        """Rows of one image that is ready, another request's each time."""
        ready = [each for each in prompts if each.at_image and each.images.ready_at(each.slot.n_past)]
        if not ready:
            return None
        self._turn += 1
        state = ready[self._turn % len(ready)]
        return state, state.images.next_rows(
            state.slot.n_past, min(self._largest_part(n_running), self.backend.n_batch)
        )

    def _parts(self, prompts: list[RequestState], running: list[RequestState]) -> list[Part]:
        """Parts of prompts for one pass, another one first each time. They get what `running` leave of the batch: each
        of these has a root in it, and tokens that are evaluated again.
        """
        taken = sum(1 + state.slot.n_again for state in running)
        roots = len(prompts) if self._joined else 0
        left = min(self._largest_part(len(running)), self.backend.n_batch - taken - roots)
        self._turn = (self._turn + 1) % len(prompts)
        parts: list[Part] = []
        for state in (*prompts[self._turn :], *prompts[: self._turn]):
            if left > 0:
                n_pending = state.n_pending if self._shares else state.n_before_cut
                parts.append((state, state.images.text_before(state.slot.n_past, min(left, n_pending))))
                left -= parts[-1][1]
        return parts

    def _largest_part(self, n_running: int) -> int:
        """A whole batch where no request generates; else what adds `stall_ms`, at the speed of the newest part. Before
        there was one, by the cost curve.
        """
        if not n_running:
            return self.backend.n_batch
        ms = self._part_ms or self._curve.per_token(sum(len(state.tokens) for state in self.admitted))
        return max(LEAST_PART, int(min(self.stall_ms / ms, self.backend.n_batch)))

    # What came of it

    def _hand_out(self, done: _Pass, outcomes: list[Outcome], begun: float) -> None:
        self._share_time(done)
        n_prompts = sum(state.n_prompt for state in done.running) + sum(n for _, n in done.parts)
        if n_prompts:
            self._held = None  # there is more to share now
            seconds = time.perf_counter() - begun
            self.part_seconds.append(seconds)
            if n_prompts >= LEAST_PART:  # the time of a few tokens is that of the pass
                others = any(not state.n_prompt for state in done.running)
                alone = self._plain_pass_s if others else 0.0
                self._part_ms = 1e3 * max(seconds - alone, 0.1 * seconds) / n_prompts
        else:
            self._plain_pass_s = (time.perf_counter() - begun) / self.n_decodes
        self._charge_idle(len(done.running))
        for state, outcome in zip(done.served, outcomes, strict=True):
            if not state.done:  # it failed while the pass was computed, or was cancelled when another was delivered
                self._try(state, self._receive, state, outcome, begun)
        if not self.forward.overlaps:
            self.deliver()

    def _share_time(self, done: _Pass) -> None:
        """Share the time since the last pass out by tokens, so that what all are charged is the time that passed."""
        now = time.perf_counter()
        ms, self._uncharged_ms = self._uncharged_ms + 1e3 * (now - self._charged_to), 0.0
        self._charged_to = now
        counts = [1 + len(state.tree) + state.n_prompt for state in done.running]
        each = ms / (sum(counts) + sum(n for _, n in done.parts))
        for state, n in zip(done.running, counts, strict=True):
            if state.n_prompt and not state.statistics.steps:
                state.statistics.prompt_share_ms += n * each
            else:
                state.statistics.answer_share_ms += n * each
        for state, n in done.parts:
            if state.statistics.steps:  # text of an answer, evaluated anew
                state.statistics.answer_share_ms += n * each
            else:
                state.statistics.prompt_share_ms += n * each

    def _charge_idle(self, n_running: int) -> None:
        """Every few passes, because asking the curve costs as much as a lookup."""
        self._uncharged_passes += self.n_decodes
        self.generating += self.n_decodes if n_running else 0
        if self._uncharged_passes >= CHARGED_PASSES and (self.slots.idle_cells or self.slots.holes):
            per_cell = self._curve.per_cell(min(max(n_running, 1), LARGEST))
            self.slots.charge(self._uncharged_passes * per_cell, self._curve.per_token(self.cells_in_use()))
            self._uncharged_passes = 0

    def _receive(self, state: RequestState, outcome: Outcome, begun: float) -> None:
        if isinstance(outcome, RestLocalError):
            self._finish(state, "error", outcome)
            return
        if outcome is None:  # a part of its prompt
            state.report_progress()
            self._end_without_answer(state)
            return
        state.receive(outcome, begun)
        if state.answer.ended:
            self._finish(state, "stop")
        elif state.answer.left <= 0 or _is_late(state) or (state.room <= 0 and not state.request.context_shift):
            self._finish(state, "length")

    def _shift(self) -> None:
        """Requests whose context is full go on with half of the text after their kept tokens, evaluated anew: right
        for every kind of memory, and what the model would say to that text.
        """
        for state in list(self.admitted):
            if state.room > 0 or state.is_prefilling:
                continue
            self._try(state, state.replace_text, shifted(state.tokens, state.request.keep_tokens, self.backend.n_ctx))
            state.result.truncated = True
            self._held = None

    def _expire(self) -> None:
        """End requests whose time is over, wherever they are: waiting for a slot or for cells takes time as well."""
        for state in [*self.admitted, *self.waiting]:
            if _is_late(state):
                self._finish(state, "length")

    def fail(self, state: RequestState, error: Exception) -> None:
        """End a request with an error. After an unexpected one its cells are given up: what they hold is unknown."""
        if not isinstance(error, RestLocalError) and state.is_admitted:
            state.slot.clear()
        self._finish(state, "error", error_of(error))

    def _finish(self, state: RequestState, reason: str, error: RestLocalError | None = None) -> None:
        """End a request wherever it is; its slot keeps what it holds until it is needed."""
        if state in self.waiting:
            self.waiting.remove(state)
        self._leave_slot(state)
        self._full = False
        self._held = None
        state.finish(reason, error)

    def _leave_slot(self, state: RequestState) -> None:
        if state in self.admitted:
            self.admitted.remove(state)
        if (slot := state.release()) is not None:
            self.slots.release(slot)


def _is_late(state: RequestState) -> bool:
    """By `prompt_seconds` before the first token, by `seconds` after it."""
    request, answer = state.request, state.answer
    if answer.begun:
        return request.seconds is not None and answer.seconds > request.seconds
    limit = request.prompt_seconds
    return limit is not None and time.perf_counter() - state.submitted > limit


def shifted(text: Sequence[int], keep: int, n_ctx: int) -> list[int]:
    """What is left of a text that the context cannot hold: its first `keep` tokens, half a context at most, and the
    newer of what follows, with fewer than `n_ctx` tokens in all; the text as it is where it has fewer.

    What is dropped depends on positions alone, in blocks of one size. So a conversation that was shifted while it was
    answered, and is sent again longer, is cut at the same place, and the cells hold the beginning of what is left. No
    image is cut: it goes as a whole.
    """
    keep = min(keep, n_ctx // 2)
    keep = whole(text, keep)
    block = n_ctx + 1 - keep - max(1, int(SHIFT_KEEPS * (n_ctx - keep)))
    blocks = max(0, -(-(len(text) - n_ctx + 1) // block))
    cut = keep + blocks * block
    if whole(text, cut) != cut:  # in an image, which goes as a whole
        cut = next(place for place in range(cut, len(text)) if text[place] >= 0 or is_first(text[place]))
    return [*text[:keep], *text[cut:]]
