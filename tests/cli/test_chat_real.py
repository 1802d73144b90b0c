"""`rest-local chat` with a real tiny model: sessions go on with their cells, and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call


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
