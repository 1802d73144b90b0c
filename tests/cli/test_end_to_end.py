"""The commands with llama.cpp, the committed demo model and a datastore on disk: nothing is fake here.

Few different settings, since each is measured once; one thread where the number does not matter, since two
that wait for each other on a busy machine take many times as long.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cli_engine import Call

from rest_local.llama.model import Model
from rest_local.paths import demo_model
from rest_local.retrieval import Datastore, datastore_path

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
    """A datastore of one file, built by `index build`."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(CODE * 3)
    done = call("index", "build", str(tmp_path / "src"), "-o", str(tmp_path / "mycode"))
    assert done.code == 0, done.err
    return str(tmp_path / "mycode")


def test_exact_output_is_plain_decoding(call: Call, mycode: str) -> None:
    given = ("generate", CODE * 2, "--exact", "--ctx", "256", "-n", "24", "--json")
    plain = json.loads(call(*given, "--policy", "off").out)
    drafted = json.loads(call(*given, "-d", mycode).out)
    assert drafted["text"] == plain["text"]
    assert plain["draft"]["drafted"] == 0
    assert drafted.keys() == KEYS
    assert drafted["draft"].keys() == DRAFT
    assert drafted["timings"].keys() == TIMINGS
    assert drafted["tokens"] == drafted["timings"]["predicted_n"]


def test_full_context_ends_with_length(call: Call) -> None:
    """64 cells, and the last token that comes out needs none. The model may not end by itself."""
    with Model.open(demo_model(), vocab_only=True) as model:
        never = [f"--logit-bias={token}=-inf" for token in model.vocabulary.ends]
    assert never
    given = ("generate", "import os\n", "-n", "500", "--ctx", "64", "--threads", "1", "--json")
    line = json.loads(call(*given, *never).out)
    assert line["finish_reason"] == "length"
    assert line["timings"]["prompt_n"] + line["tokens"] == 65


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(call: Call) -> None:
    done = call("generate", CODE * 20, "--ctx", "64", "--threads", "1")
    assert done.code == 1
    assert "the context holds" in done.err
    assert done.err.count("\n") == 1


def test_doctor_reports_the_demo_model(call: Call) -> None:
    facts = json.loads(call("doctor", "--ctx", "256", "--threads", "1", "--json").out)
    assert facts["model"]["path"] == str(demo_model())
    assert facts["drafting"]["kind"] == "tree"
    assert (facts["settings"]["n_batch"], facts["settings"]["n_ubatch"]) == (256, 256)  # no larger than the context
    assert facts["cost_curve"][0]["n"] == 1


@pytest.mark.parametrize(
    "content",
    [None, b"", b"PK\x03\x04 a zip", b"GGUF\x03\0\0\0", demo_model().read_bytes()[:1_000_000]],
    ids=["none", "empty", "zip", "header", "cut"],
)
def test_model_that_is_none_is_one_line(call: Call, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    done = call("generate", "x", "-m", str(path))
    assert done.code == 1
    assert str(path) in done.err
    assert done.err.count("\n") == 1


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


def test_build_missing_builds_without_a_question(call: Call, mycode: str, tiny_model: Callable[..., Path]) -> None:
    given = ("generate", "x", "-n", "2", "--threads", "1", "-d", mycode, "-m", str(tiny_model("llama")))
    assert call(*given, "--build-missing").err == ""
    assert call(*given).err == ""
    with Datastore.open(mycode) as store:
        assert store.directory == Path(mycode), "the index of the first model is where it was"


@pytest.mark.parametrize("grammar", ["root ::= (((", "root ::= <think>", "(" * 100_000])
def test_grammar_that_cannot_be_used_is_refused_and_its_file_named(call: Call, tmp_path: Path, grammar: str) -> None:
    (tmp_path / "g").write_text(grammar)
    done = call("generate", "x", "--ctx", "64", "--threads", "1", "--grammar-file", str(tmp_path / "g"))
    assert done.code == 1
    assert f"grammar file {tmp_path / 'g'}: grammar: " in done.err


def test_damaged_datastore_costs_a_warning_and_changes_nothing(call: Call, mycode: str) -> None:
    given = ("generate", CODE, "-n", "8", "--ctx", "256", "--threads", "1")
    plain = call(*given, "--policy", "off")
    tokens = next(Path(mycode).glob("*.tokens.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-1])
    done = call(*given, "-d", mycode)
    assert (done.code, done.out) == (0, plain.out)
    assert done.err.startswith(f"rest-local: warning: datastore {mycode}: {tokens.name} has ")
    assert done.err.count("\n") == 1


def test_datastore_named_default_is_used_without_being_asked_for(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(CODE * 3)
    asked: list[Path] = []
    rows = Datastore.rows
    monkeypatch.setattr(Datastore, "rows", lambda self, *given: asked.append(self.path) or rows(self, *given))
    given = ("generate", CODE, "-n", "4", "--ctx", "256", "--threads", "1", "--no-history")
    try:
        assert call("index", "build", str(tmp_path / "a.py")).code == 0  # -o is "default"
        assert call(*given, "--policy", "rest").code == 0  # it always looks something up
        assert set(asked) == {datastore_path("default")}
        assert call(*given, "--policy", "off").code == 0
    finally:
        call("index", "remove", "default", "--yes")
    count = len(asked)
    assert call(*given).code == 0
    assert len(asked) == count


def test_a_draft_model_that_does_not_fit_is_one_line_and_the_answer_is_the_same(
    call: Call, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    given = ("generate", CODE, "-n", "8", "--ctx", "256", "--threads", "1", "--policy", "off")
    alone = call(*given)
    refused = call(*given, "--draft-model", str(tiny_model("llama", quant="Q8_0")))
    assert (refused.code, refused.out) == (0, alone.out)
    (line,) = [line for line in refused.err.splitlines() if "draft model" in line]
    assert line.startswith("rest-local: warning: going on without the draft model: model ")
    assert "its vocabulary" in line
    absent = call(*given, "--draft-model", str(tmp_path / "absent.gguf"))
    assert (absent.code, absent.out) == (1, "")
    assert absent.err.count("absent.gguf") == 1
