"""A replay through a real context yields the recorded tokens, times both sides, and its curve can be stored."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rest_local.bench.wall import wall_clock
from rest_local.bench.workload import Recorded
from rest_local.calibration.cost import SIZES, CostCurve
from rest_local.calibration.curves import curve_file, load_curve
from rest_local.drafting.sources import Sources
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

TEXT = [10 + n % 7 + n // 3 for n in range(40)]
ANSWERS = [Recorded("copy", TEXT, TEXT), Recorded("new", [5, 6], list(range(60, 100)))]


def sources() -> Sources:
    return Sources([], 300)


class FixedCurve(CostCurve):
    """A curve that learns nothing from real steps."""

    def observe(self, n: int, n_ctx: int, ms: float) -> None:
        return


def flat(curve: CostCurve) -> Policy:
    """Return a policy that plans as if verification were free, so that it drafts on any machine."""
    return make_policy("auto", FixedCurve.from_points([0], [1, 64], [[50.0, 50.0]]))


def test_both_sides_yield_the_recorded_tokens_and_their_times_give_the_speedup(tiny_model: Callable[..., Path]) -> None:
    _, report = wall_clock(str(tiny_model("llama")), ANSWERS, sources, flat, rounds=1)
    assert report["tokens"] == sum(len(answer.answer) - 1 for answer in ANSWERS)
    assert report["mat"] > 1.2
    assert report["nodes_per_step"] > 0
    ratio = report["plain_ms_per_token"] / report["drafted_ms_per_token"]
    assert report["speedup"] == pytest.approx(ratio, rel=0.01)
    assert report["rounds"] == [report["speedup"]]
    assert report["implied_over_wall"] == pytest.approx(report["implied"]["speedup"] / report["speedup"], rel=0.01)


def test_a_measured_curve_can_be_stored_and_loaded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    measured, _ = wall_clock(str(tiny_model("llama")), ANSWERS, sources, partial(make_policy, "auto"), rounds=1)
    (tmp_path / "curve.json").write_text(curve_file(measured, "a test"))
    stored = load_curve(str(tmp_path / "curve.json"))
    at = [size - 1 for size in SIZES]
    assert stored.contexts == measured.contexts
    assert stored.ms[:, at] == pytest.approx(measured.ms[:, at], rel=0.01, abs=0.001)  # no size dearer than n of one
