"""The experiments on published work run on a few answers, go on after an interruption, and say what they measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.experiment_data import make_data, make_text

from rest_local.bench import sandbox
from rest_local.bench.experiments import arctic, relaxed, respec_parts, rest_paper
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.peers import why_no_arctic
from rest_local.bench.results import Journal, Result, this_machine
from rest_local.errors import InputInvalid


@pytest.fixture
def inputs(tmp_path: Path, tiny_model: Callable[..., Path]) -> Inputs:
    model = tiny_model("llama")
    return Inputs(
        tmp_path, model, data=make_data(tmp_path / "data", model), text=(make_text(tmp_path / "text"),), quick=True
    )


def measured(module: Any, inputs: Inputs, tmp_path: Path) -> Result:
    """A run that ends, is begun again with its journal, and has the same figures without measuring anything."""
    path = tmp_path / "journal"
    data = module.run(inputs, Journal(path, {}))
    lines = path.read_bytes()
    assert module.run(inputs, Journal(path, {})) == data
    assert path.read_bytes() == lines
    kind = f"experiment/{module.NAME}"
    return Result(kind, "command", this_machine(), "0", "2026-11-23T00:00:00Z", 1.0, True, data)


def said(module: Any, result: Result) -> str:
    section = module.section(result)
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    for figure in section.figures:
        assert all(len(series.y) == len(series.x or figure.categories) for series in figure.series)
    return "\n".join(section.words)


def test_rest_finds_in_the_datastore_what_the_answers_repeat(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_paper, "SIZES_QUICK", {"HumanEval": (60, 400), "MT-Bench": (400,)})
    result = measured(rest_paper, inputs, tmp_path)
    rows = result.data["sets"]["HumanEval"]["rows"]
    assert [row["tokens"] for row in rows] == [60, 400]
    assert rows[0]["rest"]["mat"] > 1
    assert all(row["stored"]["nodes_per_step"] <= row["rest"]["nodes_per_step"] < 64 for row in rows)
    assert "2.65" in said(rest_paper, result)
    assert "people wrote" in said(rest_paper, result)


def test_rest_needs_recorded_answers(tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match="HumanEval"):
        rest_paper.run(Inputs(tmp_path, quick=True), Journal(tmp_path / "journal", {}))


RENAMES = {"renames": arctic.WORKLOADS["renames"]}


def test_without_arctic_the_reason_and_our_side_remain(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arctic, "why_no_arctic", lambda: "it is not there")
    monkeypatch.setattr(arctic, "WORKLOADS", RENAMES)
    result = measured(arctic, inputs, tmp_path)
    assert result.data["workloads"]["renames"]["ours"][arctic.ALONE][0]["mat"] > 1
    assert "it is not there" in said(arctic, result)
    assert "pip install arctic-inference" in said(arctic, result)


def test_arctic_drafts_the_same_edits(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_no_arctic():
        pytest.skip(reason)
    monkeypatch.setattr(arctic, "WORKLOADS", RENAMES)
    result = measured(arctic, inputs, tmp_path)
    report = result.data["workloads"]["renames"]
    assert len(report["arctic"]) == 4
    assert all(1 < row["mat"] <= row["nodes_per_step"] + 1 for row in report["arctic"])
    assert "times its trees' MAT" in said(arctic, result)


def report_of(mat: float, ours: float | None) -> dict[str, Any]:
    row = {"name": "arctic-tree-1x-0.1", "mat": mat, "nodes_per_step": 9.5, "ours": {arctic.ALONE: ours}}
    return {"answers": 1, "tokens": 10, "commit": None, "arctic": [row], "ours": {arctic.ALONE: []}}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (10.0, "1.000 (1.000 to 1.000)"),
        (10.0, "Missed"),
        (10.0, "1.050 is the most possible"),
        (10.5, "Reached"),
        (None, "no equal"),
    ],
)
def test_the_words_say_whether_the_figure_was_reached(ours: float | None, expected: str) -> None:
    data = {"why_not": None, "version": "9", "workloads": {"commits": report_of(10.0, ours)}, "left_out": {}}
    result = Result("experiment/arctic", "c", this_machine(), "0", "", 1.0, True, data)
    assert expected in said(arctic, result)


@pytest.fixture
def small_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respec_parts, "TOKENS_QUICK", 12)
    monkeypatch.setattr(respec_parts, "KINDS_QUICK", ("unseen",))
    monkeypatch.setattr(respec_parts, "well_known_modules", lambda: ("queue.py",))


@pytest.mark.usefixtures("small_prompts")
def test_every_part_of_respec_has_a_row_in_every_text(inputs: Inputs, tmp_path: Path) -> None:
    result = measured(respec_parts, inputs, tmp_path)
    data = result.data
    assert set(data["replay"]) == {"HumanEval", "MT-Bench", "edits"}
    for rows in data["replay"].values():
        assert [row["policy"] for row in rows] == [*respec_parts.IN_REPLAY, *respec_parts.OTHERS]
        assert all(set(row["speedup"]) == set(respec_parts.CURVES) for row in rows)
    by_policy = {row["policy"]: row for row in data["model"]}
    assert set(by_policy) == {*respec_parts.PARTS, *respec_parts.OTHERS, *respec_parts.RELAXED}
    assert all(row["relaxed"] == 0 for name, row in by_policy.items() if "relaxed" not in name)
    words = said(respec_parts, result)
    assert "edits (repeated text)" in words
    assert "unseen (fresh text)" in words


@pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
@pytest.mark.usefixtures("small_prompts")
def test_programs_of_every_verification_are_run(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxed, "MOST_TOKENS", 4)
    monkeypatch.setattr(relaxed, "human_eval", lambda path: [])
    monkeypatch.setattr(relaxed, "HELD_OUT", {})
    result = measured(relaxed, inputs, tmp_path)
    assert list(result.data["modes"]) == list(relaxed.MODES)
    for mode, kinds in result.data["modes"].items():
        assert {kind: row["problems"] for kind, row in kinds.items()} == {
            "memorised, body": 1, "memorised, last statement": 1,
        }  # fmt: skip
        assert all(row["passed"] == 0 for row in kinds.values())  # random weights
        assert mode.startswith("relaxed") or all(row["relaxed"] == 0 for row in kinds.values())
    words = said(relaxed, result)
    assert "solves none in any mode" in words
    assert "was not checked" in words


def test_without_a_sandbox_no_program_is_run(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxed, "why_not", lambda: "no sandbox here")
    assert "no sandbox here" in said(relaxed, measured(relaxed, inputs, tmp_path))
