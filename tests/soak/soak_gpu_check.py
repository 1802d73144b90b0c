"""The GPU script on the CPU with the demo model, all of it. Not collected by `make test`, which looks for its commands
only; `make soak` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_whole_path_runs_on_a_cpu_with_the_demo_model(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--cpu", "--quick", "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--work", str(tmp_path)], capture_output=True, text=True, env=environment)
    result = json.loads(output.read_text("utf-8"))
    assert done.returncode == 0, result
    assert json.loads(done.stdout) == result
    assert "failed" not in result
    demo = result["models"]["demo"]
    assert {row["n"] for row in demo["tune"]["cost_curve"]} >= {1, 8, 64}
    assert demo["tune"]["command"].startswith("python -m rest_local tune")
    assert demo["copy"]["wall_clock"]["answers"] == 1
    assert set(result["left_out"]) >= {"MT-Bench", "chat", "HumanEval"}
    assert "rest_local doctor" in result["doctor"]["command"]
