"""One request, from `prepare` to its last token: what it drafts, what the model says, and what of it is kept.

Contract:

- A request waits (no slot), or is admitted (a slot: it evaluates its prompt, then generates), or is done. The
  scheduler moves it along, on one thread. Its owner may call `read`, `leave` and the properties from any thread.
- `tokens` is its whole text, prompt and answer. The list is shared with the slot (whose `n_past` says how many of them
  are in the cells) and with the sources. The newest token is the *root*, which the next step evaluates.
- What one request does in a step is here; `rest_local.decoding.forward` does the step for many of them at once. A step
  that was taken is finished (`deliver`) before the next one is taken.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.images import Encode, PromptImages
from rest_local.decoding.logprobs import TokenLogprobs, entropy_of, logprobs_of
from rest_local.decoding.request import Request
from rest_local.decoding.results import PassClock, Step, StepClock, Timings
from rest_local.decoding.stream import TARGET, Answer, Piece, Progress, Result
from rest_local.decoding.verify import Chooser, Relaxed, TokenConstraint, Verdict, prune, verify, verify_chain
from rest_local.drafting.origins import Decode, origins_of
from rest_local.drafting.sources import NO_BIGRAM, SOURCES, ForcedRows, Lookup
from rest_local.drafting.tree import ROOT, Draft, DraftTree, Layout
from rest_local.errors import PromptEmpty, PromptTooLong, RestLocalError, Unexpected
from rest_local.kv_cache.restoring import Restoring, begin_restoring
from rest_local.kv_cache.slot import BatchBuilder, Slot
from rest_local.kv_cache.slots import Slots
from rest_local.llama.projector import Rows
from rest_local.planning.policy import NEWEST, NO_CHECKPOINT, Checkpoint, Policy, StepContext, StepCost

log = logging.getLogger("rest_local.faults")

LEAST_LIKELY = 0.2  # probability of an outcome from which the step after it is drafted ahead
LAST_PART = 32  # tokens of a prompt without messages, after the last cut: prompts of editors change at the end
APART = 8  # tokens: control tokens that are closer together stand between the same two messages
SEARCHED = 4096  # newest tokens of a prompt that are searched for messages, and as many of the first
RELAXED_MARK = "~"  # after the source of a token that relaxed verification accepted


class VerifiedStep(NamedTuple):
    """A verified step, whose tokens are committed: what `RequestState.finish_step` does the rest with."""

    verdict: Verdict
    relaxed: list[int]  # places of the tokens that passed only because verification is relaxed
    tree: DraftTree
    drafted: Draft
    rows: Sequence[NDArray[np.float32]]  # of logits, as `RequestState._rows_to_finish` chose them
    overlaps: bool
    told: list[TokenLogprobs] | None  # where the request wants probabilities after the samplers


class RequestState:
    """Complete when it is made; `admit` gives it a slot.

    connect     gives the sources to draft from, for the slot that it is first admitted to
    ends        whether nothing follows a token
    finished    called once, at the end
    relaxed     the rule by which a retrieved token can replace the sampled one; None: never
    constraint  nodes that it forbids are never submitted
    decode      where set, the origins of tokens are reported
    remaining   what the samplers left of the last row, where probabilities after them are reported
    encode      computes the rows of the images in the prompt
    wake        called when there are pieces, and at the end, in the thread that steps
    """

    def __init__(
        self,
        request: Request,
        policy: Policy,
        chooser: Chooser,
        answer: Answer,
        connect: Callable[[Slot], Lookup],
        ends: Callable[[int], bool],
        finished: Callable[[RequestState], None] = lambda state: None,
        *,
        relaxed: Relaxed | None = None,
        constraint: TokenConstraint | None = None,
        decode: Decode | None = None,
        remaining: Callable[[], list[tuple[int, float]]] | None = None,
        encode: Encode | None = None,
        is_control: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.request, self.policy, self.chooser, self.answer = request, policy, chooser, answer
        self.statistics = answer.statistics
        self.tokens = [int(token) for token in request.prompt]
        self.wake: Callable[[], None] | None = None
        self.submitted = time.perf_counter()
        self.round = 0  # in which the client has its turn
        self.done = False
        self.left = False  # its owner does not wait for it any more
        self.error: RestLocalError | None = None
        self.tree = DraftTree()  # of the current step: what is left of the drafted one
        self.layout: Layout | None = None
        self.n_prompt = 0  # tokens of the prompt that the newest step evaluated with the root
        self.clock = StepClock()
        self.lost_images = False  # cells of images were lost once, and evaluated again
        self.images = PromptImages(request.images, encode)
        self.images.find(self.tokens)
        self._waits_since: float | None = None  # for an image
        self._slot: Slot | None = None
        self._sources: Lookup | None = None
        self._connect, self.ends, self._finished = connect, ends, finished
        self._is_control = is_control
        self._cuts: list[int] | None = None  # of the prompt, once they are needed
        self._relaxed, self._constraint, self._decode, self._remaining = relaxed, constraint, decode, remaining
        self.drafted = Draft(self.tree)
        self._at = StepContext(0, 0, 0)  # of that draft
        self._entropies: tuple[float, ...] = ()
        self._newest_row: NDArray[np.float32] | None = None  # a buffer: a fresh one takes longer to map than to fill
        self._n_given = 0  # tokens that the slot held when it was given to this request
        self._restoring: Restoring | None = None  # while its cells are read from elsewhere
        self._again = False  # it was given another slot after a pause
        self._since = 0.0  # when it was given its first slot
        self._reported = -1  # tokens of the prompt in the last report of progress
        self._taken: VerifiedStep | None = None  # the newest step, until it is delivered
        self._pieces: deque[Piece] = deque()

    # Where it is

    @property
    def is_admitted(self) -> bool:
        return self._slot is not None

    @property
    def slot(self) -> Slot:
        """While it is admitted."""
        assert self._slot is not None
        return self._slot

    def is_in(self, slot: Slot) -> bool:
        return self._slot is slot

    @property
    def has_begun(self) -> bool:
        """Whether it was admitted before; it may wait again."""
        return self._sources is not None

    @property
    def sources(self) -> Lookup:
        """Once it has begun."""
        assert self._sources is not None
        return self._sources

    @property
    def n_pending(self) -> int:
        """Tokens that have to be evaluated before the root."""
        slot = self._slot
        return len(self.tokens) - 1 - (0 if slot is None else slot.n_past)

    @property
    def is_prefilling(self) -> bool:
        """Whether it is admitted and evaluates its prompt, or its text anew."""
        slot = self._slot  # any thread may ask
        return slot is not None and slot.n_past < len(self.tokens) - 1

    @property
    def n_before_cut(self) -> int:
        """Pending tokens before the next place where a later prompt may differ, which calls for a checkpoint."""
        if self._cuts is None:
            self._cuts = cuts_of(self.tokens, self._is_control)
        n_past, last = self.slot.n_past, len(self.tokens) - 1
        return next((cut for cut in self._cuts if cut > n_past), last) - n_past

    def ends_at_cut(self, n: int) -> bool:
        """Whether the next `n` tokens end at such a place, or at the end of the prompt."""
        place = self.slot.n_past + n
        return place == len(self.tokens) - 1 or place in (self._cuts or ())

    @property
    def room(self) -> int:
        """Tokens that can still be evaluated."""
        slot = self.slot
        return slot.backend.n_ctx - slot.n_past

    @property
    def result(self) -> Result:
        """What has come so far; complete when `done`."""
        return self.answer.result

    def leave(self) -> None:
        """Its owner does not wait for it any more: a pass that is broken off is not done again for it. Any thread."""
        self.left = True

    def admit(self, slot: Slot, slots: Slots | None = None) -> None:
        """Go to work in `slot`, after a pause as well. What `slots` lack of the text is restored from disk. Raises
        PromptEmpty, PromptTooLong.
        """
        begun = time.perf_counter()
        self._slot, self.result.slot = slot, slot.number
        if self.has_begun:
            self._again = True
            self._n_given = self._follow_text()
            self._begin_to_restore(slots)
            return
        n_prompt, self._since = len(self.tokens), begun
        if not n_prompt:
            raise PromptEmpty
        if n_prompt >= slot.backend.n_ctx:
            raise PromptTooLong(n_prompt, slot.backend.n_ctx)
        sources = self._sources = self._connect(slot)
        kept = self._n_given = self._follow_text()
        sources.restart(self.tokens)
        self.policy.begin(n_prompt)
        self.statistics.prompt_tokens, self.statistics.cached_tokens = n_prompt, kept
        self.statistics.prompt_ms = 1e3 * (time.perf_counter() - begun)
        sources.predict(self.request.prediction)
        self._begin_to_restore(slots)

    def _begin_to_restore(self, slots: Slots | None) -> None:
        begun = time.perf_counter()
        self._restoring = begin_restoring(slots, self.slot) if slots else None
        self._note_restored(time.perf_counter() - begun)

    @property
    def is_restoring(self) -> bool:
        """Whether it is admitted, and waits for cells that are read from elsewhere."""
        return self._restoring is not None

    def restore(self, seconds: float, patient: bool) -> bool:
        """Have more of them for about so long; whether that was all. `patient`: wait for them."""
        assert self._restoring is not None
        begun = time.perf_counter()
        complete = self._restoring.advance(seconds, patient)
        self._note_restored(time.perf_counter() - begun)
        if complete:
            self._restoring = None
        return complete

    def _note_restored(self, seconds: float) -> None:
        """The slot may hold more of the text than it did when it was given to this request, read in so much time."""
        n = self.slot.n_past - self._n_given
        self._n_given += n
        if not self._again:
            self.statistics.cached_tokens += n
            self.statistics.prompt_ms += 1e3 * seconds
            self.result.timings = self.answer.timings  # for whoever is told of a prompt that is cut off

    def release(self) -> Slot | None:
        """Give the slot back; the text stays."""
        slot, self._slot = self._slot, None
        if self._restoring is not None:
            self._restoring.end()
            self._restoring = None
        if self._sources is not None:
            self._sources.draft_text = None
        return slot

    def replace_text(self, tokens: list[int]) -> None:
        """Go on after another, shorter text, in the same slot."""
        self.tokens, self._cuts = tokens, None
        self.images.find(tokens)
        self._follow_text()
        self.sources.restart(tokens)

    def _follow_text(self) -> int:
        self._entropies, self.clock.entropy = (), 0.0
        self.sources.draft_text = None if self.images else self.slot.draft_text
        return self.slot.follow(self.tokens, self.images.saved)

    # Images in its text

    @property
    def at_image(self) -> bool:
        """Whether what it evaluates next is an image."""
        slot = self._slot
        return bool(self.images) and slot is not None and self.tokens[slot.n_past] < 0

    @property
    def waits_for(self) -> Future[Rows] | None:
        """The rows of an image that it needs now and that are not computed yet."""
        return self.images.future if self.at_image and not self.images.ready_at(self.slot.n_past) else None

    def look_ahead(self) -> None:
        """Have the rows of the next image computed, which the text before it is evaluated meanwhile. Counts the time in
        which there was nothing but the image to wait for. Raises what has become of the rows.
        """
        if not self.images:
            return
        self.images.look_ahead(self.slot.n_past, lambda: not (self.done or self.left))
        if self.waits_for is not None:
            self._waits_since = self._waits_since or time.perf_counter()
        elif self._waits_since is not None:
            self.statistics.prompt_ms += 1e3 * (time.perf_counter() - self._waits_since)
            self._waits_since = None
        self.images.raise_failure()

    # One step

    def draft(self, limit: int, leaves: int, n_ctx: int, n_other: int = 0, n_again: int = 0) -> None:
        """When, what and how much: make the tree of this step, of at most `limit` nodes and `leaves` leaves.

        `n_ctx`: tokens in all cells; `n_other`: roots of other requests in the same forward pass; `n_again`: tokens
        that it evaluates again.
        """
        begun = time.perf_counter()
        clock, sources = self.clock, self.sources
        clock.begin()
        if draft_text := sources.draft_text:
            draft_text.begin_step()
        forced = None if self._constraint is None else partial(self._forced, self._constraint, limit)
        before, last = [*NO_BIGRAM, *self.tokens[-2:]][-2:]
        at = self._at = StepContext(
            n_ctx, limit, leaves, self._entropies, n_other, clock.entropy, forced, (before, last), n_again,
            NO_CHECKPOINT if limit <= self.slot.backend.rollback else self._checkpoint,
        )  # fmt: skip
        drafted = self.drafted = self.policy.draft(sources, at)
        self.tree = drafted.tree
        if drafted.lookup_us is not None:
            self.statistics.lookup_us.append(drafted.lookup_us)
            clock.lookup = 1e-3 * drafted.lookup_us
        self.statistics.lookups_skipped += drafted.skipped
        clock.draft = 1e3 * (time.perf_counter() - begun)
        if draft_text:
            clock.draft -= draft_text.step_ms

    @property
    def _checkpoint(self) -> Checkpoint:
        """What a draft costs that needs one."""
        costs = self.slot.checkpoints.costs
        ms = costs.save_ms + costs.rejected * costs.restore_ms
        return Checkpoint(self.slot.backend.rollback, ms, costs.rejected, costs.again)

    def draft_ahead(self) -> None:
        """While the step is computed: prepare the next draft, for the likeliest outcome. Not for a request with a
        grammar or relaxed verification, whose tokens depend on more than the draft.
        """
        if self._constraint is None and self._relaxed is None:
            tokens = self.drafted.likely_outcome(self.tree, LEAST_LIKELY)
            if tokens and len(tokens) < self.answer.left:
                self.policy.prepare(self.sources, self._at, tokens)

    def _forced(self, constraint: TokenConstraint, most: int, path: Sequence[int]) -> list[ForcedRows]:
        """What the grammar allows only one way after the draft tokens of `path`: one row, or none."""
        text = constraint.forced(most, path)
        before, last = [*NO_BIGRAM, *self.tokens[-2:]][-2:]
        return [ForcedRows(text, (before, last))] if text else []

    def prune(self) -> None:
        """Submit nothing that the request's constraint forbids."""
        if self._constraint is not None:
            begun = time.perf_counter()
            self.tree = prune(self.tree, self._constraint)
            self.clock.draft += 1e3 * (time.perf_counter() - begun)

    def add_to(self, batch: BatchBuilder) -> None:
        """Put root and tree into the batch, the tree as far as it can be taken back; before them the end of the prompt,
        where that is not evaluated yet.
        """
        slot = self.slot
        most = slot.checkpoints.protect(len(self.tree), slot.n_past, slot.n_again)
        if most < len(self.tree):
            self.tree = self.tree.cut(most)
        self.layout = self.tree.layout() if len(self.tree) else None
        self.n_prompt = self.n_pending
        if self.n_prompt:
            begin = self.slot.n_past
            batch.add_prompt(self.slot, self.tokens[begin : begin + self.n_prompt])
        batch.add_step(self.slot, self.tree, self.layout, self.n_prompt)

    def take(
        self, logits: NDArray[np.float32], done: PassClock, first: bool = True, overlaps: bool = False
    ) -> VerifiedStep:
        """Verify the tree against its rows, float32 [1 + nodes, n_vocab], and commit what was accepted.

        Does what the next draft needs; the rest is left to `finish_step`. `first`: as for `StepClock.cost`. `overlaps`:
        the rest comes after the next decode, which overwrites the rows. Where the cells could not be cut back, they are
        evaluated again. Raises what the sampler raises; then the slot has to be rewound.
        At 152k tokens 0.03 ms for each row that is visited, and 0.1 ms.
        """
        begun = time.perf_counter()
        verdict, visited, relaxed, told = self._verify(logits)
        slot, tokens = self.slot, verdict.tokens
        self.clock.again = slot.n_again
        if not slot.accept(self.tree, self.layout, verdict.path):
            slot.clear()  # evaluated by the next pass: a decode now would overwrite the logits of the other requests
        if not slot.n_again:
            slot.checkpoints.keep_in_answer(slot.n_past)
        self.tokens += tokens
        self.sources.extend(tokens)
        rows = self._rows_to_finish(logits, visited, overlaps)
        taken = VerifiedStep(verdict, relaxed, self.tree, self.drafted, rows, overlaps, told)
        self.clock.verify = 1e3 * (time.perf_counter() - begun)
        self.clock.checkpoint = slot.checkpoints.step_ms
        self._learn(tokens[: relaxed[0]] if relaxed else tokens, len(verdict.path), done, first)
        return taken

    def _learn(self, chosen: list[int], n_accepted: int, done: PassClock, first: bool) -> None:
        """Tell the policy the result of the draft. `chosen`: the model's own tokens, up to the first relaxed one."""
        if self.n_prompt:  # as a part of a prompt; a policy learns nothing from it
            if self.statistics.steps:  # text of an answer, evaluated anew
                self.statistics.again_ms += done.decode_ms
            else:
                self.statistics.prompt_ms += done.decode_ms
            return
        begun = time.perf_counter()
        clock = self.clock
        if draft_text := self.sources.draft_text:
            clock.model, clock.queries = draft_text.step_ms, draft_text.query_ms
        self.policy.learn(self.drafted, chosen, clock.cost(done, len(self.tree), n_accepted, first))
        clock.late = 1e3 * (time.perf_counter() - begun)
        self.statistics.model_ms += clock.model
        self.statistics.decode_ms += done.decode_ms
        self.statistics.count_plain(done, not len(self.tree))
        self.statistics.step_ms += done.decode_ms + done.batch_ms + clock.own

    def free_steps(self, taken: VerifiedStep) -> int:
        """Return how many steps may follow this one at once: it drafted nothing, and neither will they."""
        if len(taken.tree) or self._constraint or self._relaxed or self._remaining or self.request.logprobs is not None:
            return 0
        if not self.answer.begun or taken.rows or self.n_prompt:
            return 0
        return min(self.policy.free_steps, self.answer.left - 1, self.room)

    def note_free_steps(self, steps: Sequence[StepCost]) -> None:
        """Do what such steps have left, whose tokens are in the text."""
        self.sources.extend(self.tokens[-len(steps) :])
        self.slot.checkpoints.keep_in_answer(self.slot.n_past)
        self.policy.learn_free(steps)
        self.statistics.count_free(steps, self.drafted.skipped)

    def finish_step(self, taken: VerifiedStep) -> Step:
        """The part of a step that no forward pass has to wait for; the next step may be drafted by now."""
        begun = time.perf_counter()
        verdict, relaxed, tree, drafted, rows, overlapped, after_sampling = taken
        self.policy.catch_up()
        if self.policy.watches_entropy:
            caught_up = time.perf_counter()
            self._entropies = (*self._entropies, *(entropy_of(row) for row in rows[-NEWEST:]))[-NEWEST:]
            if not overlapped:
                self.clock.entropy = 1e3 * (time.perf_counter() - caught_up)
        self.statistics.count_step(tree, verdict, relaxed)
        n_own = len(verdict.tokens) - len(verdict.path)
        sources = [SOURCES[tree.source[node]] for node in verdict.path] + [TARGET] * n_own
        for place in relaxed:
            sources[place] += RELAXED_MARK
        told, top = after_sampling or [], self.request.logprobs
        if top is not None and after_sampling is None:
            told = [logprobs_of(row, token, top) for row, token in zip(rows, verdict.tokens, strict=True)]
        origins = origins_of(drafted, verdict.tokens[: len(verdict.path)], self._decode) if self._decode else []
        if not overlapped:  # the next step waits for it
            ms = 1e3 * (time.perf_counter() - begun)
            self.clock.late += ms
            self.statistics.step_ms += ms
        return Step(verdict.tokens, sources, told, [*origins, *([None] * n_own)])

    def _verify(self, rows: NDArray[np.float32]) -> tuple[Verdict, list[int], list[int], list[TokenLogprobs] | None]:
        """The verdict, the row that each of its tokens was chosen from, the places of the tokens that passed only
        because verification is relaxed, and the probabilities after the samplers, where they are reported.
        """
        tree, order = self.tree, self.layout.order if self.layout else []
        if tree.n_leaves <= 1 and self._relaxed is None and self._remaining is None:
            verdict = verify_chain(tree, rows, self.chooser, self.ends)
            return verdict, list(range(len(verdict.tokens))), [], None
        visited: list[int] = []
        relaxed: list[int] = []
        told: list[TokenLogprobs] = []

        def choose(node: int) -> int:
            place = 0 if node == ROOT else 1 + order.index(node)
            row = rows[place]
            token = chosen = self.chooser.sample(row)
            if self._relaxed is not None:
                chosen = self._relaxed.relax(token, tree, node, row, self.ends)
                if chosen != token:
                    relaxed.append(len(visited))
            if self._remaining is not None:
                told.append(_after_sampling(chosen, self._remaining(), self.request.logprobs or 0))
            self.chooser.accept(chosen)
            visited.append(place)
            return chosen

        return verify(tree, choose, self.ends), visited, relaxed, None if self._remaining is None else told

    def _rows_to_finish(
        self, logits: NDArray[np.float32], visited: Sequence[int], overlaps: bool
    ) -> list[NDArray[np.float32]]:
        """The rows that `finish_step` reads: of every token for log-probabilities; of the newest NEWEST for entropies,
        or of the newest alone where it has to be copied (0.05 ms for 152k floats).
        """
        if self.request.logprobs is not None:
            rows = [logits[place] for place in visited]
            return [row.copy() for row in rows] if overlaps else rows
        if not self.policy.watches_entropy:
            return []
        if not overlaps:
            return [logits[place] for place in visited[-NEWEST:]]
        begun = time.perf_counter()
        if self._newest_row is None:
            self._newest_row = np.empty(logits.shape[1], np.float32)
        np.copyto(self._newest_row, logits[visited[-1]])
        self.clock.entropy = 1e3 * (time.perf_counter() - begun)  # the rest delays no pass
        return [self._newest_row]

    # What its owner is told

    def report_progress(self) -> None:
        """Tell how much of the prompt is evaluated, before the first token, where the request wants that: what was
        there before, each part, and the whole of it with the first token.
        """
        if not self.request.progress or self.answer.begun:
            return
        statistics, now = self.statistics, time.perf_counter()
        total, cached = statistics.prompt_tokens, statistics.cached_tokens
        first = self._reported < 0
        processed = total if self._taken is not None else cached if first else self.slot.n_past
        if processed <= self._reported or (processed == total - 1 and not first):  # the last one comes with the root
            return
        self._reported = processed
        timings = Timings(cached, processed - cached, 0.0 if first else statistics.prompt_ms)
        progress = Progress(total, processed, 0.0 if first else 1e3 * (now - self._since), timings)
        self._pieces.append(Piece("", (), (), progress=progress))
        if self.wake:
            self.wake()

    def receive(self, taken: VerifiedStep, begun: float) -> None:
        """The tokens of a step from `begun`: what decides whether the answer goes on. The rest is `deliver`."""
        self._taken = taken
        self.report_progress()
        self.answer.receive(taken.verdict.tokens, time.perf_counter() if self.n_prompt else begun)

    @property
    def is_undelivered(self) -> bool:
        """Return True if a step was received whose text cannot be read yet."""
        return self._taken is not None

    def deliver(self) -> None:
        """Finish the step that was received, and make its text readable; nothing where that was done."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        piece = self.answer.take(self.finish_step(taken))
        if piece.text or piece.tokens:
            self._pieces.append(piece)
            if self.wake:
                self.wake()

    @property
    def has_news(self) -> bool:
        """Whether `read` would give something."""
        return bool(self._pieces)

    def read(self) -> list[Piece]:
        """What has come since the last call; any thread."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    def finish(self, reason: str, error: RestLocalError | None = None) -> None:
        """The end, however it came; again does nothing."""
        if self.done:
            return
        try:
            self.deliver()
            if self.done:  # its owner cancelled it when it was woken
                return
            last = self.answer.end(reason)
            self.error = error
            self.chooser.close()
            self._finished(self)
            if last.text:
                self._pieces.append(last)
        except Exception as fault:
            self.result.finish_reason, self.error = "error", self.error or error_of(fault)
        finally:  # an interrupt in there finds it done
            self.done = True
            if self.wake:
                self.wake()


