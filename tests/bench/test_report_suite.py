"""The suite with fake parts: what is there is kept, what fails loses nothing else, and an interruption goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.results import folder_of, result

from rest_local.bench.report.suite_run import section
from rest_local.bench.results import Result
from rest_local.bench.suite.parts import Choice, Part, parts
from rest_local.bench.suite.record import FAILED, FILE, LEFT_OUT, MEASURED, Outcome, Record
from rest_local.bench.suite.running import check, run
from rest_local.cli.main import run as run_command
from rest_local.errors import ResultInvalid

WRITES = """
import sys, time
from pathlib import Path
from support.results import result
action, name = sys.argv[1:3]
folder = Path(sys.argv[sys.argv.index("--out") + 1])
with (folder / "ran.txt").open("a") as file: file.write(name + "\\n")
if action == "refuse": sys.exit(print("warning: x\\nrest-local: error: no data here", file=sys.stderr) or 1)
if action == "wrong": sys.exit(print("rest-local: error: no such option", file=sys.stderr) or 2)
if action == "raise": raise TypeError("a fault")
if action == "crash": __import__("os").kill(__import__("os").getpid(), 11)
if action == "sleep": time.sleep(600)
if action == "write": result(quick="--quick" in sys.argv).save(folder / f"{name}.json")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A program in the place of `rest-local`: its arguments are what it does, and the name of its result."""
    path = tmp_path / "program.py"
    path.write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]))
    return sys.executable, str(path)


def part(name: str, action: str = "write", **more: object) -> Part:
    return Part(name, f"{name}.json", (action, name), **more)  # type: ignore[arg-type]


def record(folder: Path) -> Record:
    folder.mkdir(exist_ok=True)
    return Record(folder, "rest-local bench suite DIR", quick=False)


def ran(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text().split()


def test_each_way_to_fail_has_its_reason_and_loses_no_other_part(tmp_path: Path, program: tuple[str, str]) -> None:
    folder = tmp_path / "r"
    found = [
        part("refused", "refuse"), part("wrong", "wrong"), part("raises", "raise"), part("crashes", "crash"),
        part("silent", "nothing"), part("absent", missing="no data"), part("good"),
    ]  # fmt: skip
    outcomes = run(found, folder, record(folder), quick=False, program=program)
    assert [(outcome.state, outcome.reason) for outcome in outcomes] == [
        (LEFT_OUT, "no data here"),
        (FAILED, "exit code 2: no such option"),
        (FAILED, "exit code 1: TypeError: a fault"),
        (FAILED, "ended by signal 11"),
        (FAILED, "ended without writing silent.json"),
        (LEFT_OUT, "no data"),
        (MEASURED, ""),
    ]
    assert "absent" not in ran(folder)
    shown = section(Result.load(folder / FILE))
    assert shown.words[0] == "1 of 7 parts were measured."
    assert "absent (no data)" in shown.words[1]


def test_a_part_that_hangs_is_stopped(tmp_path: Path, program: tuple[str, str]) -> None:
    folder = tmp_path / "r"
    (outcome,) = run([part("hangs", "sleep")], folder, record(folder), quick=False, program=program, longest_s=0.2)
    assert outcome.state == FAILED
    assert "was stopped" in outcome.reason


def test_what_is_there_is_kept_and_what_failed_is_tried_again(tmp_path: Path, program: tuple[str, str]) -> None:
    folder = tmp_path / "r"
    run([part("a"), part("b", "raise")], folder, record(folder), quick=False, program=program)
    kept = []
    outcomes = run(
        [part("a"), part("b"), part("c")], folder, record(folder), quick=False, program=program,
        done=lambda part, outcome, was: kept.append(was),
    )  # fmt: skip
    assert kept == [True, False, False]
    assert [outcome.state for outcome in outcomes] == [MEASURED] * 3
    assert ran(folder) == ["a", "b", "b", "c"]
    assert list(record(folder).outcomes) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.0.1"}, "measured by version 0.0.1"),
        ({"quick": True}, "measured with --quick"),
    ],
)
def test_results_of_another_version_or_size_are_refused(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    folder = folder_of(tmp_path / "r", a=result(**change), b=result())
    found = [part("a"), part("b")]
    with pytest.raises(ResultInvalid, match=reason):
        check(found, folder, record(folder), quick=False, again=False)
    assert (folder / "a.json").exists()
    check(found, folder, record(folder), quick=False, again=True)
    assert [path.name for path in folder.iterdir()] == ["b.json"]


def test_results_of_other_options_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "r", a=result())
    (folder / "a.journal").write_text("x")
    known = record(folder)
    known.put("a", Outcome("a.json", MEASURED, "", 1.0, {"model": "1", "data": "2"}))
    with pytest.raises(ResultInvalid, match="measured with another model; `again`"):
        check([part("a", options={"model": "3", "data": "2"})], folder, record(folder), quick=False, again=False)
    check([part("a", options={"model": "3", "data": "2"})], folder, record(folder), quick=False, again=True)
    assert not (folder / "a.json").exists()
    assert not (folder / "a.journal").exists()


def test_a_damaged_record_or_result_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "r", suite=result({"parts": {"a": {"state": 1}}}, kind="suite"))
    with pytest.raises(ResultInvalid, match=r"suite\.json: not the record of a suite"):
        record(folder)
    (folder / FILE).unlink()
    (folder / "a.json").write_text("{")
    with pytest.raises(ResultInvalid, match="not JSON"):
        check([part("a")], folder, record(folder), quick=False, again=False)


def test_an_interruption_keeps_what_is_finished(tmp_path: Path, program: tuple[str, str]) -> None:
    """Ctrl-C goes to the suite and to the part that runs. The same call goes on with that part."""
    folder = tmp_path / "r"
    folder.mkdir()
    script = tmp_path / "suite.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from rest_local.bench.suite.parts import Part
        from rest_local.bench.suite.record import Record
        from rest_local.bench.suite.running import run
        parts = [Part(name, name + ".json", (action, name)) for name, action in (("a", "write"), ("b", sys.argv[1]))]
        folder = Path({str(folder)!r})
        run(parts, folder, Record(folder, "x", quick=False), quick=False, program={program!r})
        """)
    )
    process = subprocess.Popen(
        [sys.executable, str(script), "sleep"], stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not (folder / "ran.txt").exists() or ran(folder) != ["a", "b"]:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert process.returncode != 0
    assert list(record(folder).outcomes) == ["a"]
    subprocess.run([sys.executable, str(script), "write"], check=True, timeout=60)
    assert ran(folder) == ["a", "b", "b"]
    assert [outcome.state for outcome in record(folder).outcomes.values()] == [MEASURED] * 2


def test_the_parts_name_what_they_lack(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    by_name = {each.name: each for each in parts(Choice(model))}
    assert by_name["replay MT-Bench"].missing == "no folder of recorded answers; give --data DIR"
    data = tmp_path / "data"
    data.mkdir()
    (data / "HumanEval.jsonl.gz").write_bytes(b"x")
    by_name = {each.name: each for each in parts(Choice(model, data=data))}
    assert by_name["replay HumanEval"].missing == "ggml-vocab-qwen2.gguf: not in the folder data"
    (data / "ggml-vocab-qwen2.gguf").write_bytes(b"x")
    before = {each.name: each for each in parts(Choice(model, data=data, quick=True))}
    assert not before["replay HumanEval"].missing
    assert before["replay HumanEval"].command(tmp_path, quick=True)[-3:] == ["--out", str(tmp_path), "--quick"]
    model.write_bytes(b"y")
    after = {each.name: each for each in parts(Choice(model, data=data, quick=True))}
    assert before["compare"].options != after["compare"].options
    assert before["replay HumanEval"].options == after["replay HumanEval"].options
    assert len({each.file for each in after.values()}) == len(after)


def test_the_command_refuses_foreign_results_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "r", compare=result(version="0.0.1"))
    assert run_command(["bench", "suite", str(folder), "--quick"]) == 1
    error = capsys.readouterr().err
    assert "compare.json: measured by version 0.0.1" in error
    assert "`again`" not in error
    assert "--again measures it anew" in error
    assert [path.name for path in folder.iterdir()] == ["compare.json"]
