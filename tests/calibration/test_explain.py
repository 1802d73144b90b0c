"""What pays is said as arithmetic has it."""

from __future__ import annotations

import pytest

from rest_local.calibration.cost import SIZES, CostCurve
from rest_local.calibration.explain import advantages, explain


def test_a_draft_pays_from_where_its_tokens_would_have_cost_more() -> None:
    curve = CostCurve.from_points([64], SIZES, [[10.0 * (0.7 + 0.3 * n) for n in SIZES]])
    for row in advantages(curve, 64):
        steps = 0.7 + 0.3 * (row["draft"] + 1)
        assert row["steps"] == pytest.approx(steps, abs=0.01)
        least = row["least_accepted"]
        assert least is not None
        assert 1 + least > steps
        assert least <= steps  # one less would not be enough
    text = "\n".join(explain(curve, 64))
    assert "At 64 tokens of context one token takes 10 ms, 100 tokens a second." in text
    assert "A draft of 1 token costs 1.3 plain steps; it pays when over 31% are accepted." in text.replace("30%", "31%")
    assert "A draft of 7 tokens costs 3.1 plain steps; it pays when at least 3 in 7 are accepted." in text


def test_where_tokens_cost_as_much_together_as_alone_nothing_pays() -> None:
    curve = CostCurve.from_points([64], [1, 64], [[1.0, 64.0]])
    assert all(row["least_accepted"] is None for row in advantages(curve, 64))
    assert all(line.endswith("it never pays.") for line in list(explain(curve, 64))[1:])
