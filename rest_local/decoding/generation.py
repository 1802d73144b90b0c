"""One request on one slot: what it drafts, what the model says to it, and what of it is kept.

Contract: the parts of a step that concern one request, over token ids; `rest_local.decoding.forward` puts those of many
into one forward pass. Knows nothing about text. With `relaxed` (off by default) a retrieved token can take the place of
the sampled one. Each is counted, and its source ends in `RELAXED_MARK`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.constrain import Following, prune
from rest_local.decoding.entropy import entropy_of
from rest_local.decoding.logprobs import TokenLogprobs, logprobs_of
from rest_local.decoding.verify import Relaxed, Verdict, verify
from rest_local.drafting.candidates import NOTHING, SOURCES, ForcedRows
from rest_local.drafting.drafter import Draft, Growth
from rest_local.drafting.origin import Decode, Origin, origins_of
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree, Layout
from rest_local.errors import DecodeFailed, PromptEmpty, PromptTooLong
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.slot import Rows, Slot
from rest_local.planning.policy import NEWEST, Policy, StepContext, StepCost

TARGET = "target"  # the source of a token that the model chose and nobody drafted
RELAXED_MARK = "~"  # behind the source of a token that relaxed verification let pass


class Chooser(Protocol):
    """The sampler: `rest_local.llama.sampler.Sampler`, or a fake."""

    def sample(self, logits: NDArray[np.float32]) -> int: ...
    def accept(self, token: int) -> None: ...


@dataclass
class Statistics:
    """What a generation did; times in milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ms: float = 0.0
    again_ms: float = 0.0  # within the answer: evaluating text anew behind a pause or a context shift
    prompt_share_ms: float = 0.0  # of passes, its share by tokens: summed over requests, the time that passed
    answer_share_ms: float = 0.0  # likewise
    steps: int = 0
    drafts: int = 0  # steps that submitted something
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0  # of the accepted ones, those that plain decoding would not have given there
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    lookup_us: list[float] = field(default_factory=list)
    lookups_skipped: int = 0  # steps in which the policy chose not to look anything up
    decode_ms: float = 0.0
    step_ms: float = 0.0  # decode_ms and the driver's own time
    model_ms: float = 0.0  # of a draft model

    def count_step(self, tree: DraftTree, verdict: Verdict, relaxed: Sequence[int]) -> None:
        path = verdict.path
        self.steps += 1
        self.generated += len(verdict.tokens)
        self.relaxed += len(relaxed)
        self.drafts += len(tree) > 0
        self.drafted += len(tree)
        self.accepted += len(path)
        for number in set(tree.source):
            source = self.by_source.setdefault(SOURCES[number], {"drafted": 0, "accepted": 0})
            source["drafted"] += tree.source.count(number)
        for node in path:
            self.by_source[SOURCES[tree.source[node]]]["accepted"] += 1

    def to_dict(self) -> dict[str, object]:
        """The "draft" object of `--json`."""
        steps = max(self.steps, 1)
        times = np.array(self.lookup_us or [0.0])
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "relaxed": self.relaxed,
            "mat": round(self.generated / steps, 4),
            "by_source": self.by_source,
            "lookups": {"made": len(self.lookup_us), "skipped": self.lookups_skipped},
            "lookup_us": {"p50": round(float(np.median(times)), 1), "p99": round(float(np.percentile(times, 99)), 1)},
            "driver_ms_per_step": round((self.step_ms - self.decode_ms) / steps, 4),
            "decode_ms_per_step": round(self.decode_ms / steps, 4),
            **({"draft_model_ms_per_step": round(self.model_ms / steps, 4)} if self.model_ms else {}),
        }


@dataclass
class Step:
    """What one forward pass gave one request. Iterates as (token, source)."""

    tokens: list[int]
    sources: list[str]
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # by token, where asked for
    origins: list[Origin | None] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return zip(self.tokens, self.sources, strict=True)


@dataclass(slots=True)
class Taken:
    """What one forward pass gave one request. Its tokens are committed; `finish` does what no pass has to wait for."""

    tokens: list[int]
    _finish: Callable[[], Step]

    def finish(self) -> Step:
        """Statistics, log-probabilities, origins, learning and entropies: once, before the next step is taken."""
        return self._finish()


