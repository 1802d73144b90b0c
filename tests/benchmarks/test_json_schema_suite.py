"""Cases are counted by what became of them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import json_schema_suite
from benchmarks.json_schema_suite import Bytes, Compositions


def _test(data: object, valid: bool) -> dict[str, object]:
    return {"description": "", "data": data, "valid": valid}


CASES = [
    ({"uniqueItems": True}, [_test([1, 1], False)]),
    ({"type": "integer"}, [_test(1, True), _test("x", False), _test(1.0, True), _test(10**20, True)]),
    ({"properties": {"b": {}, "a": {}}}, [_test({"a": 1, "b": 1}, True), _test({"c": 1}, True)]),
    ({"type": "string", "contentEncoding": "base64"}, [_test("%", False)]),
]


def test_cases_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "draft7/optional").mkdir(parents=True)
    cases = [{"description": str(schema), "schema": schema, "tests": tests} for schema, tests in CASES]
    (tmp_path / "draft7/mixed.json").write_text(json.dumps(cases))
    (tmp_path / "draft7/optional/more.json").write_text(json.dumps(cases[:1]))
    arguments = ["suite", str(tmp_path), "--draft", "draft7", "--optional", "--details"]
    monkeypatch.setattr(sys, "argv", arguments)
    json_schema_suite.main()
    said = capsys.readouterr().out
    assert "| mixed | 4 | 1 | 1 | 2 closed, 1 digits, 1 order | 1 | 1 |" in said
    assert "| optional more | 1 | 1 | 0 | 0 | 0 | 0 |" in said
    assert json.loads(said.splitlines()[-1]) == {
        "draft7": {"schemas": 5, "refused": 2, "accepted": 1, "rejected": 1, "broken": 1, "restricted": 4}
    }
    assert "broken      mixed: " in said


def test_compositions_are_compared_with_a_validator(tmp_path: Path) -> None:
    cases = [{"description": "", "schema": schema, "tests": tests} for schema, tests in CASES[1:3]]
    (tmp_path / "mixed.json").write_text(json.dumps(cases))
    found = Counter(kind for kind, _ in Compositions(tmp_path).run(60, Bytes()))
    assert min(found["accepted"], found["rejected"], found["restricted"]) > 10
    assert not found["broken"]


def test_a_folder_without_cases_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path)])
    with pytest.raises(SystemExit, match="no cases; name the folder `tests` of the suite"):
        json_schema_suite.main()
