"""The step loop of one generation: plan, draft, decode, verify, commit, learn.

Contract: works on token ids over a `Backend`; knows nothing about text. Yields the tokens of each step with the source
that drafted them. Whatever ends it (done, cancelled, an interrupt, an error), the memory cells are back at the
committed tokens when `step` has returned or raised.

With `relaxed` (off by default) a retrieved token can take the place of the sampled one. Each is counted, and its source
ends in `RELAXED_MARK`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.backend import Backend, Capability
from rest_local.decoding.entropy import entropy_of
from rest_local.decoding.slot import Slot
from rest_local.decoding.verify import Relaxed, Verdict, verify
from rest_local.drafting.candidates import SOURCES
from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree, Layout
from rest_local.errors import DecodeFailed, PromptEmpty, PromptTooLong
from rest_local.planning.policy import NEWEST, Policy, Situation, StepCost

TARGET = "model"  # the source of a token that the model chose and nobody drafted
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
    steps: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0  # of the accepted ones, those that plain decoding would not have given there
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    lookup_us: list[float] = field(default_factory=list)
    decode_ms: float = 0.0
    step_ms: float = 0.0

    def count_draft(self, tree: DraftTree, path: Sequence[int]) -> None:
        self.drafted += len(tree)
        self.accepted += len(path)
        for numbers, key in ((range(len(tree)), "drafted"), (path, "accepted")):
            for node in numbers:
                source = self.by_source.setdefault(SOURCES[tree.source[node]], {"drafted": 0, "accepted": 0})
                source[key] += 1

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
            "lookup_us": {"p50": round(float(np.median(times)), 1), "p99": round(float(np.percentile(times, 99)), 1)},
            "driver_ms_per_step": round((self.step_ms - self.decode_ms) / steps, 4),
            "decode_ms_per_step": round(self.decode_ms / steps, 4),
        }


@dataclass
class Generation:
    """One request on one slot. Call `start`, then `step` until `room` is 0 or the caller has enough."""

    backend: Backend
    slot: Slot
    policy: Policy
    sources: Lookup
    chooser: Chooser
    capability: Capability
    ends: Callable[[int], bool]
    relaxed: Relaxed | None = None
    statistics: Statistics = field(default_factory=Statistics)
    _root: int = -1
    _entropies: tuple[float, ...] = ()
    _learn_ms: float = 0.0

    def start(self, prompt: Sequence[int]) -> None:
        """Evaluate the prompt but for its last token, which becomes the root; keep what the cells already hold.

        Raises PromptEmpty, PromptTooLong, DecodeFailed. Interruptible between batches: what is evaluated stays.
        """
        if not len(prompt):
            raise PromptEmpty
        if len(prompt) >= self.backend.n_ctx:
            raise PromptTooLong(len(prompt), self.backend.n_ctx)
        begun = time.perf_counter()
        self._root, self._entropies = int(prompt[-1]), ()
        kept = self.slot.keep_prefix(prompt[:-1])
        self._prefill(prompt[kept:-1])
        self.sources.restart(prompt)
        self.policy.begin(len(prompt))
        self.statistics.prompt_tokens, self.statistics.cached_tokens = len(prompt), kept
        self.statistics.prompt_ms = 1e3 * (time.perf_counter() - begun)

    @property
    def room(self) -> int:
        """Tokens that can still be evaluated."""
        return self.backend.n_ctx - self.slot.n_past

    def step(self, wanted: int) -> list[tuple[int, str]]:
        """One forward pass: at least one and at most `wanted` tokens, each with its source.

        Raises DecodeFailed after the state was cleared. In any case the cells hold the committed tokens afterwards.
        """
        begun = time.perf_counter()
        n_past = self.slot.n_past
        drafted = self._draft(min(wanted, self.room) - 1)
        draft_ms = 1e3 * (time.perf_counter() - begun)
        committed = False
        try:
            tree, layout, rows, decode_ms = self._decode(drafted.tree)
            verdict, loose = self._verify(tree, layout, rows)
            if not self.slot.accept(self._root, tree, layout, verdict.path):
                self._rebuild(self.slot.tokens)
            committed = True
        finally:
            if not committed:
                self.slot.rewind(n_past)
        self._root = verdict.tokens[-1]
        self.sources.extend(verdict.tokens)
        self.statistics.count_draft(tree, verdict.path)
        step_ms = 1e3 * (time.perf_counter() - begun)
        lookup_ms = None if drafted.lookup_us is None else draft_ms
        driver_ms = step_ms - decode_ms - (lookup_ms or 0.0)
        done = StepCost(n_past, len(tree), len(verdict.path), decode_ms, driver_ms + self._learn_ms, lookup_ms)
        said = verdict.tokens[: loose[0]] if loose else verdict.tokens  # from a relaxed token on the model says nothing
        self.policy.learn(drafted, said, done)
        self._learn_ms = 1e3 * (time.perf_counter() - begun) - step_ms  # booked with the next step
        self._count(len(verdict.tokens), decode_ms, step_ms + self._learn_ms)
        self.statistics.relaxed += len(loose)
        sources = [SOURCES[tree.source[node]] for node in verdict.path] + [TARGET]
        for place in loose:
            sources[place] += RELAXED_MARK
        return list(zip(verdict.tokens, sources, strict=True))

    def _draft(self, limit: int) -> Draft:
        """When, what and how much: the draft to submit."""
        limit = min(limit, self.backend.max_outputs - 1, self.backend.n_batch - 1, self.capability.longest)
        leaves = self.slot.n_branches if self.capability.kind == "tree" else 1
        limit = 0 if self.capability.kind == "none" else max(0, limit)
        result = self.policy.draft(self.sources, Situation(self.slot.n_past, limit, leaves, self._entropies))
        if result.lookup_us is not None:
            self.statistics.lookup_us.append(result.lookup_us)
        return result

    def _decode(self, tree: DraftTree) -> tuple[DraftTree, Layout | None, NDArray[np.float32], float]:
        """Evaluate root and tree; where there is no room, a smaller tree, then none.

        Returns what was evaluated, its logits, and milliseconds: a GPU computes until the logits are asked for.
        """
        rebuilt = False
        while True:
            layout = tree.layout(self.slot.n_branches) if len(tree) else None
            self.slot.fill_step(self._root, tree, layout)
            begun = time.perf_counter()
            code = self.backend.decode()
            if code == 0:
                rows = self.backend.logits(1 + len(tree))
                return tree, layout, rows, 1e3 * (time.perf_counter() - begun)
            if code == 1 and len(tree):  # no room, restored
                tree = tree.cut(len(tree) // 2)
            elif (code == 2 or code < -1) and not rebuilt:  # partly applied
                self._rebuild(self.slot.tokens)
                tree, rebuilt = DraftTree(), True
            elif code == -1 and len(tree):  # refused, restored
                tree = DraftTree()
            else:
                n_tokens = 1 + len(tree)
                if code not in (1, -1):
                    self.slot.clear()
                raise DecodeFailed(code, n_tokens)

    def _verify(self, tree: DraftTree, layout: Layout | None, rows: NDArray[np.float32]) -> tuple[Verdict, list[int]]:
        """The verdict, and which of its tokens passed only because verification is relaxed."""
        place = {node: row for row, node in enumerate(layout.order, 1)} if layout else {}
        place[ROOT] = 0
        visited: list[int] = []
        loose: list[int] = []

        def choose(node: int) -> int:
            row = rows[place[node]]
            token = chosen = self.chooser.sample(row)
            if self.relaxed is not None:
                chosen = self.relaxed.instead(token, tree, node, row, self.ends)
                if chosen != token:
                    loose.append(len(visited))
            self.chooser.accept(chosen)
            visited.append(place[node])
            return chosen

        verdict = verify(tree, choose, self.ends)
        if self.policy.watches_entropy:
            self._entropies = (*self._entropies, *(entropy_of(rows[row]) for row in visited[-NEWEST:]))[-NEWEST:]
        return verdict, loose

    def _prefill(self, tokens: Sequence[int]) -> None:
        """Evaluate committed tokens in batches. Raises DecodeFailed; then the cells hold what was evaluated before."""
        size = self.backend.n_batch
        for begin in range(0, len(tokens), size):
            part = tokens[begin : begin + size]
            n_past = self.slot.n_past
            self.slot.fill_prompt(part)
            code = None
            try:
                code = self.backend.decode()
            finally:
                if code in (0, 1, -1):
                    pass
                else:  # interrupted or partly applied: only what is committed may stay
                    self.slot.rewind(n_past)
            if code != 0:
                raise DecodeFailed(code, len(part))
            self.slot.tokens.extend(int(t) for t in part)

    def _rebuild(self, tokens: Sequence[int]) -> None:
        """Evaluate the committed tokens again from nothing."""
        again = list(tokens)
        self.slot.clear()
        self._prefill(again)

    def _count(self, tokens: int, decode_ms: float, step_ms: float) -> None:
        self.statistics.steps += 1
        self.statistics.generated += tokens
        self.statistics.decode_ms += decode_ms
        self.statistics.step_ms += step_ms
