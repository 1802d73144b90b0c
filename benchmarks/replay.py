"""Replay: run drafting and planning on recorded tokens in place of a model's, and count.

- Recorded answers and sources go in. Mean accepted tokens (MAT), drafted nodes per step, acceptance by source and
  depth, lookup times, and the speed-up that a cost curve implies come out.
- No model runs: the forward pass of a step with n nodes costs what the curve gives for n + 1 tokens. A drafting model,
  if the sources have one, states what its queries cost (`DraftText.query_ms`).
- As in the papers, the prefill yields the first token of an answer and is not a step, and answers of fewer than 3
  tokens are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import Recorded, Workload
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.decoding.verify import verify
from rest_local.drafting.sources import SOURCES, Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.policy import Policy, StepContext, StepCost

SHORTEST_ANSWER = 3
LOOKUP_MS = 0.15  # the policy's time of each lookup; measured times would make a replay unrepeatable
FIRST_TOKENS = 160  # The cost of an answer's start shows in its first tokens.
LEAVES = 64  # more than the sequence ids of one context allow, so that they are no limit
FREE = CostCurve.from_points([0], [1, LARGEST], [[1.0, 1.0]])  # a curve on which drafts cost nothing

MakePolicy = Callable[[CostCurve], Policy]


class Predictable(Lookup, Protocol):
    """The source of drafts in a replay: `Sources`, or a peer."""

    def predict(self, tokens: Sequence[int] | NDArray[np.int32]) -> None: ...


@dataclass
class Tally:
    """The counts of a replay. The curve gives `plain_ms` and `drafted_ms`, and the latter includes `queried_ms`."""

    answers: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    changed: int = 0
    lookup_ms: list[float] = field(default_factory=list)
    plain_ms: float = 0.0
    drafted_ms: float = 0.0
    looked_ms: float = 0.0  # time of the lookups, LOOKUP_MS each
    queried_ms: float = 0.0  # time of the queries to a drafting model
    first_plain_ms: float = 0.0  # the first FIRST_TOKENS tokens of each answer
    first_drafted_ms: float = 0.0
    by_answer: list[tuple[float, str]] = field(default_factory=list)  # (speed-up, name)

    def add(self, tree: DraftTree, path: Sequence[int], tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.drafted += len(tree)
        self.accepted += len(path)
        self.by_source.update(SOURCES[s] for s in tree.source)
        self.accepted_by_source.update(SOURCES[tree.source[node]] for node in path)
        self.by_depth.update(tree.depth)
        self.accepted_by_depth.update(tree.depth[node] for node in path)

    @property
    def speedup(self) -> float:
        """Return plain time over drafted time, which includes queries; 1 if nothing was replayed."""
        return self.plain_ms / self.drafted_ms if self.drafted_ms else 1.0

    @property
    def speedup_with_lookups(self) -> float:
        """Return the speed-up with the time of the lookups included."""
        return self.plain_ms / (self.drafted_ms + self.looked_ms) if self.drafted_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        steps = max(self.steps, 1)
        times = np.array(self.lookup_ms or [0.0])
        worst, name = min(self.by_answer, default=(1.0, ""))
        return {
            "answers": self.answers,
            "steps": self.steps,
            "mat": round(self.tokens / steps, 4),
            "nodes_per_step": round(self.drafted / steps, 3),
            "by_source": {
                name: {"drafted": count, "accepted": self.accepted_by_source[name]}
                for name, count in self.by_source.items()
            },
            "by_depth": {
                depth: {"drafted": count, "accepted": self.accepted_by_depth[depth]}
                for depth, count in sorted(self.by_depth.items())
            },
            "tokens_changed": self.changed,
            "draft_ms": {"mean": round(float(times.mean()), 4), "p99": round(float(np.percentile(times, 99)), 4)},
            "speedup": round(self.speedup, 4),
            "speedup_with_lookups": round(self.speedup_with_lookups, 4),
            "first_tokens_speedup": round(self.first_plain_ms / self.first_drafted_ms, 4)
            if self.first_plain_ms
            else 1.0,
            "lookups": round(self.looked_ms / LOOKUP_MS),
            "worst_answer": round(worst, 4),
            "worst_name": name,
        }


def counted(recorded: Sequence[Recorded]) -> list[Recorded]:
    """Return the answers that are long enough to count."""
    return [answer for answer in recorded if len(answer.answer) >= SHORTEST_ANSWER]


def begin(sources: Predictable, answer: Recorded) -> list[int]:
    """Give the sources the prompt, the prediction and the first token of the answer, which the prefill yields. Return
    the text so far. A drafting model follows this list: the caller appends what it gives to `Sources.extend`.
    """
    text = [*answer.prompt]
    sources.restart(text)
    if sources.draft_text:
        sources.draft_text.restart(text, 0)
    sources.predict(answer.prediction)
    text += answer.answer[:1]
    sources.extend(answer.answer[:1])
    return text


def replay(
    recorded: Sequence[Recorded], make_sources: Callable[[], Predictable], policy: Policy, curve: CostCurve
) -> Tally:
    """Run a policy over all answers. A step costs what `curve` gives; the time to draft is counted separately."""
    tally = Tally()
    sources = make_sources()
    for answer in counted(recorded):
        tally.answers += 1
        plain, drafted = tally.plain_ms, tally.drafted_ms
        _replay_answer(answer, sources, policy, curve, tally)
        tally.by_answer.append(((tally.plain_ms - plain) / (tally.drafted_ms - drafted), answer.name))
    return tally


def _replay_answer(answer: Recorded, sources: Predictable, policy: Policy, curve: CostCurve, tally: Tally) -> None:
    text = begin(sources, answer)
    policy.begin(len(answer.prompt))
    decoded = answer.answer[:1]
    at = 1
    while at < len(answer.answer):
        n_ctx = len(answer.prompt) + at
        model = sources.draft_text
        if model:
            model.begin_step()
        begun = time.perf_counter()
        drafted = policy.draft(sources, StepContext(n_ctx, LARGEST - 1, LEAVES, newest=(text[-2], text[-1])))
        tally.lookup_ms.append(1e3 * (time.perf_counter() - begun))
        query_ms = model.query_ms if model else 0.0
        lookup_ms = None if drafted.lookup_us is None else LOOKUP_MS
        accepted = tally.accepted
        tokens = _follow(drafted.tree, answer.answer, at, tally)
        costs = curve.at(n_ctx)
        cost = float(costs[len(drafted.tree)])
        below_ms = drafted.looked_below * LOOKUP_MS
        n_accepted = tally.accepted - accepted
        done = StepCost(n_ctx, len(drafted.tree), n_accepted, cost, below_ms, lookup_ms, query_ms=query_ms)
        policy.learn(drafted, tokens, done)
        policy.catch_up()
        tally.plain_ms += float(costs[0]) * len(tokens)
        tally.drafted_ms += cost + query_ms
        tally.queried_ms += query_ms
        tally.looked_ms += (lookup_ms or 0.0) + below_ms
        if at <= FIRST_TOKENS:
            tally.first_plain_ms += float(costs[0]) * len(tokens)
            tally.first_drafted_ms += cost + query_ms
        text += tokens
        sources.extend(tokens)
        decoded += tokens
        at += len(tokens)
    tally.changed += sum(a != b for a, b in zip(decoded, answer.answer, strict=True))


def _follow(tree: DraftTree, answer: Sequence[int], at: int, tally: Tally) -> list[int]:
    """Verify the tree against the recorded tokens from `at` on. Return the tokens of the step."""
    recorded = iter(answer[at:])
    last = len(answer) - at
    taken = 0

    def choose(_: int) -> int:
        nonlocal taken
        taken += 1
        return next(recorded)

    verdict = verify(tree, choose, lambda _: taken >= last)
    tally.add(tree, verdict.path, len(verdict.tokens))
    return [*(tree.token[node] for node in verdict.path), verdict.tokens[-1]]


def compare_curves(workload: Workload, make_policy: MakePolicy, curves: Mapping[str, CostCurve]) -> dict[str, Any]:
    return {
        name: replay(workload.tested, workload.sources, make_policy(curve.copy()), curve).to_dict()
        for name, curve in curves.items()
    }