@dataclass
class Generation:
    """Call `begin`; when nothing is `pending` any more, every forward pass gives at least one token.

    The text so far is always `slot.tokens` (in the cells), then `pending`, then `root`. What moves tokens between them:
    `commit_pending` after a decode, `put_back` after one that failed, `give_up_cells` for others, `resume` in another
    slot or with less text.
    """

    backend: Backend
    slot: Slot
    policy: Policy
    sources: Lookup
    chooser: Chooser
    capability: Capability
    ends: Callable[[int], bool]
    relaxed: Relaxed | None = None
    constraint: Following | None = None  # nodes that it forbids are never submitted
    logprobs: int | None = None  # how many of the likeliest tokens to report beside each
    decode: Decode | None = None  # where set, origins of tokens are reported
    statistics: Statistics = field(default_factory=Statistics)
    pending: list[int] = field(default_factory=list)  # committed tokens that are still to be evaluated
    cancelled: bool = False  # nobody waits for it any more; set from any thread
    over: bool = False  # the request has ended: what a pass under way gives it is dropped
    root: int = -1
    tree: DraftTree = field(default_factory=DraftTree)  # of the step under way
    layout: Layout | None = None
    _drafted: Draft = field(default_factory=lambda: Draft(DraftTree()))
    _draft_ms: float = 0.0
    _learn_ms: float = 0.0  # of the step before, not charged to any yet
    _entropies: tuple[float, ...] = ()
    _entropy_ms: float = 0.0  # that computing them held up the newest step
    _newest_row: NDArray[np.float32] | None = None  # a buffer: a fresh one takes longer to map than to fill

    def begin(self, prompt: Sequence[int]) -> None:
        """Keep what the slot already holds of the prompt; the rest is `pending`, but for the last token, the root.

        Raises PromptEmpty, PromptTooLong.
        """
        if not len(prompt):
            raise PromptEmpty
        if len(prompt) >= self.backend.n_ctx:
            raise PromptTooLong(len(prompt), self.backend.n_ctx)
        begun = time.perf_counter()
        kept = self._evaluate_up_to(prompt)
        self.sources.restart(prompt)
        self.sources.predict(())
        self.policy.begin(len(prompt))
        self.statistics.prompt_tokens, self.statistics.cached_tokens = len(prompt), kept
        self.statistics.prompt_ms = 1e3 * (time.perf_counter() - begun)

    def resume(self, slot: Slot, text: Sequence[int]) -> None:
        """Go on behind `text` in a slot that holds some of it or nothing: after a pause, or with less context."""
        self.slot = slot
        self._evaluate_up_to(text)

    def _evaluate_up_to(self, text: Sequence[int]) -> int:
        kept = self.slot.keep_prefix(text[:-1])
        self.root, self._entropies, self._entropy_ms = int(text[-1]), (), 0.0
        self.pending = [int(token) for token in text[kept:-1]]
        return kept

    @property
    def room(self) -> int:
        """Tokens that can still be evaluated."""
        return self.backend.n_ctx - self.slot.n_past

    def draft(self, wanted: int, n_ctx: int, n_other: int = 0) -> None:
        """When, what and how much: make the tree of this step, for at most `wanted` tokens.

        `n_ctx`: tokens in all cells; `n_other`: roots of other requests in the same forward pass.
        """
        begun = time.perf_counter()
        if follower := self.sources.follower:  # of a pass that broke off, which nothing was learned from
            follower.step_ms = follower.asked_ms = 0.0
        limit = min(wanted, self.room) - 1
        limit = min(limit, self.backend.max_outputs - 1 - n_other, self.backend.n_batch - 1 - n_other)
        limit = 0 if self.capability.kind == "none" else max(0, min(limit, self.capability.longest))
        leaves = self.slot.n_branches if self.capability.kind == "tree" else 1
        forced = None if self.constraint is None else partial(self._forced, self.constraint, limit)
        self._drafted = self.policy.draft(
            self.sources, StepContext(n_ctx, limit, leaves, self._entropies, n_other, self._entropy_ms, forced)
        )
        self.tree = self._drafted.tree
        if self._drafted.lookup_us is not None:
            self.statistics.lookup_us.append(self._drafted.lookup_us)
        self.statistics.lookups_skipped += self._drafted.skipped
        self._draft_ms = 1e3 * (time.perf_counter() - begun)
        if follower:
            self._draft_ms -= follower.step_ms

    def _forced(self, constraint: Following, most: int, path: Sequence[int]) -> list[ForcedRows]:
        """What the request's grammar allows only one way, after the drafted tokens of `path`."""
        text = constraint.forced(most, path)
        before, last = [*NOTHING, *self.slot.tokens[-1:], self.root][-2:]
        return [ForcedRows(text, (before, last))] if text else []

    @property
    def growth(self) -> Growth | None:
        """What the tree can still grow from, beside those of others."""
        return self._drafted.growth

    def grew(self, ms: float) -> None:
        """Its share of the time in which the trees of several requests grew."""
        self._draft_ms += ms

    def cut(self, n: int) -> None:
        """Submit only the first n nodes."""
        self.tree = self.tree.cut(n)

    def prune(self) -> None:
        """Submit nothing that the request's constraint forbids."""
        if self.constraint is not None:
            begun = time.perf_counter()
            self.tree = prune(self.tree, self.constraint)
            self._draft_ms += 1e3 * (time.perf_counter() - begun)

    def add_to(self, rows: Rows) -> None:
        """Put root and tree into the batch."""
        self.layout = self.tree.layout() if len(self.tree) else None
        self.slot.add_step(rows, self.root, self.tree, self.layout)

    def take(self, logits: NDArray[np.float32], cost: StepCost, overlaps: bool = False) -> Taken:
        """Verify the tree against its rows, float32 [1 + nodes, n_vocab], and commit what was accepted.

        Does what the next draft needs; the rest is left to `Taken.finish`. `cost` is without what this request itself
        takes. `overlaps`: the rest comes after the next decode, which overwrites the rows. Where the cells could not be
        cut back, what was in them is pending again. Raises what the sampler raises; then the slot is to be rewound.
        At 152k tokens 0.03 ms for each row that is visited, and 0.1 ms.
        """
        begun = time.perf_counter()
        verdict, visited, relaxed = self._verify(logits)
        if not self.slot.accept(self.root, self.tree, self.layout, verdict.path):
            self.give_up_cells()  # to be evaluated by the next pass: a decode now would write over the others' logits
        self.root = verdict.tokens[-1]
        self.sources.extend(verdict.tokens)
        rows = self._rows_to_finish(logits, visited, overlaps)
        finish = partial(self._finish, verdict, relaxed, self.tree, self._drafted, rows, overlaps)
        driver_ms = cost.driver_ms + 1e3 * (time.perf_counter() - begun)
        self._learn(verdict.tokens[: relaxed[0]] if relaxed else verdict.tokens, cost, len(verdict.path), driver_ms)
        return Taken(verdict.tokens, finish)

    def _learn(self, said: Sequence[int], cost: StepCost, n_accepted: int, driver_ms: float) -> None:
        """Tell the policy what came of the draft. `said`: what the model chose; relaxed tokens, and what follows them,
        it did not. `driver_ms` is without drafting and learning: known here.
        """
        begun = time.perf_counter()
        lookup_ms = None  # in vain: all that drafting took; else the tree's growth is a part of what the draft costs
        if self._drafted.lookup_us is not None:
            lookup_ms = min(1e-3 * self._drafted.lookup_us, self._draft_ms) if cost.n_nodes else self._draft_ms
        own_ms = driver_ms + self._draft_ms - (lookup_ms or 0.0) + self._learn_ms
        asked_ms = self._end_questions()
        done = cost._replace(n_accepted=n_accepted, driver_ms=own_ms, lookup_ms=lookup_ms, asked_ms=asked_ms)
        self.policy.learn(self._drafted, said, done)
        self._learn_ms = 1e3 * (time.perf_counter() - begun)  # booked with the next step
        self.statistics.decode_ms += cost.decode_ms
        self.statistics.step_ms += cost.decode_ms + driver_ms + self._draft_ms + self._learn_ms

    def _finish(
        self,
        verdict: Verdict,
        relaxed: list[int],
        tree: DraftTree,
        drafted: Draft,
        rows: Sequence[NDArray[np.float32]],
        overlapped: bool,
    ) -> Step:
        """The part of a step that no forward pass has to wait for; the next step may be drafted by now."""
        begun = time.perf_counter()
        self.policy.catch_up()
        if self.policy.watches_entropy:
            caught_up = time.perf_counter()
            self._entropies = (*self._entropies, *(entropy_of(row) for row in rows[-NEWEST:]))[-NEWEST:]
            self._entropy_ms = 0.0 if overlapped else 1e3 * (time.perf_counter() - caught_up)
        self.statistics.count_step(tree, verdict, relaxed)
        sources = [SOURCES[tree.source[node]] for node in verdict.path] + [TARGET]
        for place in relaxed:
            sources[place] += RELAXED_MARK
        told = []
        if self.logprobs is not None:
            told = [logprobs_of(row, token, self.logprobs) for row, token in zip(rows, verdict.tokens, strict=True)]
        origins = origins_of(drafted, verdict.tokens[:-1], self.decode) if self.decode else []
        if not overlapped:  # the next step waits for it
            ms = 1e3 * (time.perf_counter() - begun)
            self._learn_ms += ms
            self.statistics.step_ms += ms
        return Step(verdict.tokens, sources, told, [*origins, None])

    def _end_questions(self) -> float:
        """What asking a draft model took in this step; catching up with the text is counted, but not this step's."""
        follower = self.sources.follower
        if follower is None:
            return 0.0
        self.statistics.model_ms += follower.step_ms
        return follower.asked_ms

    def _verify(self, rows: NDArray[np.float32]) -> tuple[Verdict, list[int], list[int]]:
        """The verdict, the row that each of its tokens was chosen from, and the places of the tokens that passed only
        because verification is relaxed.
        """
        tree, order = self.tree, self.layout.order if self.layout else []
        visited: list[int] = []
        relaxed: list[int] = []

        def choose(node: int) -> int:
            place = 0 if node == ROOT else 1 + order.index(node)
            row = rows[place]
            token = chosen = self.chooser.sample(row)
            if self.relaxed is not None:
                chosen = self.relaxed.instead(token, tree, node, row, self.ends)
                if chosen != token:
                    relaxed.append(len(visited))
            self.chooser.accept(chosen)
            visited.append(place)
            return chosen

        return verify(tree, choose, self.ends), visited, relaxed

    def _rows_to_finish(
        self, logits: NDArray[np.float32], visited: Sequence[int], overlaps: bool
    ) -> list[NDArray[np.float32]]:
        """The rows that `_finish` reads: of every token for log-probabilities; of the newest NEWEST for entropies, or
        of the newest alone where it has to be copied (0.05 ms for 152k floats).
        """
        if self.logprobs is not None:
            rows = [logits[place] for place in visited]
            return [row.copy() for row in rows] if overlaps else rows
        if not self.policy.watches_entropy:
            return []
        if not overlaps:
            return [logits[place] for place in visited[-NEWEST:]]
        if self._newest_row is None:
            self._newest_row = np.empty(logits.shape[1], np.float32)
        np.copyto(self._newest_row, logits[visited[-1]])
        return [self._newest_row]

    def put_back(self, n_past: int, broken_off: bool = False) -> None:
        """Undo a pass that did not succeed: `n_past` tokens are committed. Where the memory had to go further back,
        the rest is pending again. `broken_off`: as for `Slot.rewind`.
        """
        tokens = self.slot.tokens[:n_past]
        self.slot.rewind(len(tokens), broken_off)
        self.pending = [*tokens[self.slot.n_past :], *self.pending]

    def give_up_cells(self) -> None:
        """Free the slot's cells; what was in them is pending again."""
        self.pending = [*self.slot.tokens, *self.pending]
        self.slot.clear()

    def rebuild(self, cut_back: bool) -> None:
        """Have the committed tokens, and no others, in the cells again: evaluated from nothing or, to `cut_back`, from
        the last place that the memory can be taken back to. Raises DecodeFailed; what is missing then is pending.
        """
        n_tokens = self.slot.n_past
        if cut_back:
            self.put_back(n_tokens, broken_off=True)
        else:
            self.give_up_cells()
        while self.slot.n_past < n_tokens:
            rows = Rows()
            part = self.pending[: min(n_tokens - self.slot.n_past, self.backend.n_batch)]
            self.slot.add_prompt(rows, part)
            rows.load(self.backend.batch)
            if code := self.backend.decode():
                raise DecodeFailed(code, len(part))
            self.commit_pending(len(part))

    def commit_pending(self, n: int) -> None:
        """The next n pending tokens were evaluated."""
        self.slot.tokens += self.pending[:n]
        del self.pending[:n]
        self.slot.checkpoint()
