"""`bench replay --out`: a result that the report shows, and that a rerun gives again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.bench.results import Result
from rest_local.cli.main import run

CURVE = ("--curve", "rtx4090-8b-iq3_xxs")


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    lines = [
        {"instruction": f"question {n}", "output": "one two three four " * 5, "dataset": "ab"[n % 2]} for n in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_replay_becomes_a_result_without_measured_times(
    answers: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["bench", "replay", str(answers), "--vocab", str(tiny_model("llama")), *CURVE, "--out", str(out)]
    assert run(arguments) == 0
    (path,) = out.iterdir()
    first = Result.load(path)
    assert path.name == "replay-answers.json"
    assert first.kind == "replay"
    assert first.command == (
        f"rest-local bench replay answers.jsonl --curve rtx4090-8b-iq3_xxs --vocab {tiny_model('llama').name} --out DIR"
    )
    assert str(tmp_path) not in path.read_text()
    (curve,) = first.data["curves"].values()
    assert {name: row["answers"] for name, row in curve["by_category"].items()} == {"a": 2, "b": 2}
    assert len(first.data["sweep"]) > 2
    assert run(arguments) == 0
    assert Result.load(path).data == first.data
    assert run([*arguments, "--quick", "--limit", "2"]) == 1
    assert "made by another command" in capsys.readouterr().err
    assert run(["bench", "report", str(out)]) == 0
    assert "answers.jsonl: a" in (out / "report.html").read_text("utf-8")


def test_a_timed_replay_is_no_result(answers: Path, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    arguments = ["bench", "replay", str(answers), "--vocab", str(tiny_model("llama")), "--out", str(tmp_path / "out")]
    assert run([*arguments, "--peers"]) == 2
    assert not (tmp_path / "out").exists()
