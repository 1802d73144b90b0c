"""`rest-local bench replay`: recorded answers in, figures out; one line where a file is not what it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.cli.main import run

COPY = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    lines = [{"instruction": COPY, "output": COPY + str(n)} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_replay_reports_every_curve_and_the_sweep(
    recorded: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    assert run(["bench", "replay", str(recorded), "--vocab", model, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["curves"]) == {"cpu-2-cores-0.5b-q4_0", "flat-to-8"}
    assert report["answers"] == 6
    flat = report["curves"]["flat-to-8"]
    assert flat["speedup"] > 1.5
    assert flat["by_source"]["context"]["accepted"] > 100
    assert run(["bench", "replay", str(recorded), "--vocab", model, "--sweep", "--history", "2"]) == 0
    out = capsys.readouterr().out
    assert "nodes a step" in out
    report = json.loads(out.splitlines()[-1])
    assert report["answers"] == 2
    assert len(report["sweep"]) == 6
    assert report["curves"] == {}


def test_history_drafts_the_first_answers_from_the_others(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps({"instruction": f"q{n}", "output": COPY}) for n in range(4)))
    arguments = ["bench", "replay", str(path), "--vocab", str(tiny_model("llama")), "--curve", "flat-to-8", "--json"]
    mats = []
    for history in ([], ["--history", "1"]):
        assert run([*arguments, *history]) == 0
        mats.append(json.loads(capsys.readouterr().out)["curves"]["flat-to-8"])
    assert mats[0]["mat"] < mats[1]["mat"]
    assert mats[1]["by_source"]["history"]["accepted"] > 20


def test_off_is_plain_decoding(
    recorded: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    arguments = ["bench", "replay", str(recorded), "--vocab", model, "--policy", "off", "--curve", "flat-to-8"]
    assert run([*arguments, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["curves"]["flat-to-8"]
    assert (row["mat"], row["speedup"], row["worst_answer"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("content", ["", "nonsense", "[1]", '{"a": 1}', '{"instruction": "a", "output": 1'])
def test_files_that_hold_no_answers_are_refused(
    content: str, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(content)
    code = run(["bench", "replay", str(path), "--vocab", str(tiny_model("llama"))])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1
    assert "wrong.jsonl" in captured.err


def test_a_missing_file_and_a_wrong_curve_are_one_line(
    recorded: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    assert run(["bench", "replay", str(tmp_path / "none.jsonl"), "--vocab", model]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "curve.json").write_text('{"contexts": [1]}')
    for curve in ("no-such", str(tmp_path / "curve.json")):
        assert run(["bench", "replay", str(recorded), "--vocab", model, "--curve", curve]) == 2
        assert "flat-to-8" in capsys.readouterr().err
