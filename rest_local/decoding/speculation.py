"""The steps of one request: draft tokens, verify them, and let the policy learn from the result.

Contract, in the order of a step:

- `draft` makes a tree, `prune` and `cut` take nodes off it, `add_to` puts it into the batch with the root.
- `take` verifies it, commits what was accepted, and does what the next draft needs.
- `finish` does the rest, for which no pass has to wait: the next step may be drafted and submitted by then.

Knows the text of the request and its slot, and no other request. `rest_local.decoding.forward` does a step for many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.logprobs import entropy_of
from rest_local.decoding.results import PassClock, Statistics, StepClock, StepResult
from rest_local.decoding.stream import TARGET, Piece
from rest_local.decoding.text import Text
from rest_local.decoding.verify import TokenConstraint, Verifier, prune
from rest_local.drafting.origins import Decode, origins_of
from rest_local.drafting.sources import NO_BIGRAM, SOURCES, ForcedRows, Lookup
from rest_local.drafting.tree import Draft, DraftTree, Layout
from rest_local.kv_cache.slot import BatchBuilder
from rest_local.planning.policy import NEWEST, NO_CHECKPOINT, Checkpoint, Policy, StepContext

LEAST_LIKELY = 0.2  # The next step is drafted ahead for an outcome of at least this probability.
RELAXED_MARK = "~"  # It follows the source of a token that relaxed verification accepted.


class Speculation:
    """Drafts and verifies the steps of one request. `tree` and `layout` are those of the current step.

    `sources`: what it drafts from, once the request has had a slot. `n_prompt`: tokens of the prompt that the newest
    step evaluated with the root. `decode`: makes text of tokens if the origins of tokens are reported.
    """

    sources: Lookup | None
    layout: Layout | None

    def __init__(
        self, text: Text, policy: Policy, verifier: Verifier, statistics: Statistics, decode: Decode | None = None
    ) -> None:
        self.text, self.policy, self.verifier, self.statistics = text, policy, verifier, statistics
        self.sources = self.layout = None
        self.tree = DraftTree()
        self.drafted = Draft(self.tree)
        self.n_prompt = 0
        self.clock = StepClock()
        self._decode = decode
        self._at = StepContext(0, 0, 0)
        self._entropies: tuple[float, ...] = ()

    def follow(self, sources: Lookup) -> None:
        """Draft from these sources for the text in its slot; after images a drafting model cannot follow it."""
        self.sources = sources
        sources.draft_text = None if self.text.images else self.text.slot.draft_text
        self._entropies = ()

    def leave(self) -> None:
        """Detach the text from the drafting model, because it leaves the slot."""
        if self.sources is not None:
            self.sources.draft_text = None

    # Before the pass

    def draft(self, limit: int, leaves: int, n_ctx: int, n_other: int = 0, n_again: int = 0) -> None:
        """Make the tree of this step. The policy decides when, what and how much to draft.

        `limit`, `leaves`: most nodes and leaves; `n_ctx`: tokens in all cells; `n_other`: roots of other requests in
        the same pass; `n_again`: tokens that this request evaluates again.
        """
        begun = time.perf_counter()
        clock, sources, slot = self.clock, self.sources, self.text.slot
        assert sources is not None
        clock.begin()
        if draft_text := sources.draft_text:
            draft_text.begin_step()
        before, last = (*NO_BIGRAM, *self.text.tokens[-2:])[-2:]
        constraint = self.verifier.constraint
        forced = None if constraint is None else partial(_forced, constraint, limit)
        rollback = slot.backend.rollback
        checkpoint = NO_CHECKPOINT
        if limit > rollback:
            costs = slot.checkpoints.costs
            ms = costs.save_ms + costs.rejected * costs.restore_ms
            checkpoint = Checkpoint(rollback, ms, costs.rejected, costs.again)
        at = self._at = StepContext(
            n_ctx, limit, leaves, self._entropies, n_other, forced, (before, last), n_again, checkpoint
        )
        drafted = self.drafted = self.policy.draft(sources, at)
        self.tree = drafted.tree
        if drafted.lookup_us is not None:
            self.statistics.lookup_us.append(drafted.lookup_us)
            clock.lookup = 1e-3 * drafted.lookup_us
        self.statistics.lookups_skipped += drafted.skipped
        clock.draft = 1e3 * (time.perf_counter() - begun)
        if draft_text:
            clock.draft -= draft_text.step_ms

    def cut(self, n: int) -> None:
        """Keep the first `n` nodes of the tree, which are the most promising ones."""
        self.tree = self.tree.cut(n)

    def prune(self) -> None:
        """Drop the nodes that the constraint of the request forbids."""
        if self.verifier.constraint is not None:
            begun = time.perf_counter()
            self.tree = prune(self.tree, self.verifier.constraint)
            self.clock.draft += 1e3 * (time.perf_counter() - begun)

    def add_to(self, batch: BatchBuilder) -> None:
        """Put root and tree into the batch, after the end of the prompt if that is not evaluated yet.

        Of the tree, put in as much as can be taken back.
        """
        text, slot = self.text, self.text.slot
        if (most := slot.checkpoints.protect(len(self.tree), slot.n_past, slot.n_again)) < len(self.tree):
            self.tree = self.tree.cut(most)
        self.layout = self.tree.layout() if len(self.tree) else None
        self.n_prompt = text.n_pending
        if self.n_prompt:
            batch.add_prompt(slot, text.tokens[slot.n_past : slot.n_past + self.n_prompt])
        batch.add_step(slot, self.tree, self.layout, self.n_prompt)

    # While it is computed

    def draft_ahead(self, left: int) -> None:
        """Prepare the next draft, for the likeliest outcome of this step. `left`: tokens that the answer may still
        have.

        Does nothing if the tokens depend on more than the draft: on a grammar or on relaxed verification.
        """
        if self.verifier.constraint is None and self.verifier.relaxed is None:
            tokens = self.drafted.likely_outcome(self.tree, LEAST_LIKELY)
            if tokens and len(tokens) < left:
                assert self.sources is not None
                self.policy.prepare(self.sources, self._at, tokens)

    # After it

    def take(
        self, logits: NDArray[np.float32], done: PassClock, first: bool = True, overlaps: bool = False
    ) -> StepResult:
        """Verify the tree against its rows, float32 [1 + nodes, n_vocab], and commit what was accepted.

        `first`: as for `StepClock.cost`. `overlaps`: `finish` comes after the next decode, which overwrites the rows.
        Cells that cannot be cut back are cleared and evaluated again. Raises what the sampler raises; then the slot has
        to be rewound. At 152k tokens 0.03 ms for each row that is visited, and 0.1 ms.
        """
        begun = time.perf_counter()
        text, clock, tree, statistics, sources = self.text, self.clock, self.tree, self.statistics, self.sources
        assert sources is not None
        verdict = self.verifier.verify(tree, self.layout, logits)
        slot, tokens = text.slot, verdict.tokens
        clock.again = slot.n_again
        if not slot.accept(tree, self.layout, verdict.path):
            slot.clear()  # A decode now would overwrite the logits of the other requests.
        if not slot.n_again:
            slot.checkpoints.keep_in_answer(slot.n_past)
        text.extend(tokens)
        sources.extend(tokens)
        result = StepResult(verdict, tree, self.drafted, self._rows_to_finish(logits, verdict.rows, overlaps), overlaps)
        clock.verify = 1e3 * (time.perf_counter() - begun)
        clock.checkpoint = slot.checkpoints.step_ms
        if self.n_prompt:  # A pass with a part of a prompt teaches a policy nothing.
            statistics.count_prompt(done.decode_ms)
            return result
        begun = time.perf_counter()
        if draft_text := sources.draft_text:
            clock.model, clock.queries = draft_text.step_ms, draft_text.query_ms
        chosen = tokens[: verdict.relaxed[0]] if verdict.relaxed else tokens
        self.policy.learn(self.drafted, chosen, clock.cost(done, len(tree), len(verdict.path), first))
        clock.late = 1e3 * (time.perf_counter() - begun)
        statistics.model_ms += clock.model
        statistics.decode_ms += done.decode_ms
        statistics.plain.count(done, not len(tree))
        statistics.step_ms += done.decode_ms + done.batch_ms + clock.sequence_ms
        return result

    def _rows_to_finish(
        self, logits: NDArray[np.float32], visited: Sequence[int], overlaps: bool
    ) -> list[NDArray[np.float32]]:
        """Return the rows that `finish` reads: of every token for log-probabilities, of the newest NEWEST for
        entropies.

        They are copies if the next decode comes before `finish`.
        """
        if self.verifier.n_logprobs is None:
            visited = visited[-NEWEST:] if self.policy.watches_entropy else ()
        return [logits[place].copy() if overlaps else logits[place] for place in visited]

    def finish(self, result: StepResult) -> Piece:
        """Do the part of a step that no pass has to wait for, and return its tokens with all that is reported of them.

        The next step may be drafted by now.
        """
        begun = time.perf_counter()
        verdict, tree, drafted, rows, overlapped = result
        self.policy.catch_up()
        if self.policy.watches_entropy:
            self._entropies = (*self._entropies, *(entropy_of(row) for row in rows[-NEWEST:]))[-NEWEST:]
        self.statistics.count_step(tree, verdict)
        n_own = len(verdict.tokens) - len(verdict.path)
        sources = [SOURCES[tree.source[node]] for node in verdict.path] + [TARGET] * n_own
        for place in verdict.relaxed:
            sources[place] += RELAXED_MARK
        told = self.verifier.logprobs(verdict, rows)
        origins = origins_of(drafted, verdict.tokens[: len(verdict.path)], self._decode) if self._decode else []
        if not overlapped:  # The next step waits for it.
            ms = 1e3 * (time.perf_counter() - begun)
            self.clock.late += ms
            self.statistics.step_ms += ms
        return Piece("", tuple(verdict.tokens), tuple(sources), tuple(told), (*origins, *([None] * n_own)))


def _forced(constraint: TokenConstraint, most: int, path: Sequence[int]) -> list[ForcedRows]:
    """Return the text that the grammar forces after the draft tokens of `path`: one row, or none."""
    text = constraint.forced(most, path)
    return [ForcedRows(text)] if text else []
