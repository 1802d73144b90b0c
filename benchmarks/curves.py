"""Load cost curves: shipped ones by name, and files that `python -m benchmarks wall --save-curve` wrote."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from rest_local.calibration.cost import SIZES, CostCurve
from rest_local.calibration.tuning import FOLDER


def load_curve(name: str) -> CostCurve:
    """Load a new copy of a curve, from a file or a shipped one. Raises OSError, ValueError or KeyError for another."""
    path = Path(name) if Path(name).is_file() else FOLDER / f"{name}.json"
    points = json.loads(path.read_text("utf-8"))
    return CostCurve.from_points(points["contexts"], points["sizes"], points["ms"])


def curve_file(curve: CostCurve, what: str) -> str:
    """Return the text of a file for `load_curve`, with the measured sizes and the name of this machine."""
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    ms = [[round(float(row[size - 1]), 3) for size in SIZES] for row in curve.ms]
    fields = {"what": what, "machine": machine, "contexts": curve.contexts, "sizes": list(SIZES), "ms": ms}
    return json.dumps(fields, indent=2) + "\n"
