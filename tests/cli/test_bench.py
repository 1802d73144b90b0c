"""`rest-local bench replay`: recorded answers in, figures out; one line where a file is not what it should be."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call
from support.repository import Repository

from benchmarks.gguf_file import byte_vocabulary, write
from rest_local.calibration.curves import shipped
from rest_local.cli.bench import HERE

COPY = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "
FLAT = "assumed-flat-to-8"


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "answers.jsonl"
    lines = [{"instruction": COPY, "output": COPY + str(n)} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


@pytest.fixture
def replayed(call: Call, model: str) -> Callable[..., dict[str, Any]]:
    """Return a function that replays with the vocabulary of the tiny model, and returns the report."""

    def run(*arguments: str) -> dict[str, Any]:
        done = call("bench", "replay", *arguments, "--vocab", model, "--json")
        assert done.code == 0, done.err
        return dict(json.loads(done.out))

    return run


def test_a_replay_reports_every_curve(recorded: str, replayed: Callable[..., dict[str, Any]]) -> None:
    report = replayed(recorded, "--curves")
    assert list(report["curves"]) == [HERE, *shipped()]
    assert report["answers"] == 6
    assert report["curves"][FLAT]["speedup"] > 1.5
    assert report["curves"][FLAT]["by_source"]["context"]["accepted"] > 100


def test_a_replay_begins_with_one_line_for_this_machine(recorded: str, model: str, call: Call) -> None:
    first, *_, last = call("bench", "replay", recorded, "--vocab", model).out.splitlines()
    report = json.loads(last)
    assert list(report["curves"]) == [HERE]
    speedup = report["curves"][HERE]["speedup_with_lookups"]
    assert first.startswith(f"on this machine, with {Path(model).name}: {speedup:.1f} x plain, the worst ")
    assert ("estimate" in first) == (report["here"]["state"] != "final")


def test_a_file_without_weights_has_no_costs_here(recorded: str, tmp_path: Path, call: Call) -> None:
    keys = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    keys |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    vocabulary = write(tmp_path / "vocabulary.gguf", "llama", keys, byte_vocabulary(384), [])
    refused = call("bench", "replay", recorded, "--vocab", str(vocabulary))
    assert (refused.code, "--curves" in refused.err) == (2, True)
    done = call("bench", "replay", recorded, "--vocab", str(vocabulary), "--curves", "--json")
    assert list(json.loads(done.out)["curves"]) == list(shipped())


def test_a_curve_is_told_in_lines(recorded: str, model: str, call: Call) -> None:
    told = call("bench", "replay", recorded, "--vocab", model, "--curve", FLAT).out
    for words in ("; worst answer ", " tokens a pass with ", "accepted by depth"):
        assert words in told


def test_history_is_a_number_or_a_file(recorded: str, replayed: Callable[..., dict[str, Any]]) -> None:
    two, first, other = (
        replayed(recorded, "--curve", FLAT, "--history", *given)
        for given in (("2",), ("2:",), (recorded, "--limit", "1"))
    )
    assert (two["answers"], first["answers"], other["answers"]) == (2, 2, 1)
    assert two["curves"][FLAT]["by_source"] == first["curves"][FLAT]["by_source"], "it repeats itself"
    assert other["curves"][FLAT]["by_source"]["history"]["accepted"] > 0


def test_edits_of_a_repository(tmp_path: Path, replayed: Callable[..., dict[str, Any]]) -> None:
    repository = Repository(tmp_path / "repository")
    for version in ("one", "two", "three"):
        repository.commit(version, {"file.txt": "".join(f"{version} line {n} of the file\n" for n in range(20))})
    arguments = ("--git", str(repository.path), "--curve", FLAT)
    report = replayed(*arguments)
    assert report["answers"] == 2
    assert report["curves"][FLAT]["mat"] > 2
    assert replayed(*arguments, "--edits", "1")["answers"] == 1
    assert replayed(*arguments, "--predict")["curves"][FLAT]["by_source"]["prediction"]["accepted"] > 10


def test_wall_clock_on_a_model_keeps_its_curve(
    recorded: str, model: str, tmp_path: Path, call: Call, replayed: Callable[..., dict[str, Any]]
) -> None:
    curve = tmp_path / "measured.json"
    done = call("bench", "replay", recorded, "-m", model, "--limit", "2", "--save-curve", str(curve))
    assert re.match(r"on this machine, with tiny llama: \d+\.\d x plain, measured\n", done.out)
    assert "wall clock on" in done.out
    report = json.loads(done.out.splitlines()[-1])
    assert (report["answers"], report["curves"]) == (2, {})
    assert set(report["wall_clock"]) >= {"speedup", "implied", "implied_over_wall", "mat", "settings"}
    assert re.fullmatch(r"\d+ cores, .*\w.*", json.loads(curve.read_text())["machine"])
    assert replayed(recorded, "--curve", str(curve))["curves"][str(curve)]["tokens_changed"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (["ANSWERS"], 2, "--vocab"),
        (["--vocab", "MODEL"], 2, "nothing to replay"),
        (["none.jsonl", "--vocab", "MODEL"], 1, "none.jsonl"),
        (["ANSWERS", "--vocab", "MODEL", "--policy", "none-such"], 2, "none-such"),
        (["ANSWERS", "--vocab", "MODEL", "--save-curve", "x"], 2, "--model"),
        (["ANSWERS", "--vocab", "MODEL", "-d", "none-such"], 1, "none-such"),
        (["ANSWERS", "--vocab", "ANSWERS"], 1, "answers.jsonl"),
        (["ANSWERS", "--vocab", "MODEL", "--curve", "none-such"], 1, FLAT),
        (["ANSWERS", "--vocab", "MODEL", "--curve", "CURVE"], 1, FLAT),
        (["ANSWERS", "--vocab", "MODEL", "--curve", FLAT, "--history", "0"], 2, "there are 6 answers"),
        (["ANSWERS", "--vocab", "MODEL", "--curve", FLAT, "--history", "6"], 2, "there are 6 answers"),
        (["ANSWERS", "--vocab", "MODEL", "--curve", FLAT, "--history", "none.jsonl"], 1, "neither a number of answers"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], code: int, cause: str, recorded: str, model: str, tmp_path: Path, call: Call
) -> None:
    curve = tmp_path / "curve.json"
    curve.write_text('{"contexts": [1]}')
    names = {"ANSWERS": recorded, "MODEL": model, "CURVE": str(curve)}
    done = call("bench", "replay", *(names.get(argument, argument) for argument in arguments))
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), done.err
    assert cause in done.err
