"""Replay: drive drafting and planning with recorded tokens in place of the model's choice, and count.

Contract: recorded answers and sources go in, mean accepted tokens (MAT), drafted nodes a step, acceptance by source and
depth, lookup times, and the speed-up that a cost curve implies come out. No model is run: the forward pass of a step
with n nodes costs what the curve says n + 1 tokens cost. As in the papers' accounts, the first token of an answer comes
from the prompt's evaluation and is not a step, and answers of fewer than 3 tokens are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rest_local.bench.recorded import Recorded
from rest_local.decoding.generation import shadow
from rest_local.decoding.verify import verify
from rest_local.drafting.candidates import SOURCES
from rest_local.drafting.drafter import Draft, draft
from rest_local.drafting.sources import Sources
from rest_local.drafting.tree import DraftTree
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.planner import Planner, StepCost

SHORTEST_ANSWER = 3
LEAVES = 64  # what a draft could be, not what one context's sequence ids allow


@dataclass
class Tally:
    """What a replay counted. Times in milliseconds; `plain_ms` and `drafted_ms` by the cost curve."""

    answers: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    lookup_ms: list[float] = field(default_factory=list)
    plain_ms: float = 0.0
    drafted_ms: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def add(self, tree: DraftTree, path: Sequence[int], tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.drafted += len(tree)
        self.accepted += len(path)
        self.by_source.update(SOURCES[s] for s in tree.source)
        self.accepted_by_source.update(SOURCES[tree.source[node]] for node in path)
        self.accepted_by_depth.update(tree.depth[node] for node in path)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        steps = max(self.steps, 1)
        times = np.array(self.lookup_ms or [0.0])
        return {
            "answers": self.answers,
            "steps": self.steps,
            "mat": round(self.tokens / steps, 4),
            "nodes_per_step": round(self.drafted / steps, 3),
            "by_source": {
                name: {"drafted": count, "accepted": self.accepted_by_source[name]}
                for name, count in self.by_source.items()
            },
            "accepted_by_depth": dict(sorted(self.accepted_by_depth.items())),
            "draft_ms": {"mean": round(float(times.mean()), 4), "p99": round(float(np.percentile(times, 99)), 4)},
            "speedup": round(self.plain_ms / self.drafted_ms, 4) if self.drafted_ms else None,
            "worst_answer": round(min(self.ratios), 4) if self.ratios else None,
        }


class Threshold:
    """Draws up every node whose joint probability reaches `least`; learns as it goes. For MAT against nodes a step."""

    def __init__(self, least: float, limit: int = 64) -> None:
        self.least, self.limit = least, limit
        self.acceptance = Acceptance()

    def draft(self, sources: Sources) -> Draft:
        return draft(sources.rows(), self.acceptance.estimate, lambda p: p >= self.least, self.limit, LEAVES)

    def learn(self, drafted: Draft, tokens: Sequence[int]) -> None:
        self.acceptance.learn(shadow(drafted, tokens))


def sweep(
    recorded: Sequence[Recorded], make_sources: Callable[[], Sources], thresholds: Sequence[float]
) -> list[dict[str, Any]]:
    """One row {"threshold", "nodes_per_step", "mat", "draft_ms"} for each threshold, each from a cold start."""
    rows = []
    for least in thresholds:
        tally, rule = Tally(), Threshold(least)
        sources = make_sources()
        for answer in _long_enough(recorded):
            _replay_by_threshold(answer, sources, rule, tally)
        result = tally.to_dict()
        rows.append({"threshold": least, **{k: result[k] for k in ("nodes_per_step", "mat", "draft_ms")}})
    return rows


def _replay_by_threshold(answer: Recorded, sources: Sources, rule: Threshold, tally: Tally) -> None:
    tally.answers += 1
    sources.restart([*answer.prompt, answer.answer[0]])
    at = 1
    while at < len(answer.answer):
        begun = time.perf_counter()
        drafted = rule.draft(sources)
        tally.lookup_ms.append(1e3 * (time.perf_counter() - begun))
        tokens = _follow(drafted.tree, answer.answer, at, tally)
        rule.learn(drafted, tokens)
        sources.extend(tokens)
        at += len(tokens)


def replay(recorded: Sequence[Recorded], make_sources: Callable[[], Sources], planner: Planner) -> Tally:
    """Let a planner decide at every step; its costs are those of its curve, its own time is counted apart."""
    tally = Tally()
    sources = make_sources()
    for answer in _long_enough(recorded):
        tally.answers += 1
        plain, drafted = tally.plain_ms, tally.drafted_ms
        _replay_by_planner(answer, sources, planner, tally)
        tally.ratios.append((tally.plain_ms - plain) / (tally.drafted_ms - drafted))
    return tally


def _replay_by_planner(answer: Recorded, sources: Sources, planner: Planner, tally: Tally) -> None:
    sources.restart([*answer.prompt, answer.answer[0]])
    planner.begin(len(answer.prompt))
    at = 1
    while at < len(answer.answer):
        n_ctx = len(answer.prompt) + at
        drafted, lookup_ms = Draft(DraftTree()), None
        begun = time.perf_counter()
        if planner.looks_up(n_ctx, sources.repeats):
            plan = planner.plan(n_ctx, len(answer.answer) - at - 1)
            drafted = draft(sources.rows(), planner.acceptance.estimate, plan.worth, len(plan.cost) - 1, LEAVES)
            drafted.tree = drafted.tree.cut(plan.best)
            lookup_ms = 1e3 * (time.perf_counter() - begun)
            tally.lookup_ms.append(lookup_ms)
        accepted = tally.accepted
        tokens = _follow(drafted.tree, answer.answer, at, tally)
        planner.acceptance.learn(shadow(drafted, tokens))
        costs = planner.curve.at(n_ctx)
        cost = float(costs[len(drafted.tree)])
        planner.learn(n_ctx, StepCost(len(drafted.tree), tally.accepted - accepted, cost, 0.0, lookup_ms))
        tally.plain_ms += float(costs[0]) * len(tokens)
        tally.drafted_ms += cost
        sources.extend(tokens)
        at += len(tokens)


def _follow(tree: DraftTree, answer: Sequence[int], at: int, tally: Tally) -> list[int]:
    """Verify the tree against the recorded tokens from `at` on; the tokens of the step."""
    rest = iter(answer[at:])
    last = len(answer) - at
    taken = 0

    def choose(_: int) -> int:
        nonlocal taken
        taken += 1
        return next(rest)

    verdict = verify(tree, choose, lambda _: taken >= last)
    tally.add(tree, verdict.path, len(verdict.tokens))
    return verdict.tokens


def _long_enough(recorded: Sequence[Recorded]) -> list[Recorded]:
    return [answer for answer in recorded if len(answer.answer) >= SHORTEST_ANSWER]
