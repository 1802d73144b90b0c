"""`rest-local chat` with a real tiny model, in a process of its own: sessions go on with their cells, and Ctrl-C."""

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

ROOT = Path(__file__).resolve().parents[2]
Ask = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def ask(tiny_model: Callable[..., Path], tmp_path: Path) -> Ask:
    """Return a function that asks one question, in a session."""

    def run(*arguments: str, model: Path | None = None, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "rest_local", "chat", "-m", str(model or tiny_model("llama")), "-t", "1"]
        environment = {**os.environ, "REST_LOCAL_DATA": str(tmp_path / "data")}
        return subprocess.run(
            [*command, "-n", "12", *arguments], input=stdin, capture_output=True, cwd=ROOT, env=environment, check=False
        )

    return run


def answer(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """The line of --json."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_session_needs_no_prefill_and_damaged_cells_cost_one_warning_and_no_token(ask: Ask, tmp_path: Path) -> None:
    sessions = tmp_path / "data" / "sessions"
    first = answer(ask("--json", "--session", "work", "what is one?" * 20))
    before = (sessions / "work.json").read_bytes()
    second = answer(ask("--json", "--session", "work", "and two?"))
    assert second["timings"]["cache_n"] >= first["timings"]["prompt_n"], "all of the first question"
    assert second["timings"]["prompt_n"] < first["timings"]["prompt_n"] / 2
    (sessions / "work.json").write_bytes(before)
    content = bytearray((sessions / "work.cells").read_bytes())
    content[len(content) // 2] ^= 255
    (sessions / "work.cells").write_bytes(content)
    done = ask("--json", "--session", "work", "and two?")
    anew = answer(done)
    assert anew["timings"]["cache_n"] == 0
    assert anew["text"] == second["text"]
    assert done.stderr.decode().count("warning: the cells in") == 1
    assert "it is damaged" in done.stderr.decode()
    assert not ask("--json", "--session", "work", "three").stderr, "they were written anew"


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
