"""Drafting above a threshold of likelihood, or a fixed number of nodes, in a replay: MAT against nodes a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rest_local.bench.replay import FREE, Predictable, replay
from rest_local.bench.workload import Recorded, Workload
from rest_local.calibration.cost import LARGEST
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import DEPTH, Lookup
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.planning.auto import LONG_RUN
from rest_local.planning.plan import draft
from rest_local.planning.policy import Stateless, StepContext, StepCost

THRESHOLDS = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02)


class Threshold(Stateless):
    """A policy that drafts every node whose joint probability reaches `least`, and at most the `nodes` likeliest. It
    serves to plot MAT against nodes per step, and for fixed budgets.
    """

    name = "threshold"

    def __init__(self, least: float, nodes: int = LARGEST - 1) -> None:
        self.least = least
        self.nodes = nodes
        self.acceptance = Acceptance()
        self.calibrator = TokenCalibrator()
        self._depth = DEPTH

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The largest tree that the threshold and the budget allow."""
        limit = min(self.nodes, at.limit)
        begun = time.perf_counter()
        rows = sources.rows(depth=self._depth)
        lookup_us = 1e6 * (time.perf_counter() - begun)
        result = draft(
            rows,
            self.acceptance.estimate,
            lambda p: p >= self.least,
            limit,
            at.leaves,
            calibrate=self.calibrator.calibrate,
        )
        result.lookup_us = lookup_us
        return result

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Learn like `auto`."""
        self._depth = LARGEST - 1 if done.n_accepted >= LONG_RUN else DEPTH
        self.acceptance.learn(drafted.outcomes(tokens))
        self.calibrator.learn(drafted.calibrations(tokens))


def sweep(
    recorded: Sequence[Recorded], make_sources: Callable[[], Predictable], thresholds: Sequence[float]
) -> list[dict[str, Any]]:
    """One row {"threshold", "nodes_per_step", "mat", "draft_ms"} per threshold, each from a cold start."""
    rows = []
    for least in thresholds:
        result = replay(recorded, make_sources, Threshold(least), FREE).to_dict()
        rows.append({"threshold": least, **{k: result[k] for k in ("nodes_per_step", "mat", "draft_ms")}})
    return rows


def full_sweep(workload: Workload) -> list[dict[str, Any]]:
    """Rows by threshold."""
    return sweep(workload.tested, workload.sources, THRESHOLDS)
