"""`rest-local batch` with the demo model: files, pipes, what is refused, what a stop leaves, and kills."""

import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batches import COMMAND, ENVIRONMENT, answers_of, kill_and_go_on, write_requests

from benchmarks.tiny import tiny
from rest_local.cli import main, opening

Call = Callable[..., Any]
SMALL = ("-c", "256", "-t", "1", "--no-history")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "in.jsonl", 5)


def test_answers_and_a_summary(call: Call, requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = call("batch", str(requests), "-o", str(output), *SMALL)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("rest-local: 5 requests answered: ")
    assert " tokens/s, " in done.err
    assert sorted(answers_of(output)) == [f"r{n}" for n in range(5)]


def test_a_second_run_answers_nothing_and_loads_no_model(
    call: Call, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    call("batch", str(requests), "-o", str(output), *SMALL)
    content = output.read_bytes()
    monkeypatch.setattr(opening, "open_engine", lambda config: pytest.fail("the model is loaded"))
    done = call("batch", str(requests), "-o", str(output), *SMALL)
    assert (done.code, done.err) == (0, "rest-local: 5 requests answered (5 of them before)\n")
    assert output.read_bytes() == content


def _split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    return str(tiny("llama", folder / "split.gguf", tensors_per_file=15)), "split"


def _of_ollama(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    for each in (manifest, folder / "blobs" / "blob"):
        each.parent.mkdir(parents=True)
    tiny("llama", folder / "tiny.gguf").rename(folder / "blobs" / "sha256-ab12")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab12"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return "tiny:latest", "tiny:latest"


@pytest.mark.parametrize("stored", [_split, _of_ollama])
def test_the_same_command_goes_on_whatever_the_models_file_is_called(
    call: Call, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Callable[..., tuple[str, str]]
) -> None:
    model, name = stored(tmp_path, monkeypatch)
    output = tmp_path / "out.jsonl"
    arguments = ("batch", str(requests), "-o", str(output), "-m", model, *SMALL)
    assert call(*arguments).code == 0
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:2]))
    done = call(*arguments)
    assert (done.code, "(2 of them before)" in done.err) == (0, True), done.err
    assert {line["response"]["body"]["model"] for line in answers_of(output).values()} == {name}


def test_through_pipes(
    requests: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(requests.read_bytes())))
    assert main.run(["batch", "-", *SMALL]) == 0
    out, err = capfdbinary.readouterr()
    assert len([json.loads(line) for line in out.splitlines()]) == 5
    assert err.startswith(b"rest-local: 5 requests answered")


def test_a_reader_that_is_gone_ends_it_without_a_word(requests: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, str(requests), *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate()
    assert (process.returncode, errors) == (1, b"")


def test_errors_are_lines_and_the_exit_code_says_so(call: Call, tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('not json\n{"prompt": "import os", "max_tokens": 2}\n' + json.dumps({"prompt": "x " * 900}) + "\n")
    for _ in range(2):  # errors are answers: the second run does not repeat them
        done = call("batch", str(path), "-o", str(output), *SMALL)
        assert done.code == 1
        assert "rest-local: error: 2 of 3 requests have an error in place of an answer; their lines in " in done.err
    lines = answers_of(output)
    assert lines["line-1"]["error"]["code"] == "invalid_json_line"
    assert lines["line-3"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert lines["line-2"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("none.jsonl", 1, "No such file"),
        ("empty.jsonl", 1, "contains no request"),
        ("in.jsonl -o in.jsonl", 2, "is the input"),
        ("in.jsonl -o .", 2, "is a directory"),
        ("in.jsonl -o none/out.jsonl", 1, "No such file"),
        ("in.jsonl --json", 2, "give -o FILE"),
        ("in.jsonl -o other.jsonl", 1, "give another output, or --replace to write it anew"),
        ("in.jsonl -o out.jsonl -m none.gguf", 1, "none.gguf: no such file"),
        ("in.jsonl -o out.jsonl -d none", 1, "none"),
    ],
)
def test_what_is_refused_is_one_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.jsonl").write_text('{"custom_id": "other", "id": "other"}\n')
    Path("in.jsonl").write_text('{"prompt": "x"}')
    Path("empty.jsonl").touch()
    done = call("batch", *arguments.split())
    assert done.code == code
    assert says in done.err
    assert done.err.count("\n") == 1
    assert Path("other.jsonl").read_text() == '{"custom_id": "other", "id": "other"}\n'
    assert not Path("out.jsonl").exists()


def test_replace_writes_it_anew(call: Call, requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("something else\n")
    assert call("batch", str(requests), "-o", str(output), *SMALL).code == 1
    assert call("batch", str(requests), "-o", str(output), "--replace", *SMALL).code == 0
    assert len(answers_of(output)) == 5


def wait_for_lines(process: subprocess.Popen[bytes], output: Path, count: int) -> None:
    """Wait until so many answers are written."""
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_an_interrupt_keeps_the_answers_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, word: str, code: int
) -> None:
    requests, output = write_requests(tmp_path / "in.jsonl", 4000), tmp_path / "out.jsonl"
    command = [*COMMAND, str(requests), "-o", str(output), *SMALL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT)
    wait_for_lines(process, output, 1)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code
    done = len(answers_of(output))
    assert 0 < done < 4000
    said = re.fullmatch(
        rf"rest-local: {word}; (\d+) of 4000 requests are answered in {re.escape(str(output))}; "
        r"the same command goes on from there\n",
        errors.decode(),
    )
    assert said, errors.decode()
    assert done - int(said[1]) in (0, 1)  # an interrupt between writing a line and counting it


def test_killed_at_random_moments_it_goes_on(tmp_path: Path) -> None:
    """No line is lost or doubled. `tests/soak/soak_batches.py` does it 50 times."""
    kill_and_go_on(tmp_path, kills=1, requests=20, random=random.Random(1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(call: Call, requests: Path) -> None:
    done = call("batch", str(requests), "-o", "/dev/full", *SMALL)
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "output /dev/full: No space left on device; the answers in it are whole" in done.err
