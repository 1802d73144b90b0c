"""The upper bound of a replay: what the fastest way through each answer would take.

The oracle knows the recorded continuation and the cost curve, and has the same candidates as the policies: the rows of
every source at each place of the answer. At each place it may submit any right chain of candidates, and never submits a
wrong node; among all such ways through an answer it takes the fastest by the curve. No policy with the same rows and
the same curve can be faster. A policy's share of it can exceed 1 for `rest` and `sam`, which look up more rows, and
with a prediction, whose rows depend on the time of the lookup. The time of lookups counts on neither side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rest_local.bench.replay import MakePolicy, Predictable, begin, compare_curves, counted
from rest_local.bench.workload import Recorded, Workload
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.candidates import SourceRows


@dataclass
class OracleMatch:
    """One answer. `longest[i]`: length of the longest right chain of candidates after `i` known tokens, i >= 1."""

    n_prompt: int
    longest: list[int]


def reaches(recorded: Sequence[Recorded], make_sources: Callable[[], Predictable]) -> list[OracleMatch]:
    """Make one lookup for every token of every answer. The result does not depend on a curve and serves all."""
    sources = make_sources()
    found = []
    for answer in counted(recorded):
        begin(sources, answer)
        longest = [0]
        for at in range(1, len(answer.answer)):
            # the last token of a step comes from the model
            rest = answer.answer[at : len(answer.answer) - 1][: LARGEST - 1]
            rows = sources.rows(depth=LARGEST - 1)
            longest.append(max((_right(each, rest) for each in rows), default=0))
            sources.extend(answer.answer[at : at + 1])
        found.append(OracleMatch(len(answer.prompt), longest))
    return found


def _right(rows: SourceRows, rest: Sequence[int]) -> int:
    """The number of tokens of `rest` that a chain of these candidates can follow."""
    members: Sequence[int] = range(len(rows))
    for depth, token in enumerate(rest):
        below = next((through for drafted, _, through in rows.candidates(members, depth) if drafted == token), None)
        if below is None:
            return depth
        members = below
    return len(rest)


def oracle(found: Sequence[OracleMatch], curve: CostCurve) -> dict[str, Any]:
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


def _fastest(reach: OracleMatch, curve: CostCurve) -> tuple[float, list[int]]:
    """The least milliseconds from the first token to the end, and the chain lengths of that way, computed backwards."""
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
    """Milliseconds by drafted nodes. A size that costs more than a larger one is padded with useless nodes."""
    costs: list[float] = np.minimum.accumulate(curve.at(n_ctx)[::-1])[::-1].tolist()
    return costs


def compare_with_oracle(workload: Workload, make_policy: MakePolicy, curves: Mapping[str, CostCurve]) -> dict[str, Any]:
    """`compare_curves`, with the results of the oracle and the policy's share of its speed-up."""
    found = reaches(workload.tested, workload.sources) if curves else []
    report = compare_curves(workload, make_policy, curves)
    for name, curve in curves.items():
        best = oracle(found, curve)
        report[name] |= {"oracle": best, "share_of_oracle": round(report[name]["speedup"] / best["speedup"], 4)}
    return report
