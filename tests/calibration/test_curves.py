"""Damaged or impossible curve files are refused with their cause, and a new machine gets the nearest shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rest_local.calibration.cost import SIZES
from rest_local.calibration.curves import estimated, load_curve, shipped
from rest_local.calibration.measuring import Timing
from rest_local.errors import InputInvalid

GOOD: dict[str, Any] = {"contexts": [64, 512], "sizes": [1, 2, 4], "ms": [[10.0, 12.0, 15.0], [11.0, 13.0, 17.0]]}


def written(tmp_path: Path, change: dict[str, Any] | str) -> str:
    path = tmp_path / "curve.json"
    path.write_text(change if isinstance(change, str) else json.dumps(GOOD | change))
    return str(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"ms": [[10.0, 12.0, 5.0], [11.0, 13.0, 17.0]]}, "falls with its size"),
        ({"ms": [[10.0, -12.0, 15.0], [11.0, 13.0, 17.0]]}, "positive"),
        ({"ms": [[0.0, 12.0, 15.0], [11.0, 13.0, 17.0]]}, "positive"),
        ({"ms": [[10.0, math.nan, 15.0], [11.0, 13.0, 17.0]]}, "positive"),
        ({"ms": [[10.0, 12.0, 890.0], [11.0, 13.0, 17.0]]}, "one by one"),
        ({"ms": [[10.0, 12.0, 15.0]]}, "row of times"),
        ({"ms": [[10.0, 12.0], [11.0, 13.0]]}, "row of times"),
        ({"ms": []}, "row of times"),
        ({"contexts": [512, 64]}, "rise"),
        ({"contexts": [-1, 64]}, "rise"),
        ({"sizes": [2, 3, 4]}, "from 1 on"),
        ({"sizes": [1, 4, 2]}, "rise"),
        ({"sizes": [1, 2, 400]}, "64 at most"),
        ({"sizes": "fast"}, "not a cost curve"),
        ("{", "not a cost curve"),
        ("[]", "not a cost curve"),
        ("7", "not a cost curve"),
    ],
)
def test_an_impossible_curve_is_refused(tmp_path: Path, change: dict[str, Any] | str, cause: str) -> None:
    with pytest.raises(InputInvalid, match=cause):
        load_curve(written(tmp_path, change))


@pytest.mark.parametrize("busy", [False, True])
def test_a_new_machine_gets_the_nearest_shape_of_its_backend(busy: bool) -> None:
    for name, backend in (("xeon-amx-0.5b-q8_0", "CPU"), ("cpu-2-cores-0.5b-q4_0", "CPU"), ("m1pro-13b-q4_0", "Metal")):
        row = load_curve(name).ms[0]
        timed = [(n, Timing(3.0 * row[n - 1], busy)) for n in (1, 1, 4, 8)]
        curve, chosen = estimated(timed, backend, 1e-4)
        assert chosen == name
        for n in SIZES:
            assert curve.expected(0)[n - 1] == pytest.approx(3.0 * row[n - 1], rel=0.15)
        assert not curve.is_certain(0)
        assert curve.expected(4000)[0] > curve.expected(0)[0]


def test_an_unknown_gpu_without_valid_times_gets_a_curve() -> None:
    curve, name = estimated([], "SYCL", 1e-4)
    assert name in shipped()
    assert (curve.at(100) > 0).all()
    assert not curve.is_certain(0)
    for _ in range(20):
        curve.observe(1, 0, 150.0)  # the first real steps
    assert curve.expected(0)[0] == pytest.approx(150.0, rel=0.05)
