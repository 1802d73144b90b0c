"""The reports of `rest-local bench replay` on one workload: policy, bounds and sweep.

A `Workload` and names go in, dictionaries come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_local.bench.bounds import fair, oracle, reaches
from rest_local.bench.replay import MakePolicy, replay, sweep
from rest_local.bench.workload import Workload
from rest_local.calibration.cost import CostCurve

THRESHOLDS = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02)


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


def full_sweep(workload: Workload) -> list[dict[str, Any]]:
    """Rows by threshold."""
    return sweep(workload.tested, workload.sources, THRESHOLDS)
