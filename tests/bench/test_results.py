"""Files of results and journals: whole round trips, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rest_local
from rest_local.bench.results import Journal, Machine, Result, now, this_machine
from rest_local.errors import ResultInvalid

RESULT = Result(
    kind="compare",
    command="rest-local bench compare",
    machine=Machine("A processor", 2, 8.0, "Linux x86_64", "3.11.7", 0.25, ("avx2",), libraries={"numpy": "2.0"}),
    version="0.1.0",
    started="2026-11-22T18:00:00Z",
    seconds=12.5,
    quick=False,
    data={"speed": [1.0, 2.0]},
)


def test_a_result_is_read_as_it_was_saved(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "a.json")
    assert Result.load(tmp_path / "a.json") == RESULT
    assert RESULT.machine.line() == "A processor, 2 cores; load 0.2"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a result"),
        (b'{"kind": "compare"}', "not a result"),
        (b'{"rest_local_result": 2}', "format 2, and this version reads format 1"),
        (b'{"rest_local_result": 1}', "'machine'"),
        (b'{"rest_local_result": 1, "machine": {"colour": "red"}}', "colour"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ResultInvalid, match=reason):
        Result.load(path)


def test_this_machine_says_what_it_is() -> None:
    machine = this_machine()
    assert machine.processor
    assert machine.cores >= 1
    assert machine.libraries is not None
    assert "llama-cpp-python" in machine.libraries
    assert len(now()) == len("2026-11-22T18:00:00Z")


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, key = tmp_path / "run.jsonl", {"model": "abc", "prompts": 3, "sides": ("plain", "auto")}
    first = Journal(path, key)
    first.put("one", {"speed": 1.0})
    first.put("two", {"speed": 2.0})
    with path.open("ab") as file:
        file.write(b'{"unit": "three", "da')  # killed while it wrote
    second = Journal(path, key)
    assert [second["one"], second["two"]] == [{"speed": 1.0}, {"speed": 2.0}]
    assert "three" not in second
    assert second.started == first.started
    assert second.seconds == pytest.approx(first.seconds, abs=0.01)
    second.put("three", 3)
    assert len(Journal(path, key)) == 3
    machine = RESULT.machine
    result = second.finish(tmp_path / "a.json", kind="k", command="c", machine=machine, quick=True, data={"x": 1})
    assert not path.exists()
    assert Result.load(tmp_path / "a.json") == result
    assert (result.started, result.quick, result.data) == (first.started, True, {"x": 1})


def test_a_journal_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, {"model": "abc"})
    with pytest.raises(ResultInvalid, match="model was 'abc', now 'def'"):
        Journal(path, {"model": "def"})
    version = rest_local.__version__
    monkeypatch.setattr(rest_local, "__version__", "0.0.1")
    with pytest.raises(ResultInvalid, match=f"version was '{version}', now '0.0.1'"):
        Journal(path, {"model": "abc"})
    path.write_text(json.dumps([1]) + "\n")
    with pytest.raises(ResultInvalid, match="not the journal of a run"):
        Journal(path, {"model": "abc"})
