"""Which sequences take part in the next forward pass: admission, parts of prompts, cells that run out, the end.

Contract: sequences over one backend, on one thread; `step` does one forward pass for all that are admitted.

- A free slot goes to the client that has the fewest. Of several they take turns, and of one client the sequence that
  has waited longest is first. Where a client has no slot and another one at least two, the youngest sequence of the
  client that has the most gives up its slot, once the other one has waited as long as evaluating its text again takes.
- Where the cells run out, these go, in this order: idle slots, drafts, parts of prompts, the youngest sequence (back to
  the queue). So the oldest always makes progress, and a request that fits the context alone is served in the end.
- Requests in the background have no part in a pass while others are admitted, and give up their slots and cells to
  them; they go on later from what their slots hold, or from their text.
- Long prompts are evaluated in parts, so that they do not hold up sequences that generate.
- Images are evaluated in passes of their own, and no two of these follow each other while others could progress. A
  sequence whose image is not encoded yet waits for it, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, abc, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.decoding.forward import ABORTED, Forward, Outcome, Part, SequenceFailed
from rest_local.decoding.sequence import Sequence, error_of
from rest_local.drafting.tree import common_prefix
from rest_local.errors import DecodeFailed, RestLocalError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.owner import Owner
from rest_local.kv_cache.sessions import Restoring, Sessions
from rest_local.kv_cache.slot import LOST, Slot, count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Match, Slots
from rest_local.llama.placeholders import is_first, whole
from rest_local.llama.projector import Rows

log = logging.getLogger("rest_local.scheduler")

NO_ROOM = 1  # of `llama_decode`
STALL_MS = 100.0  # what a part of a prompt may add to a step of sequences that generate
HELD_S = 0.001  # between two looks at slots that are all held, to be saved to a file or restored
LEAST_PART = 16  # tokens of it, and least of a part whose time tells how many more another may have
RESTORING_S = 0.5  # of a session from disk, between two looks at what else there is to do
LAST_PART = 32  # where memory cannot be cut back: what changes from request to request is mostly the end
CHARGED_PASSES = 16
SHIFT_KEEPS = 0.5  # of the text after the kept tokens


@dataclass
class _Pass:
    """One forward pass to try."""

    sequences: list[Sequence]  # for which it was planned; not all of them have a part in it
    with_parts: bool
    running: list[Sequence]
    parts: list[Part]

    @property
    def served(self) -> list[Sequence]:
        return [*self.running, *(sequence for sequence, _ in self.parts)]


class Scheduler:
    """Not thread safe. `curve` tells how large a part of a prompt may be. `overlaps`: as for `Forward`.

    Where the device computes on its own, the text of a pass is delivered once the next pass is submitted. No pass is
    submitted for an answer that has ended: its tokens say so, and where there are stop strings, its text is read first.

    A sequence is in `waiting` (no slot), or in `admitted` (a slot), or done.

    `stall_ms`: what a part of a prompt may add to a step of sequences that generate.
    """

    def __init__(
        self, backend: Backend, capability: Capability, curve: CostCurve, overlaps: bool | None = None
    ) -> None:
        self.backend = backend
        self.slots = Slots(backend, capability.shares)
        self.forward = Forward(backend, capability, self.slots.evict, overlaps)
        self.waiting: deque[Sequence] = deque()
        self.admitted: list[Sequence] = []  # the oldest first
        self.stall_ms = STALL_MS
        self.part_seconds: deque[float] = deque(maxlen=64)  # of passes with a part of a prompt, the newest
        self._part_ms = 0.0  # a token of the newest pass with LEAST_PART tokens of prompts; 0: none was measured
        self._shares = capability.shares
        self._most = min(backend.n_batch, backend.max_outputs)  # a pass has a place for the root of each
        self._curve = curve
        self._passes = 0
        self.generating = 0  # of them, passes that generated tokens
        self._full = False  # a sequence was sent back, and none has ended since
        self._held: Sequence | None = None  # has to wait until another one ends or gets on with its prompt
        self._uncharged_ms = 0.0  # of the steps before
        self._charged_to = 0.0  # in this step
        self._turn = 0  # which of the prompts is first
        self._round = 0  # of the sequence that was admitted last
        self._rounds: dict[str, int] = {}  # of the last sequence of each client, where that is to come
        self.sessions: Sessions | None = None
        self._restoring: dict[Sequence, Restoring] = {}  # admitted, and their prompts are read from disk
        self.was_image = False  # the newest pass evaluated an image

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.admitted)

    def submit(self, sequence: Sequence) -> None:
        client = sequence.request.client
        sequence.round = self._rounds[client] = max(self._round, self._rounds.get(client, 0)) + 1
        if sequence.request.background:
            self.waiting.append(sequence)
        else:
            self.waiting.insert(self._n_before_background, sequence)

    def step(self) -> bool:
        """Admit the sequences that can be admitted, and do one forward pass; False where all wait for images."""
        self._charged_to = time.perf_counter()
        self._expire()
        self._admit()
        self._shift()
        self._look_ahead()
        self._restore()
        served = [each for each in self.admitted if each not in self._restoring]
        first = [each for each in served if not each.request.background]
        others = [each for each in served if each.request.background]
        done = self._pass(first) or self._pass(others)
        if self.waiting and not self.admitted:
            time.sleep(HELD_S)
        self._uncharged_ms += 1e3 * (time.perf_counter() - self._charged_to)
        return done

    @property
    def awaited(self) -> list[Future[Rows]]:
        """The images that sequences wait for."""
        return [future for sequence in self.admitted if (future := sequence.waits_for) is not None]

    def _look_ahead(self) -> None:
        """Have the next image of each prompt encoded; one that cannot be ends its request."""
        for sequence in list(self.admitted):
            if sequence.has_images and sequence.is_prefilling:
                with self._errors_of(sequence):
                    sequence.look_ahead()

    def deliver(self) -> None:
        """Finish what the last pass left to be done, sequence by sequence."""
        for sequence in list(self.admitted):
            with self._errors_of(sequence):
                sequence.deliver()

    def has(self, sequence: Sequence) -> bool:
        return sequence in self.admitted or sequence in self.waiting

    def cancel(self, sequence: Sequence) -> None:
        """End it now; its slot is free for the next."""
        self._finish(sequence, "cancelled")

    def cancel_all(self) -> None:
        """End every sequence."""
        for sequence in (*self.admitted, *self.waiting):
            self.cancel(sequence)

    # Admission

    def _admit(self) -> None:
        while (sequence := self._next()) is not None:
            text, keep, user = sequence.tokens[:-1], sequence.request.keep_prefix, sequence.request.owner
            match = self.slots.match(text, keep, user)
            if not self.admitted and self.slots.starts_anew(match.kept):
                self.slots.forget()
                match = self.slots.match(text, keep, user)
            if self.admitted and self._has_to_wait(sequence, match):
                if self._give_way(sequence):
                    continue
                self._held = sequence
                return
            self.waiting.remove(sequence)
            self._round = max(self._round, sequence.round)
            self._rounds = {client: last for client, last in self._rounds.items() if last > self._round}
            slot = self.slots.take(match)
            self.admitted.append(sequence)
            with self._errors_of(sequence):
                self._own(slot, sequence)
                sequence.admit(slot)
                self._begin_to_restore(sequence)
                if sequence not in self._restoring:
                    sequence.report_progress()
                self._end_without_answer(sequence)

    def _end_without_answer(self, sequence: Sequence) -> None:
        """End a request that only has its prompt evaluated, when it is."""
        if sequence.request.max_tokens == 0 and not sequence.is_prefilling:
            self._finish(sequence, "length")

    # Sessions on disk

    def _own(self, slot: Slot, sequence: Sequence) -> None:
        request = sequence.request
        owner = Owner(request.owner, bool(request.session)) if request.keep_prefix else None
        if slot.owner is None or owner is None or slot.owner.id != owner.id:
            slot.n_saved = 0
        slot.owner, slot.user = owner, request.owner

    def _begin_to_restore(self, sequence: Sequence) -> None:
        if self.sessions is not None:
            begun = time.perf_counter()
            if (restoring := self.sessions.restore(sequence.slot)) is not None:
                self._restoring[sequence] = restoring
            sequence.note_restored(time.perf_counter() - begun)

    def _restore(self) -> None:
        """Go on with what is read from disk; while others generate, for what a part of a prompt may take."""
        for sequence, restoring in list(self._restoring.items()):
            others = len(self.admitted) > len(self._restoring)
            with self._errors_of(sequence):
                seconds = 1e-3 * self.stall_ms / len(self._restoring) if others else RESTORING_S
                begun = time.perf_counter()
                complete = restoring.advance(seconds, patient=not others)
                sequence.note_restored(time.perf_counter() - begun)
                if complete:
                    del self._restoring[sequence]
                    sequence.report_progress()
                    self._end_without_answer(sequence)

    def _next(self) -> Sequence | None:
        """The sequence that is to be admitted now, if one may be."""
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

    def _give_share(self, first: Sequence, clients: Counter[str]) -> None:
        """Send the youngest sequence of the client with the most slots back to the queue for one whose client has none,
        if that has waited long enough and would have the cells.
        """
        most = max(clients.values(), default=0)
        if clients[first.request.client] or most < 2:
            return
        youngest = next(each for each in reversed(self.admitted) if clients[each.request.client] == most)
        per_token = self._part_ms or self._curve.per_token(self._in_use())
        waited = 1e3 * (time.perf_counter() - first.submitted)
        stay = [(each.slot, len(each.tokens)) for each in self.admitted if each is not youngest and each.is_admitted]
        if waited >= per_token * len(youngest.tokens) and count_cells(stay) + len(first.tokens) <= self.backend.n_cells:
            self._leave(youngest)

    def _give_way(self, sequence: Sequence) -> bool:
        """Send the youngest in the background back to the queue for a sequence that is not; whether there was one."""
        youngest = next((each for each in reversed(self.admitted) if each.request.background), None)
        if youngest is None or sequence.request.background:
            return False
        self._leave(youngest)
        return True

    @property
    def _n_before_background(self) -> int:
        """How many wait before the first in the background."""
        return next((n for n, each in enumerate(self.waiting) if each.request.background), len(self.waiting))

    @property
    def _has_place(self) -> bool:
        """Whether a sequence waits, and one more could be served."""
        return bool(self.waiting) and self.slots.has_idle and len(self.admitted) < self._most

    def _has_to_wait(self, sequence: Sequence, match: Match) -> bool:
        """Whether it would only be sent back, or evaluate what another sequence is about to evaluate."""
        kept = (match.source or match.slot, match.kept)
        if self._in_use(kept) + len(sequence.tokens) - match.kept > self.backend.n_cells:
            return True
        return self._shares and sequence.request.keep_prefix and self._comes_soon(sequence, match.kept)

    def _comes_soon(self, sequence: Sequence, kept: int) -> bool:
        """Whether another sequence is about to evaluate more of this prompt than the cells hold now. So eight requests
        with one system prompt that come together evaluate it once, and none of them later than it would be on its own.
        """
        kind = (sequence.request.owner, sequence.request.background)
        together = [other for other in self.admitted if (other.request.owner, other.request.background) == kind]
        prefilling = (other.tokens[:-1] for other in together if other.is_prefilling)
        longest = max((common_prefix(text, sequence.tokens) for text in prefilling), default=0)
        return longest >= kept + LEAST_SHARED

    @property
    def cells_in_use(self) -> int:
        """Cells that the texts of the admitted sequences take or will take; shared ones count once."""
        return self._in_use()

    def _in_use(self, *more: tuple[Slot, int]) -> int:
        """Cells that admitted sequences have, or will have when their prompts are evaluated; and so many of `more`."""
        admitted = ((sequence.slot, len(sequence.tokens)) for sequence in self.admitted if sequence.is_admitted)
        return count_cells([*admitted, *more])

    def _send_back(self, sequence: Sequence) -> None:
        """To the head of the queue, because there are not enough cells."""
        log.info("out of cells: a request waits for others to finish")
        self._leave(sequence)
        self._full = True

    def _leave(self, sequence: Sequence) -> None:
        """To the head of the queue, or of those in the background; its text stays, its cells are freed."""
        self.slots.before_loss(sequence.slot)
        sequence.slot.clear()
        self._leave_slot(sequence)
        self._held = None
        self.waiting.insert(self._n_before_background if sequence.request.background else 0, sequence)
        with self._errors_of(sequence):
            sequence.deliver()

    # One forward pass

    def _pass(self, sequences: list[Sequence]) -> bool:
        """One forward pass for these; where it cannot be done, another one for fewer of them or with less in it. False
        where there was nothing to do.
        """
        begun = time.perf_counter()
        tried = self._plan(sequences)
        if tried is None:
            return False
        while tried is not None:
            try:
                outcomes = self.forward.step(tried.running, tried.parts, self.slots.idle_cells, self.deliver)
            except (DecodeFailed, SequenceFailed) as error:
                tried = self._plan_again(tried, error)
                continue
            except BaseException:  # an interrupt: tokens were chosen that will not be delivered
                if self.forward.chosen:
                    for sequence in tried.running:
                        self._finish(sequence, "cancelled")
                raise
            self._hand_out(tried, outcomes, begun)
            break
        return True

    def _plan(self, sequences: list[Sequence], with_parts: bool = True) -> _Pass | None:
        """A pass for these, None for none. Without parts of prompts only where some generate: all make progress."""
        if not sequences:
            return None
        running = [each for each in sequences if not each.is_prefilling]  # anew: one that failed may have taken cells
        prompts = [each for each in sequences if each.is_prefilling]
        parts: list[Part] = []
        if prompts and (with_parts or not running):
            texts = [each for each in prompts if not each.at_image]
            image = None if self.was_image and (running or texts) else self._image_part(prompts, len(running))
            self.was_image = image is not None
            if image is not None:
                return _Pass(sequences, with_parts, [], [image])
            parts = self._parts(texts, len(running)) if texts else []
        return _Pass(sequences, with_parts, running, parts) if running or parts else None

    def _plan_again(self, tried: _Pass, error: DecodeFailed | SequenceFailed) -> _Pass | None:
        """What to try now that nothing was evaluated; None where no sequence is left to be served in this step."""
        if isinstance(error, SequenceFailed):
            self._finish(error.sequence, "error", error.error)
            return self._plan([each for each in tried.sequences if not each.done], tried.with_parts)
        if error.code == ABORTED and any(each.left for each in tried.sequences):
            return None  # they end before the next pass, which the others get
        if error.code == NO_ROOM and tried.parts and not all(each.is_prefilling for each in tried.sequences):
            return self._plan(tried.sequences, with_parts=False)
        if error.code == NO_ROOM and len(self.admitted) > 1:
            if not self._give_way(tried.served[0]):
                self._send_back(self.admitted[-1])
            # in the same step, or two that do not fit could push each other out for ever
            return self._plan([each for each in tried.sequences if each in self.admitted], tried.with_parts)
        self._fail(tried.served, error)
        return None

    def _fail(self, together: list[Sequence], error: DecodeFailed) -> None:
        """Nothing could be evaluated for these together."""
        if error.code == NO_ROOM and not together[0].is_prefilling:
            self._finish(together[0], "length")  # the cells are full before the context is: as if it were
        elif len(together) > 1 or self._may_evaluate_again(together[0], error):
            for sequence in together:  # one of them may be at fault: each by itself
                if sequence in self.admitted:  # else sent back, or ended, by the pass of another
                    self._pass([sequence])
        else:
            self._finish(together[0], "error", error)

    def _may_evaluate_again(self, sequence: Sequence, error: DecodeFailed) -> bool:
        """Whether its cells were lost, images among them, for the first time."""
        again = error.code == LOST and sequence.is_prefilling and not sequence.lost_images
        sequence.lost_images |= again
        return again

    def _image_part(self, prompts: list[Sequence], n_running: int) -> Part | None:
        """Rows of one image that is ready, another sequence's each time."""
        ready = [each for each in prompts if each.at_image and each.image_is_ready]
        if not ready:
            return None
        self._turn += 1
        sequence = ready[self._turn % len(ready)]
        return sequence, sequence.next_rows(min(self._largest_part(n_running), self.backend.n_batch))

    def _parts(self, prompts: list[Sequence], n_running: int) -> list[Part]:
        """Parts of prompts for one pass, another one first each time."""
        left = min(self._largest_part(n_running), self.backend.n_batch - n_running)
        self._turn = (self._turn + 1) % len(prompts)
        parts: list[Part] = []
        for sequence in (*prompts[self._turn :], *prompts[: self._turn]):
            if left > 0:
                n_pending = sequence.n_pending
                if not self._shares and n_pending > 2 * LAST_PART:
                    n_pending -= LAST_PART  # so that one checkpoint lies shortly before the end
                parts.append((sequence, sequence.next_text(min(left, n_pending))))
                left -= parts[-1][1]
        return parts

    def _largest_part(self, n_running: int) -> int:
        """A whole batch where no sequence generates; else what adds `stall_ms`, on the last slope of the cost curve.

        However slow the machine is by the curve: no less than what takes `stall_ms` at the speed of the newest part.
        """
        if not n_running:
            return self.backend.n_batch
        slope = self._curve.per_token(sum(len(sequence.tokens) for sequence in self.admitted))
        measured = int(min(self.stall_ms / self._part_ms, self.backend.n_batch)) if self._part_ms else 0
        return max(LEAST_PART, measured, min(self.backend.n_batch, int(self.stall_ms / slope)))

    # What came of it

    def _hand_out(self, done: _Pass, outcomes: list[Outcome], begun: float) -> None:
        self._share_time(done)
        if done.parts:
            self._held = None  # there is more to share now
            self._time_parts(time.perf_counter() - begun, sum(n for _, n in done.parts))
        self._charge_idle(len(done.running))
        for sequence, outcome in zip(done.served, outcomes, strict=True):
            if not sequence.done:  # it failed while the pass was computed, or was cancelled when another was delivered
                with self._errors_of(sequence):
                    self._receive(sequence, outcome, begun)
        if not self.forward.overlaps:
            self.deliver()

    def _time_parts(self, seconds: float, n: int) -> None:
        self.part_seconds.append(seconds)
        if n >= LEAST_PART:  # the time of a few tokens is that of the pass
            self._part_ms = 1e3 * seconds / n

    def _share_time(self, done: _Pass) -> None:
        """Share the time since the last pass out by tokens, so that what all are charged is the time that passed."""
        now = time.perf_counter()
        ms, self._uncharged_ms = self._uncharged_ms + 1e3 * (now - self._charged_to), 0.0
        self._charged_to = now
        counts = [1 + len(sequence.tree) for sequence in done.running]
        each = ms / (sum(counts) + sum(n for _, n in done.parts))
        for sequence, n in zip(done.running, counts, strict=True):
            sequence.statistics.answer_share_ms += n * each
        for sequence, n in done.parts:
            if sequence.statistics.steps:  # text of an answer, evaluated anew
                sequence.statistics.answer_share_ms += n * each
            else:
                sequence.statistics.prompt_share_ms += n * each

    def _charge_idle(self, n_running: int) -> None:
        """Every few passes, because asking the curve costs as much as a lookup."""
        self._passes += 1
        self.generating += n_running > 0
        if self._passes % CHARGED_PASSES == 0 and (self.slots.idle_cells or self.slots.holes):
            per_cell = self._curve.per_cell(min(max(n_running, 1), LARGEST))
            self.slots.charge(CHARGED_PASSES * per_cell, self._curve.per_token(self._in_use()))

    def _receive(self, sequence: Sequence, outcome: Outcome, begun: float) -> None:
        if isinstance(outcome, RestLocalError):
            self._finish(sequence, "error", outcome)
            return
        if outcome is None:  # a part of its prompt
            sequence.report_progress()
            self._end_without_answer(sequence)
            return
        sequence.receive(outcome, begun)
        if sequence.answer.ended:
            self._finish(sequence, "stop")
        elif sequence.answer.left <= 0 or _is_late(sequence) or self._is_full(sequence):
            self._finish(sequence, "length")

    def _is_full(self, sequence: Sequence) -> bool:
        return sequence.room <= 0 and not sequence.request.context_shift

    def _shift(self) -> None:
        """Sequences whose context is full go on with half of the text after their kept tokens, evaluated anew: right
        for every kind of memory, and what the model would say to that text.
        """
        for sequence in list(self.admitted):
            if sequence.room > 0 or sequence.is_prefilling:
                continue
            with self._errors_of(sequence):
                sequence.replace_text(shifted(sequence.tokens, sequence.request.keep_tokens, self.backend.n_ctx))
            sequence.result.truncated = True
            self._held = None

    def _expire(self) -> None:
        """End sequences whose time is over, wherever they are: waiting for a slot or for cells takes time as well."""
        for sequence in [*self.admitted, *self.waiting]:
            if _is_late(sequence):
                self._finish(sequence, "length")

    @contextmanager
    def _errors_of(self, sequence: Sequence) -> Iterator[None]:
        """An error in here ends this sequence. If the error was not expected, its cells are given up: it is not known
        what they hold.
        """
        try:
            yield
        except RestLocalError as error:
            self._finish(sequence, "error", error)
        except Exception as error:
            if sequence.is_admitted:
                sequence.slot.clear()
            self._finish(sequence, "error", error_of(error))

    def _finish(self, sequence: Sequence, reason: str, error: RestLocalError | None = None) -> None:
        """End a sequence wherever it is; its slot keeps what it holds until it is needed."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._leave_slot(sequence)
        self._full = False
        self._held = None
        sequence.finish(reason, error)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence in self.admitted:
            self.admitted.remove(sequence)
        if (restoring := self._restoring.pop(sequence, None)) is not None:
            restoring.end()
        if (slot := sequence.release()) is not None:
            self.slots.release(slot)


def _is_late(sequence: Sequence) -> bool:
    """By `prompt_seconds` before the first token, by `seconds` after it."""
    request, answer = sequence.request, sequence.answer
    if answer.begun:
        return request.seconds is not None and answer.seconds > request.seconds
    limit = request.prompt_seconds
    return limit is not None and time.perf_counter() - sequence.submitted > limit


def shifted(text: abc.Sequence[int], keep: int, n_ctx: int) -> list[int]:
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
