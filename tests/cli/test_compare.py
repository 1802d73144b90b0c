"""`rest-local bench compare` with a tiny model: its result, wrong options, an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.repository import Repository

from rest_local.bench.comparing.engine_sides import EngineSide
from rest_local.bench.comparing.section import section
from rest_local.bench.comparing.sides import Run, Task
from rest_local.bench.results import Result
from rest_local.cli.main import run

SIDES = {"rest", "sam", "respec", "auto", "llama-cpp-python prompt lookup"}
COPY = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "


@pytest.fixture
def arguments(tmp_path: Path, tiny_model: Callable[..., Path]) -> list[str]:
    """A comparison that takes a second: a small repository, one prompt of a workload, 6 tokens."""
    repository = Repository(tmp_path / "repository")
    for version in ("one", "two"):
        repository.commit(version, {"a.txt": "".join(f"{version} line {n} of the file\n" for n in range(12))})
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n".join(json.dumps({"instruction": COPY, "output": COPY + str(n)}) for n in range(3)))
    model = str(tiny_model("llama", quant="Q8_0"))  # has exact settings
    return [
        "bench", "compare", "-m", model, "--git", str(repository.path), "--quick", "-n", "6",
        "--replay", str(answers), "-t", "1", "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def test_a_comparison_ends_in_a_result_that_the_report_can_show(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--workloads", "edit,json,replay", "--json"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    result = Result.load(tmp_path / "out" / "compare.json")
    assert (result.kind, result.quick) == ("compare", True)
    assert printed["workloads"] == result.data["workloads"]
    assert not list((tmp_path / "out").glob("*.journal"))
    rows = {(row["mode"], row["settings"], row["workload"]): row for row in result.data["workloads"]}
    assert set(rows) == {
        ("real", "fast", "edit"), ("real", "fast", "json"), ("real", "exact", "edit"), ("real", "exact", "json"),
        ("replay", "fast", "replay/answers"), ("replay", "fast", "replay/edits"),
    }  # fmt: skip
    edit = rows["real", "fast", "edit"]["sides"]
    assert set(edit) == SIDES
    assert all(side["mat"] >= 1 for side in edit.values())
    assert rows["real", "fast", "json"]["sides"]["llama-cpp-python prompt lookup"]["prompts"] == 0
    exact = [side for key, row in rows.items() if key[1] == "exact" for side in row["sides"].values()]
    assert [side["differing"] for side in exact] == [0] * len(exact)
    replayed = rows["replay", "fast", "replay/answers"]["sides"]
    assert {"rest", "sam", "respec", "auto", "prompt-lookup", "ngram-simple", "ngram-mod"} <= set(replayed)
    assert result.data["failed"] == []
    assert section(result).tables
    assert "1 of 6: edit" in captured.err


def test_many_requests_at_once_and_a_table_for_people(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "".join(f"def number_{n}(value):\n    return value + {n}\n\n\n" for n in range(60))
    for name in ("a.py", "b.py"):
        (tmp_path / "repository" / name).write_text(source)
    assert run([*arguments, "--workloads", "batch", "--llama-server", str(tmp_path / "none")]) == 0
    out = capsys.readouterr().out
    assert "batch (real, 1 prompts" in out
    assert "llama-cpp-python prompt lookup: left out (decodes one request at a time)" in out
    assert "left out: batch: llama-server" in out
    assert "Worst prompt of auto" in out
    [row] = Result.load(tmp_path / "out" / "compare.json").data["workloads"]
    assert row["sides"]["auto"]["answers"] == 2


def test_a_peer_that_is_not_there_is_left_out_with_the_reason(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--workloads", "chat", "--llama-server", str(tmp_path / "none")]) == 0
    assert "no such program" in capsys.readouterr().out
    [failed] = Result.load(tmp_path / "out" / "compare.json").data["failed"]
    assert (failed["side"], failed["stage"]) == ("llama-server", "fast")


def test_an_interrupted_comparison_says_how_to_go_on_and_goes_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[str, str]] = []
    measured = EngineSide.run

    def watched(self: EngineSide, task: Task) -> Run:
        if task.workload == "json" and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        runs.append((self.name, task.workload))
        return measured(self, task)

    interrupted: list[bool] = []
    monkeypatch.setattr(EngineSide, "run", watched)
    command = [*arguments, "--workloads", "edit,json"]
    assert run(command) == 130
    err = capsys.readouterr().err
    assert "interrupted; the same command goes on with what is missing" in err
    assert not (tmp_path / "out" / "compare.json").exists()
    runs.clear()
    assert run([*command[:-1], "json"]) == 1  # another choice does not go on with these figures
    assert "begun by another run" in capsys.readouterr().err
    assert run(command) == 0
    assert "goes on after 1 finished unit" in capsys.readouterr().err
    assert [pair for pair in runs if pair[1] == "edit"].count(("plain", "edit")) == 3  # exact: warm-up, first and last
    units: list[dict[str, Any]] = Result.load(tmp_path / "out" / "compare.json").data["units"]
    assert [(unit["settings"], unit["workload"]) for unit in units] == [
        ("fast", "edit"), ("fast", "json"), ("exact", "edit"), ("exact", "json"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "code", "cause"),
    [
        (["--workloads", "editt"], 2, "do you mean edit"),
        (["-m", "NONE.gguf"], 1, "NONE.gguf"),
        (["--replay", "NONE.jsonl"], 1, "NONE.jsonl"),
        (["--data", "NONE"], 2, "NONE"),
        (["--draft-model", "NONE.gguf"], 1, "NONE.gguf"),
        (["--workloads", "mt-bench"], 2, "its prompts are not shipped"),
        (["--tokens", "1"], 2, "--tokens"),
    ],
)
def test_wrong_options_are_one_line(
    given: list[str], code: int, cause: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, *given]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert cause in captured.err
