"""The GPU script calls commands that exist, and continues after a part that fails."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from support.scripts import load_script

from rest_local.cli.main import cli

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    return load_script(SCRIPT, "gpu_check")


def test_its_commands_exist(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make soak` runs them: they measure for half a minute."""
    asked = []

    def run_json(command: list[str], environment: dict[str, str]) -> dict[str, object]:
        _, _, module, *words = command
        if module == "benchmarks":
            asked.append(words[0])
            assert importlib.util.find_spec(f"benchmarks.{words[0]}")
        else:
            group: click.Command = cli
            while isinstance(group, click.Group):
                name, found, words = group.resolve_command(click.Context(group), words)
                assert found is not None
                group = found
            group.make_context(str(name), words)
            asked.append(name)
        return {"command": " ".join(command)}

    monkeypatch.setattr(script, "run_json", run_json)
    assert script.main(["--cpu", "--quick", "-o", str(tmp_path / "result.json"), "--work", str(tmp_path)]) == 0
    assert {"tune", "wall", "doctor", "exact"} <= {*asked}


def test_a_part_that_fails_is_reported_and_the_others_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_json(command: list[str], environment: dict[str, str]) -> dict[str, object]:
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        if "tune" in command:
            raise script.CommandFailed("python -m rest_local tune: exit 1: no memory")
        return {"command": " ".join(command)}

    monkeypatch.setattr(script, "run_json", run_json)
    output = tmp_path / "result.json"
    assert script.main(["--cpu", "--quick", "-o", str(output)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(output.read_text("utf-8"))
    assert result["failed"] == ["models / demo / tune"]
    assert "no memory" in result["models"]["demo"]["tune"]["error"]
    assert "command" in result["exactness"]


@pytest.mark.parametrize(
    ("program", "message"),
    [("print(1); raise SystemExit(3)", "exit 3"), ("print('no json')", "not JSON"), ("pass", "exit 0")],
)
def test_a_command_without_a_line_of_json_fails(script: ModuleType, program: str, message: str) -> None:
    with pytest.raises(script.CommandFailed, match=message):
        script.run_json([sys.executable, "-c", program], dict(os.environ))
