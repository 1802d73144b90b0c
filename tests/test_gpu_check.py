"""The GPU script runs on the CPU with the demo model, and continues after a part that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import load_script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    return load_script(SCRIPT, "gpu_check")


def test_the_whole_path_runs_on_a_cpu_with_the_demo_model(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--cpu", "--quick", "-o", str(output), "--work", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    result = json.loads(output.read_text("utf-8"))
    assert done.returncode == 0, result
    assert json.loads(done.stdout) == result
    assert "failed" not in result
    assert result["machine"]["cores"] >= 1
    demo = result["models"]["demo"]
    assert {row["n"] for row in demo["tune"]["cost_curve"]} >= {1, 8, 64}
    assert demo["tune"]["command"].startswith("python -m rest_local tune")
    assert demo["copy"]["wall_clock"]["answers"] == 1
    assert result["exactness"]["exact"]["differing"] == []
    assert result["exactness"]["exact"]["prompts"] == 4
    assert set(result["left_out"]) >= {"MT-Bench", "chat", "HumanEval"}
    assert "rest_local doctor" in result["doctor"]["command"]


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
