"""The ceiling of drafting from given sources: an oracle that knows the recorded continuation and the cost curve.

Contract: the oracle has the candidates that the policies have, the rows that every source gives at each place of the
answer, and nothing else. There it may submit any chain of candidates that is right; wrong nodes it never submits. Of
all such ways through an answer it takes the one of the least total time by the curve. So no policy that asks for the
same rows over the same curve can be faster (`rest` and `sam` ask for more of them, and a prediction's depend on when it
is asked: their share can pass 1), and `share` = a policy's speed-up over the oracle's (1 / oracle for plain
decoding) says how much of what could be had was had. The time of lookups counts on neither side.

That oracle knows where a copy ends, which nothing can know. So there is a fair bound next to it, `fair`: it also knows
which candidate is right, but has to decide how many tokens to draft from what can be seen before the step, the lengths
of the longest match in the prediction and in the other sources. For each pair of lengths it takes the draft size that
is the best in hindsight over these very answers (policy iteration on the exact time to the end of each).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import Predictable, begin, counted
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.candidates import LENGTHS, SOURCE_NUMBER, SourceRows

ITERATIONS = 10  # the time falls by less than 0.1% from the fifth on
_N_SEEN = (len(LENGTHS) + 1) ** 2
_PREDICTION = SOURCE_NUMBER["prediction"]


@dataclass
class Reach:
    """Of one answer: `longest[i]`, the longest right chain among the candidates where `i` tokens are known, i >= 1."""

    n_prompt: int
    longest: list[int]
    seen: list[int]  # what can be seen there: a number for the match lengths


def reaches(recorded: Sequence[Recorded], make_sources: Callable[[], Predictable]) -> list[Reach]:
    """One lookup for every token of every answer; the curve plays no part, so one result serves all curves."""
    sources = make_sources()
    found = []
    for answer in counted(recorded):
        begin(sources, answer)
        longest, seen = [0], [0]
        for at in range(1, len(answer.answer)):
            # the last token of a step is the model's own
            rest = answer.answer[at : len(answer.answer) - 1][: LARGEST - 1]
            rows = sources.rows(depth=LARGEST - 1)
            longest.append(max((_right(each, rest) for each in rows), default=0))
            seen.append(_evidence(rows))
            sources.extend(answer.answer[at : at + 1])
        found.append(Reach(len(answer.prompt), longest, seen))
    return found


def _right(rows: SourceRows, rest: Sequence[int]) -> int:
    """How many tokens of `rest` a chain of these candidates can follow."""
    members: Sequence[int] = range(len(rows))
    for depth, token in enumerate(rest):
        goes_on = next((on for said, _, on in rows.candidates(members, depth) if said == token), None)
        if goes_on is None:
            return depth
        members = goes_on
    return len(rest)


def _evidence(found: Sequence[SourceRows]) -> int:
    """The lengths of the longest match in the prediction and elsewhere, in buckets."""
    ahead = max((rows.match[0] for rows in found if rows.source == _PREDICTION), default=0)
    other = max((rows.match[0] for rows in found if rows.source != _PREDICTION), default=0)
    return bisect_left(LENGTHS, ahead) * (len(LENGTHS) + 1) + bisect_left(LENGTHS, other)


def fair(found: Sequence[Reach], curve: CostCurve) -> dict[str, Any]:
    """{"speedup", "mat", "nodes_per_step"} of the best draft size for each thing that can be seen, in hindsight."""
    answers = [
        _Answer(np.array(reach.longest[1:]), np.array(reach.seen[1:]), _cost_table(reach, curve)) for reach in found
    ]
    sizes = np.zeros(_N_SEEN, np.int64)
    best: tuple[float, int, int] | None = None
    for _ in range(ITERATIONS):
        done = [answer.follow(sizes) for answer in answers]
        total = sum(ms[0] for ms, _, _ in done)
        if best is None or total < best[0]:
            best = (total, sum(steps for _, steps, _ in done), sum(nodes for _, _, nodes in done))
        ms_by_size = np.zeros((LARGEST, _N_SEEN))
        for answer, (ms, _, _) in zip(answers, done, strict=True):
            answer.compare(ms, ms_by_size)
        sizes = ms_by_size.argmin(axis=0)
    total, steps, nodes = best or (0.0, 0, 0)
    plain = sum(float(curve.at(reach.n_prompt + at)[0]) for reach in found for at in range(1, len(reach.longest)))
    tokens = sum(len(answer.longest) for answer in answers)
    return {
        "speedup": round(plain / total, 4) if total else 1.0,
        "mat": round(tokens / max(steps, 1), 4),
        "nodes_per_step": round(nodes / max(steps, 1), 3),
    }


@dataclass
class _Answer:
    """By place: the longest right chain, what can be seen, and milliseconds by drafted nodes, [places, LARGEST]."""

    longest: NDArray[np.int64]
    seen: NDArray[np.int64]
    cost: NDArray[np.float64]

    def follow(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.float64], int, int]:
        """Milliseconds from each place to the end with a draft of `sizes[seen]` nodes there; steps and nodes from the
        first place on.
        """
        n = len(self.longest)
        size = np.minimum(sizes[self.seen], n - 1 - np.arange(n))
        after = (np.arange(n) + 1 + np.minimum(size, self.longest)).tolist()
        price = self.cost[np.arange(n), size].tolist()
        ms = [0.0] * (n + 1)
        for at in range(n - 1, -1, -1):
            ms[at] = price[at] + ms[after[at]]
        at = steps = nodes = 0
        while at < n:
            steps, nodes, at = steps + 1, nodes + int(size[at]), after[at]
        return np.array(ms), steps, nodes

    def compare(self, ms: NDArray[np.float64], ms_by_size: NDArray[np.float64]) -> None:
        """Add the milliseconds to the end of each size, [sizes, seen], where `ms` go by from the next step on."""
        n = len(self.longest)
        for size in range(LARGEST):
            own = np.minimum(size, n - 1 - np.arange(n))
            after = np.arange(n) + 1 + np.minimum(own, self.longest)
            ms_by_size[size] += np.bincount(self.seen, self.cost[np.arange(n), own] + ms[after], _N_SEEN)


def _cost_table(reach: Reach, curve: CostCurve) -> NDArray[np.float64]:
    known: dict[int, list[float]] = {}
    lengths = [(reach.n_prompt + at) >> 6 << 6 for at in range(1, len(reach.longest))]
    return np.array([known.setdefault(length, _costs(curve, length)) for length in lengths]).reshape(-1, LARGEST)


def oracle(found: Sequence[Reach], curve: CostCurve) -> dict[str, Any]:
    """{"speedup", "mat", "nodes_per_step"} of the fastest way through all answers."""
    plain = drafted = 0.0
    steps = nodes = tokens = 0
    for reach in found:
        ms, taken = _fastest(reach, curve)
        plain += sum(float(curve.at(reach.n_prompt + at)[0]) for at in range(1, len(reach.longest)))
        drafted += ms
        steps += len(taken)
        nodes += sum(taken)
        tokens += len(reach.longest) - 1
    return {
        "speedup": round(plain / drafted, 4) if drafted else 1.0,
        "mat": round(tokens / max(steps, 1), 4),
        "nodes_per_step": round(nodes / max(steps, 1), 3),
    }


def _fastest(reach: Reach, curve: CostCurve) -> tuple[float, list[int]]:
    """Least milliseconds from the first token to the end, and the chain lengths of that way; from the back."""
    end = len(reach.longest)
    best = [0.0] * (end + 1)
    choice = [0] * end
    for at in range(end - 1, 0, -1):
        costs = _costs(curve, reach.n_prompt + at)
        best[at], choice[at] = min((costs[n] + best[at + 1 + n], n) for n in range(reach.longest[at] + 1))
    taken, at = [], 1
    while at < end:
        taken.append(choice[at])
        at += 1 + choice[at]
    return best[1] if end > 1 else 0.0, taken


def _costs(curve: CostCurve, n_ctx: int) -> list[float]:
    """By drafted nodes; a size that costs more than a larger one is filled up with nodes that come to nothing."""
    costs: list[float] = np.minimum.accumulate(curve.at(n_ctx)[::-1])[::-1].tolist()
    return costs
