"""`rest-local doctor` with a fake engine and the real llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fake_cli_engine import FakeEngine

from rest_local.cli.doctor import cost_table

Install = Callable[..., FakeEngine]
Call = Callable[..., Any]


def test_json_holds_what_was_measured(fake_engine: Install, call: Call) -> None:
    fake_engine()
    facts = json.loads(call("doctor", "--json").out)
    assert facts["drafting"] == {"kind": "tree", "reason": "attention only"}
    assert facts["cost_curve"][1] == {"n_ctx": 512, "n": 8, "ratio": 3.25, "ms": 8.125}
    assert facts["self_test"] == {"rows": 492, "flips": 0}
    assert facts["versions"]["rest-local"]
    assert "llama-cpp-python" in facts["versions"]
    assert isinstance(facts["gpu_offload"], bool)


def test_report_says_why_drafting_is_off(fake_engine: Install, call: Call) -> None:
    reason = "recurrent state cannot be rolled back"
    fake_engine(capability=SimpleNamespace(kind="none", reason=reason), self_test=None)
    done = call("doctor")
    assert done.code == 0
    assert f"why   {reason}" in done.out
    assert "not run" in done.out


def test_cost_table_has_a_line_for_each_context_and_gaps_where_nothing_was_measured() -> None:
    rows = [
        {"n_ctx": 64, "n": 1, "ratio": 1.0, "ms": 2.0},
        {"n_ctx": 64, "n": 4, "ratio": 2.5, "ms": 5.0},
        {"n_ctx": 512, "n": 1, "ratio": 1.0, "ms": 3.0},
    ]
    head, first, second, _ = cost_table(rows)
    assert head.split() == ["context", "1", "4", "one", "token"]
    assert first.split() == ["64", "1.00", "2.50", "2.00", "ms"]
    assert second.split() == ["512", "1.00", "3.00", "ms"]
