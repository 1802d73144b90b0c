"""Estimate a cost curve from a few times, with the shape of a shipped one.

The file of a shipped one is JSON: {"what": how it was measured, "machine": the CPU or GPU, "backend": CPU, CUDA or
Metal, "contexts": [tokens], "sizes": [tokens in a batch], "ms": [[milliseconds by size] by context]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import ESTIMATED, CostCurve, physical, table_of
from rest_local.calibration.measuring import Timing

FOLDER = Path(__file__).resolve().parent / "curves"


def shipped() -> tuple[str, ...]:
    """Return the names of the curves that ship with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def estimated(timed: Sequence[tuple[int, Timing]], backend: str, attention: float) -> tuple[CostCurve, str]:
    """Estimate the curve of a machine from a few times at a short context. Returns the curve and the name of the
    shipped curve whose shape it has: the nearest one of that backend.

    `timed` is (tokens in a batch, time), `attention` the share of a plain step that one more token of context adds. All
    sizes are uncertain; the given times are the curve's first observations.
    """
    # The default is for a clock that cannot measure a plain step. The first real steps correct it.
    plain_ms = min((timing.ms for n, timing in timed if n == 1), default=10.0)
    name, shape = min(
        _shapes(backend), key=lambda each: sum((math.log(t.ms / plain_ms / each[1][n - 1])) ** 2 for n, t in timed)
    )
    base = plain_ms * shape
    curve = CostCurve([0, 4096], np.stack([base, base * (1 + 4096 * attention)]), ESTIMATED)
    for n, timing in timed:
        curve.observe(n, 0, timing.ms, timing.busy)
    return curve, name


def _shapes(backend: str) -> list[tuple[str, NDArray[np.float64]]]:
    """Return (name, t(n)/t(1) for n = 1..64) of this backend's shipped curves, or of all GPUs if it is unknown."""
    files = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in shipped()}
    names = [name for name, points in files.items() if points.get("backend") == backend]
    names = names or [name for name, points in files.items() if points.get("backend") not in (None, "CPU")]
    rows = [physical(table_of(files[name]["sizes"], files[name]["ms"][:1])[0]) for name in names]
    return [(name, row / row[0]) for name, row in zip(names, rows, strict=True)]
