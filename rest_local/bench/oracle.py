"""The ceiling of drafting from given sources: an oracle that knows the recorded continuation and the cost curve.

Contract: the oracle has the candidates that the policies have, the rows that every source gives at each place of the
answer, and nothing else. There it may submit any chain of candidates that is right; wrong nodes it never submits. Of
all such ways through an answer it takes the one of the least total time by the curve. So no policy that asks for the
same rows over the same curve can be faster (`rest` and `sam` ask for more of them, and a prediction's depend on when it
is asked: their share can pass 1), and `share` = a policy's speed-up over the oracle's (1 / oracle for plain
decoding) says how much of what could be had was had. The time of lookups counts on neither side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import Predictable, begin, counted
from rest_local.drafting.candidates import SourceRows
from rest_local.planning.cost import LARGEST, CostCurve


@dataclass
class Reach:
    """Of one answer: `longest[i]`, the longest right chain among the candidates where `i` tokens are known, i >= 1."""

    n_prompt: int
    longest: list[int]


def reaches(recorded: Sequence[Recorded], make_sources: Callable[[], Predictable]) -> list[Reach]:
    """One lookup for every token of every answer; the curve plays no part, so one result serves all curves."""
    sources = make_sources()
    found = []
    for answer in counted(recorded):
        begin(sources, answer)
        longest = [0]
        for at in range(1, len(answer.answer)):
            # the last token of a step is the model's own
            rest = answer.answer[at : len(answer.answer) - 1][: LARGEST - 1]
            longest.append(max((_right(rows, rest) for rows in sources.rows(depth=LARGEST - 1)), default=0))
            sources.extend(answer.answer[at : at + 1])
        found.append(Reach(len(answer.prompt), longest))
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
