"""The reports of `rest-local bench replay` on one workload: policy, bounds, sweep and peers.

A `Workload` and names go in, dictionaries come out. All sides have the same answers, the same earlier answers and the
same curve. Only the policies of this project can read the datastores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rest_local.bench.bounds import fair, oracle, reaches
from rest_local.bench.peers import ARCTIC_VARIANTS, PEERS, Arctic, Peer, why_no_arctic
from rest_local.bench.replay import FREE, MakePolicy, replay, sweep
from rest_local.bench.workload import Workload
from rest_local.calibration.cost import CostCurve

THRESHOLDS = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02)
SPARSE = (0.95, 0.85, 0.7, 0.5, 0.35)  # in addition for the comparison with peers, some of which draft rarely


def compare_curves(workload: Workload, make_policy: MakePolicy, curves: Mapping[str, CostCurve]) -> dict[str, Any]:
    """For each curve, the results of the policy, the oracle and the fair bound, and the policy's share of both."""
    found = reaches(workload.tested, workload.sources) if curves else []
    report = {}
    for name, curve in curves.items():
        row = replay(workload.tested, workload.sources, make_policy(curve.copy()), curve).to_dict()
        best = oracle(found, curve)
        bound = fair(found, curve)
        report[name] = {
            **row,
            "oracle": best,
            "share_of_oracle": round(row["speedup"] / best["speedup"], 4),
            "fair": bound,
            "share_of_fair": round(float(row["speedup"] / bound["speedup"]), 4),
        }
    return report


def compare_peers(
    workload: Workload, curves: Mapping[str, CostCurve], ours: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """By peer: MAT, nodes, speed-up by curve, and "ours", the MAT of the sweep `ours` at as many nodes per step.

    The second dictionary gives the reason for each peer that is left out.
    """
    earlier = workload.earlier or []
    makers: list[Callable[[], Peer]] = [partial(kind, earlier) for kind in PEERS]
    reason = why_no_arctic()
    if reason is None:
        makers += [partial(Arctic, earlier, **options) for options in ARCTIC_VARIANTS]
    report = {}
    for make in makers:
        name, row = _peer(workload, make, curves)
        report[name] = {**row, "ours": at_nodes(ours, row["nodes_per_step"])}
    return report, {} if reason is None else {"arctic": reason}


def _peer(workload: Workload, make: Callable[[], Peer], curves: Mapping[str, CostCurve]) -> tuple[str, dict[str, Any]]:
    """Replay each curve from a cold start; the drafts do not depend on the curve."""
    name, row, speedups = "", dict[str, Any](), dict[str, float]()
    for curve, costs in (curves or {"": FREE}).items():
        peer = make()
        tally = replay(workload.tested, partial(_itself, peer), peer, costs)
        name, row = peer.name, tally.to_dict()
        if curve:
            speedups[curve] = round(tally.speedup, 4)
    kept = ("mat", "nodes_per_step", "draft_ms", "tokens_changed")
    return name, {**{key: row[key] for key in kept}, "speedup": speedups}


def _itself(peer: Peer) -> Peer:
    return peer


def at_nodes(rows: Sequence[dict[str, Any]], nodes: float) -> float | None:
    """MAT of a sweep at `nodes` per step, interpolated (no nodes: 1); None beyond its largest."""
    points = sorted([(0.0, 1.0), *((row["nodes_per_step"], row["mat"]) for row in rows)])
    if nodes > points[-1][0]:
        return None
    at, mat = [point[0] for point in points], [point[1] for point in points]
    return round(float(np.interp(nodes, at, mat)), 4)


def full_sweep(workload: Workload, *, sparse: bool) -> list[dict[str, Any]]:
    """Rows by threshold; `sparse` adds thresholds that draft almost nothing."""
    return sweep(workload.tested, workload.sources, (*SPARSE, *THRESHOLDS) if sparse else THRESHOLDS)
