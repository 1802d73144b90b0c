"""`rest-local bench experiment`: its result, its tables, going on after an interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.experiment_data import make_data, make_text

from rest_local.bench.experiments import domains, own_text, retrieval_quality, tree_verification
from rest_local.bench.experiments.catalog import EXPERIMENTS, load
from rest_local.bench.experiments.running import journal_path, result_path
from rest_local.bench.recorded import Recorded
from rest_local.bench.results import Result
from rest_local.cli.main import run


def generated(*_: Any) -> list[Recorded]:
    """In the place of generations of the demo model."""
    return [Recorded(str(number), [1, 2, 3], [4, 5, 6, number + 7, 8, 9]) for number in range(4)]


@pytest.fixture
def measure(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs an experiment on a small folder of data with a tiny model."""
    model = tiny_model("llama")
    data, text = make_data(tmp_path / "data", model), make_text(tmp_path / "text")
    for module in (own_text, retrieval_quality):
        monkeypatch.setattr(module, "generate", generated)
    monkeypatch.setattr(domains, "PROMPT", 40)
    monkeypatch.setattr(domains, "ANSWER", 20)
    options = ["--data", str(data), "--model", str(model), "--text", str(text), "--tokens", "3k", "--quick"]

    def command(name: str, *more: str) -> int:
        return run(["bench", "experiment", name, *options, "--out", str(tmp_path / "out"), *more])

    return command


def test_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "experiment", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["domains", "--tokens", "3"], ["domains", "--tokens", "many"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "experiment", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["retrieval-quality", "datastore-size", "domains", "own-text"])
def test_a_result_is_written_and_shown(
    name: str, measure: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(name) == 0
    out, err = capsys.readouterr()
    path = result_path(tmp_path / "out", name)
    assert str(path) in err
    result = Result.load(path)
    assert (result.kind, result.quick) == (f"experiment/{name}", True)
    assert result.command.startswith(f"rest-local bench experiment {name} --data DIR --model ")
    assert str(tmp_path) not in result.command
    section = load(name).section(result)
    assert out.startswith(section.title)
    assert section.words
    assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)
    for figure in section.figures:
        for series in figure.series:
            assert len(series.y) == len(figure.categories or series.x)
    assert not journal_path(tmp_path / "out", name).exists()


def test_json_is_the_data(measure: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("datastore-size", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data == Result.load(result_path(tmp_path / "out", "datastore-size")).data
    assert [row["tokens"] for row in data["sizes"]] == [0, 3000]
    assert data["sizes"][0]["lookup_us"] is None
    assert data["sizes"][1]["lookup_us"] > 0
    assert data["sizes"][1]["mat"] > data["sizes"][0]["mat"] > 1  # SENTENCE is in the text


def test_an_interrupted_run_goes_on(
    measure: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, calls = own_text._recorded, list[str]()

    def interrupted(inputs: Any, name: str) -> dict[str, Any]:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(inputs, name)

    monkeypatch.setattr(own_text, "_recorded", interrupted)
    assert measure("own-text") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not result_path(tmp_path / "out", "own-text").exists()
    assert measure("own-text", "--seed", "1") == 1
    assert "begun by another run (seed was 0, now 1)" in capsys.readouterr().err
    assert measure("own-text") == 0
    assert calls == ["MT-Bench", "AlpacaEval", "AlpacaEval"]
    data = Result.load(result_path(tmp_path / "out", "own-text")).data
    assert {*data["sets"]} == {"MT-Bench", "AlpacaEval", own_text.GENERATED_NAME}
    variants = data["sets"]["AlpacaEval"]["variants"]
    assert variants["own"]["tokens"] == variants["people"]["tokens"]
    assert variants["own"]["mat"] > variants["people"]["mat"]  # all answers begin with the same sentence


def test_missing_answers_are_named(
    measure: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data" / "HumanEval.jsonl.gz").unlink()
    assert measure("datastore-size") == 1
    assert "HumanEval.jsonl.gz: no such file; --data names the folder" in capsys.readouterr().err
    assert measure("retrieval-quality") == 0
    assert "Left out: recorded answers" in capsys.readouterr().out


def test_trees_of_a_tiny_model(
    measure: Callable[..., int], tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_verification, "demo_model", lambda: tiny_model("llama"))
    assert measure("tree-verification") == 0
    result = Result.load(result_path(tmp_path / "out", "tree-verification"))
    (rows,) = result.data["models"].values()
    assert [row["branches"] for row in rows] == [1, 4, 4]
    section = tree_verification.section(result)
    assert "rows of logits" in section.words[1]
    assert [len(series.y) for series in section.figures[0].series] == [2]
