"""`rest-local doctor` with a fake engine and the real llama.cpp."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import FakeEngine

from benchmarks.tiny import tiny_adapter
from rest_local.calibration import survey as survey_module
from rest_local.calibration.cost import SIZES, CostCurve, Deviations
from rest_local.calibration.curves import estimated
from rest_local.calibration.exactness import Comparison
from rest_local.calibration.measuring import Timing
from rest_local.calibration.survey import Case, Setting, Survey
from rest_local.cli.doctor import cost_rows, cost_table, exactness_lines

Install = Callable[..., FakeEngine]
Call = Callable[..., Any]


def test_json_holds_what_was_measured(fake_engine: Install, call: Call) -> None:
    fake_engine()
    facts = json.loads(call("doctor", "--json").out)
    assert (facts["drafting"]["kind"], facts["drafting"]["reason"]) == ("tree", "attention only")
    assert facts["drafting"]["lookups"].startswith("if the expected saving")  # which is 6% of a step
    assert facts["cost_curve"][1] == {"n_ctx": 512, "n": 8, "ratio": 3.25, "ms": 8.125, "certain": False}
    assert facts["self_test"] == {"rows": 492, "flips": 0}
    assert facts["versions"]["rest-local"]
    assert "llama-cpp-python" in facts["versions"]
    assert isinstance(facts["gpu_offload"], bool)


def test_report_says_how_far_the_cost_curve_can_be_trusted(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    assert json.loads(call("doctor", "--json").out)["calibration"] == engine.calibration
    lines = {" ".join(line.split()) for line in call("doctor").out.splitlines()}
    assert {"state provisional", "first measured 2 hours ago", "noise of a step 3%"} <= lines
    assert {"uncertainty 2 tokens 5%, 16 tokens 40%", "began as the curve m2ultra-7b-q8_0, scaled"} <= lines
    assert any("rest-local tune" in line for line in lines)
    assert engine.compared == 2
    fake_engine(calibration=engine.calibration | {"state": "final", "age_s": 3.0, "estimated_from": None})
    out = call("doctor").out
    assert "final" in out
    assert "3 s ago" in out
    assert "rest-local tune" not in out


def test_cost_table_has_a_line_for_each_context_and_gaps_where_nothing_was_measured() -> None:
    rows = [
        {"n_ctx": 64, "n": 1, "ratio": 1.0, "ms": 2.0, "certain": False},
        {"n_ctx": 64, "n": 4, "ratio": 2.5, "ms": 5.0, "certain": False},
        {"n_ctx": 512, "n": 1, "ratio": 1.0, "ms": 3.0, "certain": True},
    ]
    head, first, second, _ = cost_table(rows)
    assert head.split() == ["context", "1", "4", "one", "token"]
    assert first.split() == ["64", "1.00", "2.50", "2.00", "ms", "estimate"]
    assert second.split() == ["512", "1.00", "3.00", "ms"]


def test_costs_are_shown_for_contexts_that_a_request_can_have_and_that_were_measured() -> None:
    sizes = [1, 2, 64]
    fresh, name = estimated([(1, Timing(9.0)), (2, Timing(11.0))], "CPU", 1e-4)
    assert name
    assert [(row["n_ctx"], row["certain"]) for row in cost_rows(fresh, 8192)] == [(0, False)] * len(SIZES)
    measured = CostCurve.from_points([64, 2048, 4096], sizes, [[9.0, 11.0, 70.0]] * 3, Deviations.of(0.05, 0.05, 0.05))
    assert sorted({row["n_ctx"] for row in cost_rows(measured, 3072)}) == [64, 2048]
    assert all(row["certain"] for row in cost_rows(measured, 3072))
    assert all(len(line) <= 80 for line in cost_table(cost_rows(fresh, 8192)))


def _survey() -> Survey:
    cases = [
        Case("chains", False, Comparison(rows=256)),
        Case("chains", True, Comparison(rows=255, different=7)),
        Case("trees", False, Comparison(rows=256, different=33, flips=2, largest_gap=0.25)),
        Case("trees", True, Comparison(rows=254, different=40, flips=1, largest_gap=0.125)),
    ]
    settings = [
        Setting(True, "bf16", "bf16", 16, 1.5, 4.0, 1.0, 1.25, cases),
        Setting(True, "iq4_nl", "q8_0", 1, 3.0, 3.2, 2.0, 1.0, cases[:1]),
        Setting(False, "q4_0", "f16", 1, refused="no"),
    ]
    return Survey("tree", "full attention over removable cells", settings, 4, 12.0)


def test_exactness_is_a_table_of_80_columns() -> None:
    lines = list(exactness_lines(_survey().to_dict()))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[1].split()) == "flash cache thr chains chains+ trees trees+ flips gap plain x16"
    assert lines[2].split() == ["on", "bf16", "16", "0/256", "7/255", "33/256", "40/254", "3", "0.25", "1.00", "1.25"]
    assert lines[3].split() == ["on", "iq4_nl/q8_0", "1", "0/256", "0", "2.00", "1.00"]
    assert lines[4].split() == ["off", "q4_0/f16", "1", "refused"]
    assert "4 settings" in "\n".join(lines)


def test_exactness_is_measured_only_when_asked_for(
    fake_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def survey(model: Any, threads: int | None, seconds: float, progress: Any) -> Survey:
        asked.append((model.name, threads, seconds))
        progress("flash attention on", 1, 2)
        progress("flash attention off", 2, 2)
        return _survey()

    monkeypatch.setattr(survey_module, "survey", survey)
    fake_engine()
    assert "exactness" not in json.loads(call("doctor", "--json").out)
    done = call("doctor", "--json", "--exactness", "--threads", "3", "--seconds", "7")
    assert asked == [("fake", 3, 7)]
    facts = json.loads(done.out)["exactness"]
    assert facts["settings"][0]["cases"][2]["flips"] == 2
    assert done.err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = call("doctor", "--exactness")
    assert "33/256" in done.out
    assert "2 of 2: flash attention off" in done.err
    assert done.err.endswith("\x1b[2K"), "the bar is erased"


def test_exactness_of_a_real_model_with_an_adapter(call: Call, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    adapter = tiny_adapter("llama", tmp_path / "adapter.gguf", strength=0.1)
    done = call(
        "doctor", "--exactness", "--json", "-m", str(tiny_model("llama", quant="Q8_0")), "-t", "1", "-c", "256",
        "-fa", "on", "-ctk", "q8_0", "-ctv", "q4_0", "--lora-scaled", f"{adapter}:0.5", "--seconds", "20",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["model"]["adapters"] == [f"{adapter}:0.5"]
    assert (facts["settings"]["cache_type_k"], facts["settings"]["cache_type_v"]) == ("q8_0", "q4_0")
    (setting,) = facts["exactness"]["settings"]
    assert [case["rows"] > 20 for case in setting["cases"]] == [True] * 4
    assert (setting["plain"], setting["step"]) == (1, 1)
