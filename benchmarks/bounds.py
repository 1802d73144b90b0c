"""Two upper bounds of a replay: the oracle, and the fair bound, which does not know where a copy ends.

The oracle knows the recorded continuation and the cost curve, and has the same candidates as the policies: the rows of
every source at each place of the answer. At each place it may submit any right chain of candidates, and never submits a
wrong node; among all such ways through an answer it takes the fastest by the curve. No policy with the same rows and
the same curve can be faster. A policy's share of it can exceed 1 for `rest` and `sam`, which look up more rows, and
with a prediction, whose rows depend on the time of the lookup. The time of lookups counts on neither side.

The fair bound knows which candidate is right, but picks the size of a draft from the lengths of its matches alone, best
in hindsight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import Recorded, Workload
from benchmarks.replay import FIRST_TOKENS, MakePolicy, Predictable, begin, compare_curves, counted
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.sources import LENGTHS, SOURCE_NUMBER, SourceRows

ITERATIONS = 10  # After the fifth, the time falls by less than 0.1%.
_N_VISIBLE = len(LENGTHS) ** 2
_PREDICTION = SOURCE_NUMBER["prediction"]


@dataclass
class OracleMatch:
    """One answer. `longest[i]` is the longest right chain of candidates after `i` known tokens, i >= 1."""

    n_prompt: int
    longest: list[int]
    seen: list[int]  # The bucket of the visible match lengths at each place.


def reaches(recorded: Sequence[Recorded], make_sources: Callable[[], Predictable]) -> list[OracleMatch]:
    """Make one lookup for every token of every answer. The result does not depend on a curve and serves all."""
    sources = make_sources()
    found = []
    for answer in counted(recorded):
        begin(sources, answer)
        longest, seen = [0], [0]
        for at in range(1, len(answer.answer)):
            # The last token of a step comes from the model.
            rest = answer.answer[at : len(answer.answer) - 1][: LARGEST - 1]
            rows = sources.rows(depth=LARGEST - 1)
            longest.append(max((_right(each, rest) for each in rows), default=0))
            seen.append(_evidence(rows))
            sources.extend(answer.answer[at : at + 1])
        found.append(OracleMatch(len(answer.prompt), longest, seen))
    return found


def _right(rows: SourceRows, rest: Sequence[int]) -> int:
    """Return how many tokens of `rest` a chain of these candidates can follow."""
    members: Sequence[int] = range(len(rows))
    for depth, token in enumerate(rest):
        below = next((through for drafted, _, through in rows.candidates(members, depth) if drafted == token), None)
        if below is None:
            return depth
        members = below
    return len(rest)


def _evidence(found: Sequence[SourceRows]) -> int:
    """Return the bucket of the longest match lengths in the prediction and in the other sources."""
    ahead = max((rows.match[0] for rows in found if rows.source == _PREDICTION), default=0)
    other = max((rows.match[0] for rows in found if rows.source != _PREDICTION), default=0)
    return bisect_left(LENGTHS, ahead) * len(LENGTHS) + bisect_left(LENGTHS, other)


def fair(found: Sequence[OracleMatch], curve: CostCurve) -> dict[str, Any]:
    """Return the figures of the best draft size for each bucket of `seen`, found in hindsight."""
    answers = [
        _Answer(np.array(reach.longest[1:]), np.array(reach.seen[1:]), _cost_table(reach, curve)) for reach in found
    ]
    sizes = np.zeros(_N_VISIBLE, np.int64)
    # Milliseconds, steps, nodes, and the speed-up of the first tokens.
    best: tuple[float, int, int, float] | None = None
    for _ in range(ITERATIONS):
        done = [answer.follow(sizes) for answer in answers]
        total = sum(ms[0] for ms, *_ in done)
        if best is None or total < best[0]:
            steps, nodes, first_ms = (sum(each[at] for each in done) for at in (1, 2, 3))
            first_plain = sum(each[4] for each in done)
            best = (float(total), int(steps), int(nodes), float(first_plain / first_ms) if first_ms else 1.0)
        ms_by_size = np.zeros((LARGEST, _N_VISIBLE))
        for answer, (ms, *_) in zip(answers, done, strict=True):
            answer.compare(ms, ms_by_size)
        sizes = ms_by_size.argmin(axis=0)
    total, steps, nodes, first = best or (0.0, 0, 0, 1.0)
    plain = sum(float(curve.at(reach.n_prompt + at)[0]) for reach in found for at in range(1, len(reach.longest)))
    tokens = sum(len(answer.longest) for answer in answers)
    return {
        "speedup": round(plain / total, 4) if total else 1.0,
        "first_tokens_speedup": round(first, 4),
        "mat": round(tokens / max(steps, 1), 4),
        "nodes_per_step": round(nodes / max(steps, 1), 3),
    }


@dataclass
class _Answer:
    """The longest right chain, visible bucket, and milliseconds by drafted nodes at each place, [places, LARGEST]."""

    longest: NDArray[np.int64]
    seen: NDArray[np.int64]
    cost: NDArray[np.float64]

    def follow(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.float64], int, int, float, float]:
        """Draft `sizes[seen]` nodes at each place, and return the milliseconds from each place to the end.

        Also return the steps and nodes from the first place on, and the milliseconds of the steps that begin in the
        first FIRST_TOKENS tokens, drafted and plain.
        """
        n = len(self.longest)
        size = np.minimum(sizes[self.seen], n - 1 - np.arange(n))
        after = (np.arange(n) + 1 + np.minimum(size, self.longest)).tolist()
        price = self.cost[np.arange(n), size].tolist()
        ms = [0.0] * (n + 1)
        for at in range(n - 1, -1, -1):
            ms[at] = price[at] + ms[after[at]]
        at = steps = nodes = 0
        first = plain = 0.0
        while at < n:
            if at < FIRST_TOKENS:
                first, plain = first + price[at], plain + float(self.cost[at : after[at], 0].sum())
            steps, nodes, at = steps + 1, nodes + int(size[at]), after[at]
        return np.array(ms), steps, nodes, first, plain

    def compare(self, ms: NDArray[np.float64], ms_by_size: NDArray[np.float64]) -> None:
        """Add to `ms_by_size` [sizes, seen] the milliseconds to the end for each size at each place; `ms` are those
        from the next step on.
        """
        n = len(self.longest)
        for size in range(LARGEST):
            own = np.minimum(size, n - 1 - np.arange(n))
            after = np.arange(n) + 1 + np.minimum(own, self.longest)
            ms_by_size[size] += np.bincount(self.seen, self.cost[np.arange(n), own] + ms[after], _N_VISIBLE)


def _cost_table(reach: OracleMatch, curve: CostCurve) -> NDArray[np.float64]:
    known: dict[int, list[float]] = {}
    lengths = [(reach.n_prompt + at) >> 6 << 6 for at in range(1, len(reach.longest))]
    return np.array([known.setdefault(length, _costs(curve, length)) for length in lengths]).reshape(-1, LARGEST)


def oracle(found: Sequence[OracleMatch], curve: CostCurve) -> dict[str, Any]:
    """Return {"speedup", "mat", "nodes_per_step"} of the fastest way through all answers."""
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
    """Return the least milliseconds from the first token to the end, and the chain lengths of that way."""
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
    """Return the milliseconds by drafted nodes. A size that costs more than a larger one is padded."""
    costs: list[float] = np.minimum.accumulate(curve.at(n_ctx)[::-1])[::-1].tolist()
    return costs


def compare_with_bounds(workload: Workload, make_policy: MakePolicy, curves: Mapping[str, CostCurve]) -> dict[str, Any]:
    """Return `compare_curves` with the results of the oracle and the fair bound, and the policy's share of both."""
    found = reaches(workload.tested, workload.sources) if curves else []
    report = compare_curves(workload, make_policy, curves)
    for name, curve in curves.items():
        for bound, result in (("oracle", oracle(found, curve)), ("fair", fair(found, curve))):
            share = round(float(report[name]["speedup"] / result["speedup"]), 4)
            report[name] |= {bound: result, f"share_of_{bound}": share}
    return report
