"""`rest-local chat` with a real tiny model: sessions go on with their cells, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call

ROOT = Path(__file__).resolve().parents[2]


def test_a_session_needs_no_prefill_and_damaged_cells_cost_one_warning_and_no_token(
    call: Call, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    sessions = tmp_path / "data" / "sessions"

    def ask(question: str) -> tuple[dict[str, Any], str]:
        """The line of --json, and what was said on stderr."""
        given = ("-m", str(tiny_model("llama")), "-t", "1", "-n", "12", "--json", "--session", "work")
        done = call("chat", *given, question)
        assert done.code == 0, done.err
        return json.loads(done.out), done.err

    first, _ = ask("what is one?" * 20)
    before = (sessions / "work.json").read_bytes()
    second, _ = ask("and two?")
    assert second["timings"]["cache_n"] >= first["timings"]["prompt_n"], "all of the first question"
    assert second["timings"]["prompt_n"] < first["timings"]["prompt_n"] / 2
    (sessions / "work.json").write_bytes(before)
    content = bytearray((sessions / "work.cells").read_bytes())
    content[len(content) // 2] ^= 255
    (sessions / "work.cells").write_bytes(content)
    anew, said = ask("and two?")
    assert anew["timings"]["cache_n"] == 0
    assert anew["text"] == second["text"]
    assert said.count("warning: the cells in") == 1
    assert "it is damaged" in said
    assert not ask("three")[1], "they were written anew"


def test_ctrl_c_keeps_what_came_in_the_session(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rest_local", "chat", "-m", str(tiny_model("llama")), "-t", "1", "--policy", "off"]
    process = subprocess.Popen(
        [*command, "--session", "work", "--logit-bias", "256=-inf", "--logit-bias", "257=-inf", "hi"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "REST_LOCAL_DATA": str(tmp_path)},
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    stored = json.loads((tmp_path / "sessions" / "work.json").read_text(encoding="utf-8"))
    assert stored["messages"][1]["content"].rstrip("\n") == (first + rest).decode("utf-8", "replace").rstrip("\n")
    assert (tmp_path / "sessions" / "work.cells").stat().st_size > 0
