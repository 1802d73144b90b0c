"""The table of tested versions, what a run of tests says in words, and the weekly run."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from support.scripts import load_script

from rest_local.llama import needed

ROOT = Path(__file__).parents[1]

# As pytest writes it: one test that passed, one that failed, one with an error, one skipped, and a crashed process.
JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="2" skipped="1" tests="5">
<testcase classname="tests.llama.test_model" name="test_opens[llama]" time="0.1" />
<testcase classname="tests.llama.test_model" name="test_size" time="0.1">
<failure message="AssertionError: assert 3 == 4&#10;  more">def test_size():</failure></testcase>
<testcase classname="tests.llama.test_batch" name="test_bounds" time="0">
<error message="failed on setup with &quot;AttributeError: llama_x&quot;">E</error></testcase>
<testcase classname="tests.llama.test_library" name="test_macos" time="0">
<skipped message="no macOS">x</skipped></testcase>
<testcase classname="" name="tests/llama/test_context.py" time="0">
<failure message="worker 'gw0' crashed while running 'tests/llama/test_context.py::test_a'">x</failure></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def script() -> ModuleType:
    return load_script(ROOT / "scripts" / "compatibility.py", "compatibility")


def test_a_report_of_pytest_is_read(script: ModuleType) -> None:
    passed, skipped, failed = script.read_junit(JUNIT)
    assert (passed, skipped) == (1, 1)
    assert failed == {
        "tests.llama.test_model::test_size": "AssertionError: assert 3 == 4",
        "tests.llama.test_batch::test_bounds": 'failed on setup with "AttributeError: llama_x"',
        "tests/llama/test_context.py": "worker 'gw0' crashed while running 'tests/llama/test_context.py::test_a'",
    }
    with pytest.raises(ValueError, match="no report of pytest"):
        script.read_junit("<testsuites>")


def test_the_summary_says_what_broke(script: ModuleType) -> None:
    passed, skipped, failed = script.read_junit(JUNIT)
    lacks = ["llama_version", "llama_model_params.load_mode"]
    lines = list(script.summary(script.Outcome("0.3.99", passed=passed, skipped=skipped, failed=failed, lacks=lacks)))
    assert lines[0] == "## llama-cpp-python 0.3.99: does not work"
    assert {"- `llama_version`", "- `llama_model_params.load_mode`"} <= {*lines}
    assert "1 tests passed, 3 failed, 1 were skipped." in lines
    assert "- `tests.llama.test_model::test_size`: AssertionError: assert 3 == 4" in lines
    assert next(iter(script.summary(script.Outcome("1", passed=2)))) == "## llama-cpp-python 1: works"
    assert "Nothing was tested: no compiler" in list(script.summary(script.Outcome("1", error="no compiler")))


@pytest.mark.parametrize("outcome", [{"passed": 0}, {"lacks": ["a"]}, {"failed": {"a": "b"}}, {"error": "c"}], ids=str)
def test_a_version_works_only_where_tests_passed_and_nothing_is_missing(
    script: ModuleType, outcome: dict[str, object]
) -> None:
    assert script.Outcome("1", passed=5).works
    assert not script.Outcome("1", **{"passed": 5, **outcome}).works


def test_a_new_run_of_a_version_replaces_its_row(script: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    for version, passed in (("0.3.36", 1), ("0.3.9", 2), ("0.3.36", 3)):
        script.record(script.Outcome(version, passed=passed, python="3.11.7", system="Linux x86_64"), table)
    script.record(script.Outcome("0.3.36", passed=4, python="3.9.1", system="Linux x86_64"), table)
    rows = json.loads(table.read_text("utf-8"))
    assert [(row["version"], row["python"], row["passed"]) for row in rows] == [
        ("0.3.9", "3.11.7", 2),
        ("0.3.36", "3.9.1", 4),
        ("0.3.36", "3.11.7", 3),
    ]


def test_the_page_equals_the_table_and_the_table_the_versions_that_are_advised(script: ModuleType) -> None:
    rows = json.loads(script.TABLE.read_text("utf-8"))
    assert script.PAGE.read_text("utf-8") == script.page(rows), "python scripts/compatibility.py --write"
    works = sorted({row["version"] for row in rows if script.Outcome(**row).works}, key=script.order)
    assert tuple(works) == needed.TESTED
    assert all((ROOT / test).exists() for test in script.TESTS)


def test_names_are_compared_and_tests_are_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WORKERS", ())  # one process is enough for a file
    outcome = script.examine(Path(sys.executable), "any", tmp_path, ["tests/llama/test_picture.py"])
    assert outcome.works, list(script.summary(outcome))
    assert outcome.version != "any", "the version is that of the library"
    assert outcome.passed > 1


def test_the_weekly_run_is_a_script_that_the_workflow_calls() -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci" / "weekly"], check=True)
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    assert {"run": ".ci/weekly"} in job["steps"]
    assert (ROOT / ".ci" / "weekly").stat().st_mode & 0o111


def test_the_weekly_script_calls_what_exists(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / ".ci" / "weekly").read_text("utf-8")
    with pytest.raises(SystemExit):
        script.main(["--help"])
    options = capsys.readouterr().out
    assert "scripts/compatibility.py newest" in text
    used = [word for word in text.split() if word.startswith("--")]
    assert used
    assert all(option in options for option in used)
