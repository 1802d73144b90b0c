"""`rest-local tune` with a fake engine: what it says, and that it says how far that can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_cli_engine import FakeEngine

from rest_local.calibration.cost import SIZES, CostCurve
from rest_local.calibration.measuring import Measured

Install = Callable[..., FakeEngine]
Call = Callable[..., Any]

CURVE = CostCurve.from_points([64, 2048], SIZES, [[10.0 * (0.8 + 0.2 * n) for n in SIZES]] * 2)


def test_what_pays_is_explained_for_each_length(fake_engine: Install, call: Call) -> None:
    engine = fake_engine(measured=Measured(CURVE, True, 0.02, 0.0))
    done = call("tune")
    assert done.code == 0
    for n_ctx in (64, 2048):
        assert f"At {n_ctx} tokens of context one token takes 10 ms, 100 tokens a second." in done.out
    assert "A draft of 7 tokens costs 2.4 plain steps; it pays when at least 2 in 7 are accepted." in done.out
    assert done.out.rstrip().endswith("These costs are final (the rounds differ by 2%).")
    assert engine.compared == 1
    assert engine.closed


@pytest.mark.parametrize(("busy", "says"), [(0.4, "other processes disturbed 40%"), (0.0, "refined while")])
def test_a_result_that_is_not_final_says_so(fake_engine: Install, call: Call, busy: float, says: str) -> None:
    fake_engine(measured=Measured(CURVE, False, 0.3, busy))
    out = call("tune").out
    assert "These costs are provisional" in out
    assert says in out


def test_a_clock_that_stands_still_is_one_line_of_error(fake_engine: Install, call: Call) -> None:
    fake_engine(measured=ValueError("does the clock of this machine stand still?"))
    done = call("tune")
    assert done.code == 1
    assert done.err.startswith("rest-local: error: the costs of fake cannot be measured")
    assert done.err.count("\n") == 1
