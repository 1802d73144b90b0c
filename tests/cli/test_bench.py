"""`rest-local bench replay`: recorded answers in, figures out; one line where a file is not what it should be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.repository import Repository

from benchmarks.gguf_file import byte_vocabulary, write
from rest_local.calibration.curves import shipped
from rest_local.cli.bench import HERE
from rest_local.cli.main import run

COPY = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    lines = [{"instruction": COPY, "output": COPY + str(n)} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_replay_reports_every_curve(
    recorded: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    assert run(["bench", "replay", str(recorded), "--vocab", model, "--curves", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["curves"]) == [HERE, *shipped()]
    assert report["answers"] == 6
    flat = report["curves"]["assumed-flat-to-8"]
    assert flat["speedup"] > 1.5
    assert flat["by_source"]["context"]["accepted"] > 100


def test_a_replay_begins_with_one_line_for_this_machine(
    recorded: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    assert run(["bench", "replay", str(recorded), "--vocab", str(model)]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert list(report["curves"]) == [HERE]
    row = report["curves"][HERE]
    assert first.startswith(
        f"on this machine, with {model.name}: {row['speedup_with_lookups']:.1f} x plain, the worst "
    )
    assert ("estimate" in first) == (report["here"]["state"] != "final")
    assert run(["bench", "replay", str(recorded), "-m", str(model), "--limit", "2"]) == 0
    assert re.match(r"on this machine, with tiny llama: \d+\.\d x plain, measured\n", capsys.readouterr().out)


def test_a_file_without_weights_has_no_costs_here(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    keys |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    vocabulary = write(tmp_path / "vocabulary.gguf", "llama", keys, byte_vocabulary(384), [])
    assert run(["bench", "replay", str(recorded), "--vocab", str(vocabulary)]) == 2
    assert "--curves" in capsys.readouterr().err
    assert run(["bench", "replay", str(recorded), "--vocab", str(vocabulary), "--curves", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["curves"]) == list(shipped())


def test_history_drafts_the_first_answers_from_the_others(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps({"instruction": f"q{n}", "output": COPY}) for n in range(4)))
    arguments = ["bench", "replay", str(path), "--vocab", str(tiny_model("llama")), "--json"]
    arguments += ["--curve", "assumed-flat-to-8"]
    mats = []
    for history in ([], ["--history", "1"]):
        assert run([*arguments, *history]) == 0
        mats.append(json.loads(capsys.readouterr().out)["curves"]["assumed-flat-to-8"])
    assert mats[0]["mat"] < mats[1]["mat"]
    assert mats[1]["by_source"]["history"]["accepted"] > 20


def test_a_missing_file_and_a_wrong_curve_are_one_line(
    recorded: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    assert run(["bench", "replay", str(tmp_path / "none.jsonl"), "--vocab", model]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "curve.json").write_text('{"contexts": [1]}')
    for curve in ("no-such", str(tmp_path / "curve.json")):
        assert run(["bench", "replay", str(recorded), "--vocab", model, "--curve", curve]) == 1
        assert "assumed-flat-to-8" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = Repository(tmp_path / "repository")
    for version in ("one", "two", "three"):
        made.commit(version, {"file.txt": "".join(f"{version} line {n} of the file\n" for n in range(20))})
    return made.path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["bench", "replay", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_curve_is_told_in_lines(
    recorded: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recorded), "--vocab", str(tiny_model("llama")), "--curve", "assumed-flat-to-8"]
    assert run(["bench", "replay", *arguments]) == 0
    out = capsys.readouterr().out
    assert "; worst answer " in out
    assert " tokens a pass with " in out
    assert "accepted by depth" in out


def test_history_is_a_number_or_a_file(
    recorded: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    common = (str(recorded), "--vocab", str(tiny_model("llama")), "--curve", "assumed-flat-to-8", "--history")
    two, first = (replayed(capsys, *common, number) for number in ("2", "2:"))
    assert two["answers"] == first["answers"] == 2
    by_source = [report["curves"]["assumed-flat-to-8"]["by_source"] for report in (two, first)]
    assert by_source[0] == by_source[1]  # it repeats itself
    report = replayed(capsys, *common, str(recorded), "--limit", "1")
    assert report["answers"] == 1
    assert report["curves"]["assumed-flat-to-8"]["by_source"]["history"]["accepted"] > 0
    for wrong in ("0", "6", "99:"):
        assert run(["bench", "replay", *common, wrong]) == 2
        assert "there are 6 answers" in capsys.readouterr().err
    assert run(["bench", "replay", *common, str(tmp_path / "none.jsonl")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"rest-local: error: --history {tmp_path / 'none.jsonl'}: neither a number of answers nor")


def test_edits_of_a_repository(
    repository: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--git", str(repository), "--vocab", str(tiny_model("llama")), "--curve", "assumed-flat-to-8"]
    report = replayed(capsys, *arguments)
    assert report["answers"] == 2
    assert report["curves"]["assumed-flat-to-8"]["mat"] > 2
    assert replayed(capsys, *arguments, "--edits", "1")["answers"] == 1
    predicted = replayed(capsys, *arguments, "--predict")["curves"]["assumed-flat-to-8"]
    assert predicted["by_source"]["prediction"]["accepted"] > 10


def test_wall_clock_on_a_model_keeps_its_curve(
    recorded: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, curve = str(tiny_model("llama")), tmp_path / "measured.json"
    assert run(["bench", "replay", str(recorded), "-m", model, "--limit", "2", "--save-curve", str(curve)]) == 0
    out = capsys.readouterr().out
    assert "wall clock on" in out
    report = json.loads(out.splitlines()[-1])
    assert report["answers"] == 2
    assert report["curves"] == {}
    assert set(report["wall_clock"]) >= {"speedup", "implied", "implied_over_wall", "mat", "settings"}
    assert re.fullmatch(r"\d+ cores, .*\w.*", json.loads(curve.read_text())["machine"])
    row = replayed(capsys, str(recorded), "--vocab", model, "--curve", str(curve))["curves"][str(curve)]
    assert row["tokens_changed"] == 0


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["ANSWERS"], "--vocab"),
        (["--vocab", "MODEL"], "nothing to replay"),
        (["ANSWERS", "--vocab", "MODEL", "--policy", "none-such"], "none-such"),
        (["ANSWERS", "--vocab", "MODEL", "--save-curve", "x"], "--model"),
        (["ANSWERS", "--vocab", "MODEL", "-d", "none-such"], "none-such"),
        (["ANSWERS", "--vocab", "ANSWERS"], "answers.jsonl"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str],
    cause: str,
    recorded: Path,
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"ANSWERS": str(recorded), "MODEL": str(tiny_model("llama"))}
    assert run(["bench", "replay", *(names.get(argument, argument) for argument in arguments)]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert cause in captured.err