def cuts_of(tokens: Sequence[int], is_control: Callable[[int], bool]) -> list[int]:
    """Where prompts that begin as this one does are likely to differ from it, ascending, before its last token: after
    its first message, and before its last ones, since control tokens begin and end messages; a few tokens before its
    end, where it has no messages there.
    """
    last = len(tokens) - 1
    found: list[int] = []
    for place in range(last - 1, max(0, last - SEARCHED), -1):
        if is_control(tokens[place]):
            if found and found[-1] - place <= APART:
                found[-1] = place
            elif len(found) == 2:
                break
            else:
                found.append(place)
    cuts = set(found)
    if last > 2 * LAST_PART and (not found or last - found[0] > LAST_PART):
        cuts.add(last - LAST_PART)
    first = next((place for place in range(APART, min(last, SEARCHED)) if is_control(tokens[place])), 0)
    return sorted({*cuts, first} - {0})


def _after_sampling(token: int, left: list[tuple[int, float]], top: int) -> TokenLogprobs:
    """Log-probabilities of `token` among those that the samplers left (-inf: none), and of the `top` likeliest."""
    probabilities = dict(left)
    likeliest = tuple((other, math.log(each)) for other, each in left[:top] if each > 0)
    return TokenLogprobs(token, math.log(found) if (found := probabilities.get(token, 0.0)) else -math.inf, likeliest)


def error_of(error: Exception) -> RestLocalError:
    """What the owner of the request is told of an exception: errors of this program as they are; others are logged."""
    if isinstance(error, RestLocalError):
        return error
    log.error("a request ends with an error that was not expected", exc_info=error)
    told = Unexpected(error)
    told.__cause__ = error
    return told
