"""Load cost curves by name, shipped ones or files, and estimate one from a few times.

A file is JSON: {"what": how it was measured, "machine": the CPU or GPU, "backend": CPU, CUDA or Metal, "contexts":
[tokens], "sizes": [tokens in a batch], "ms": [[milliseconds by size] by context]}.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import ESTIMATED, LARGEST, SIZES, CostCurve, check_table, physical, table_of
from rest_local.calibration.measuring import Timing
from rest_local.errors import InputInvalid

_FOLDER = Path(__file__).resolve().parent / "curves"


def shipped() -> tuple[str, ...]:
    """Return the names of the curves that ship with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_curve(name: str) -> CostCurve:
    """Load a new copy of a curve, from a file or a shipped one. Raises InputInvalid if there is none of that name, or
    its times are not physical: not positive, falling with n by more than noise, or above n single steps.
    """
    path = Path(name) if Path(name).is_file() else _FOLDER / f"{name}.json"
    try:
        points = json.loads(path.read_text("utf-8"))
        sizes, contexts = [int(n) for n in points["sizes"]], [int(c) for c in points["contexts"]]
        ms = np.array(points["ms"], np.float64)
        if ms.shape != (len(contexts), len(sizes)) or not sizes or sizes[0] != 1:
            raise ValueError("a row of times is needed for each context, for sizes from 1 on")
        if any(high <= low for low, high in itertools.pairwise(sizes)) or sizes[-1] > LARGEST:
            raise ValueError(f"sizes must rise, to {LARGEST} at most")
        check_table(contexts, table_of(sizes, ms.tolist()))
        if (1.2 * ms < np.maximum.accumulate(ms, axis=1)).any():  # noise is up to 20%
            raise ValueError("the time of a batch falls with its size")
        if (ms > 1.2 * ms[:, :1] * np.array(sizes)).any():
            raise ValueError("a batch takes longer than its tokens one by one")
        return CostCurve.from_points(contexts, sizes, ms.tolist())
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise InputInvalid("curve", name, f"not a cost curve ({cause}); shipped are {', '.join(shipped())}") from error


def facts(name: str) -> dict[str, str]:
    """Return what a shipped curve's file says about it: "what", "machine", "backend", "source", as far as it does."""
    points = json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
    return {key: str(points[key]) for key in ("what", "machine", "backend", "source") if key in points}


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
    files = {name: json.loads((_FOLDER / f"{name}.json").read_text("utf-8")) for name in shipped()}
    names = [name for name, points in files.items() if points.get("backend") == backend]
    names = names or [name for name, points in files.items() if points.get("backend") not in (None, "CPU")]
    rows = [physical(table_of(files[name]["sizes"], files[name]["ms"][:1])[0]) for name in names]
    return [(name, row / row[0]) for name, row in zip(names, rows, strict=True)]


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"


def curve_file(curve: CostCurve, what: str) -> str:
    """Return the text of a file for `load_curve`, with the measured sizes and the name of this machine."""
    ms = [[round(float(row[size - 1]), 3) for size in SIZES] for row in curve.ms]
    fields = {"what": what, "machine": machine(), "contexts": curve.contexts, "sizes": list(SIZES), "ms": ms}
    return json.dumps(fields, indent=2) + "\n"
