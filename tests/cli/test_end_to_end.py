"""The commands with llama.cpp, the committed demo model and a datastore on disk: nothing is fake here.

Few different settings, since each is measured once; one thread where the number does not matter, since two
that wait for each other on a busy machine take many times as long.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call

CODE = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
KEYS = {"text", "tokens", "finish_reason", "timings", "draft"}
TIMINGS = {"cache_n", "draft_n", "draft_n_accepted"} | {
    f"{what}_{unit}" for what in ("prompt", "predicted") for unit in ("n", "ms", "per_token_ms", "per_second")
}
DRAFT = {"steps", "drafted", "accepted", "relaxed", "mat", "by_source", "lookup_us", "lookups"} | {
    "driver_ms_per_step",
    "decode_ms_per_step",
    "plain_step_ms",
}


@pytest.fixture
def mycode(call: Call, tmp_path: Path) -> str:
    """Build a datastore of one file with `index build`."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(CODE * 3)
    done = call("index", "build", str(tmp_path / "src"), "-o", str(tmp_path / "mycode"))
    assert done.code == 0, done.err
    return str(tmp_path / "mycode")


def test_exact_output_is_plain_decoding(call: Call, mycode: str) -> None:
    given = ("generate", CODE * 2, "--exact", "--ctx", "256", "-n", "24", "--json", "--temp", "0")
    plain = json.loads(call(*given, "--policy", "off").out)
    drafted = json.loads(call(*given, "-d", mycode).out)
    assert drafted["text"] == plain["text"]
    assert plain["draft"]["drafted"] == 0
    assert drafted.keys() == KEYS
    assert drafted["draft"].keys() == DRAFT
    assert drafted["timings"].keys() == TIMINGS
    assert drafted["tokens"] == drafted["timings"]["predicted_n"]


def test_datastore_of_another_vocabulary_costs_a_line_and_a_rebuild_adds_it(
    call: Call, mycode: str, tiny_model: Callable[..., Path]
) -> None:
    """The line names the command, that command works, and the first model keeps what it has."""
    given = ("generate", "x", "-n", "2", "--threads", "1", "-d", mycode, "-m", str(tiny_model("llama")))
    done = call(*given)
    assert (done.code, done.err.count("\n")) == (0, 1)
    command = done.err.split("`")[1]
    assert command == f"rest-local index rebuild {mycode} -m {tiny_model('llama')}"
    assert call(*shlex.split(command)[1:]).code == 0
    assert call(*given).err == ""
    assert call("generate", "x", "-n", "2", "--threads", "1", "-d", mycode).err == ""
    assert len(json.loads(call("index", "info", mycode, "--json").out)["indexes"]) == 2


# ---- Sessions of a chat --------------------------------------------------------------------------------------------


def test_a_session_needs_no_prefill_and_damaged_cells_cost_warnings_and_no_token(
    call: Call, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    sessions = tmp_path / "data" / "sessions"

    def ask(question: str) -> tuple[dict[str, Any], str]:
        """Return the line of --json, and what was said on stderr."""
        given = ("-m", str(tiny_model("llama")), "-t", "1", "-n", "12", "--json", "--temp", "0", "--session", "work")
        done = call("chat", *given, question)
        assert done.code == 0, done.err
        return json.loads(done.out), done.err

    first, _ = ask("what is one?" * 20)
    before = (sessions / "work.json").read_bytes()
    second, _ = ask("and two?")
    assert second["timings"]["cache_n"] >= first["timings"]["prompt_n"], "all of the first question"
    assert second["timings"]["prompt_n"] < first["timings"]["prompt_n"] / 2
    (sessions / "work.json").write_bytes(before)
    for path in (tmp_path / "cache").rglob("*.cells"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    anew, said = ask("and two?")
    assert anew["timings"]["cache_n"] == 0
    assert anew["text"] == second["text"]
    assert said.count("is not used, its text is evaluated again: it is damaged") == said.count("warning:") > 0
    assert not ask("three")[1], "they were written anew"
