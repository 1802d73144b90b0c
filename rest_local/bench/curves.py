"""Cost curves by name: those that come with the package, or a file.

A file is JSON: {"what": how it was measured, "machine": the CPU, "contexts": [tokens], "sizes": [tokens in a batch],
"ms": [[milliseconds by size] by context]}.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import numpy as np

from rest_local.errors import InputInvalid
from rest_local.planning.cost import SIZES, CostCurve

_FOLDER = Path(__file__).resolve().parent / "curves"


def shipped() -> tuple[str, ...]:
    """Names of the curves that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_curve(name: str) -> CostCurve:
    """A fresh copy of a curve. Raises InputInvalid where neither a file nor a shipped curve of that name is one."""
    path = Path(name) if Path(name).is_file() else _FOLDER / f"{name}.json"
    try:
        points = json.loads(path.read_text("utf-8"))
        curve = CostCurve.from_points(points["contexts"], points["sizes"], points["ms"])
        if curve.ms.ndim != 2 or len(curve.ms) != len(curve.contexts) or not len(curve.ms):
            raise ValueError("as many rows as contexts are needed")
        if not np.isfinite(curve.ms).all() or (curve.ms <= 0).any():
            raise ValueError("times are positive numbers")
        if sorted(curve.contexts) != curve.contexts or sorted(points["sizes"]) != points["sizes"]:
            raise ValueError("contexts and sizes must rise")
        return curve
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise InputInvalid("curve", name, f"not a cost curve ({cause}); shipped are {', '.join(shipped())}") from error


def machine() -> str:
    """The CPU that this runs on, and how many cores of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"


def curve_file(curve: CostCurve, what: str) -> str:
    """The text of a file that `load_curve` reads, measured on this machine, with the measured sizes only."""
    ms = [[round(float(row[size - 1]), 3) for size in SIZES] for row in curve.ms]
    fields = {"what": what, "machine": machine(), "contexts": curve.contexts, "sizes": list(SIZES), "ms": ms}
    return json.dumps(fields, indent=2) + "\n"
