"""The command group: exit codes, one-line errors, closed outputs, and interrupts."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from fake_cli_engine import Call

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]

# Runs the command line on the fake engine in a process of its own: `body` is put between the imports and the call.
PROGRAM = """
import signal, sys, time
sys.path.insert(0, {here!r})
from fake_cli_engine import HELLO, FakeEngine, FakePiece
from rest_local.cli import main, opening
script = HELLO
{body}
opening.open_engine = lambda config, live=None: FakeEngine([script])
sys.argv = ["rest-local", *{arguments!r}]
main.main()
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a command line on the fake engine; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, body: str = "", **streams: Any) -> subprocess.Popen[bytes]:
        program = PROGRAM.format(here=str(Path(__file__).parent), body=textwrap.dedent(body), arguments=arguments)
        command = [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, cwd=ROOT, **{"stderr": subprocess.PIPE, **streams}))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments", [("no-such-command",), ("--no-such-option",), ("generate", "a", "b"), ("completion",)]
)
def test_wrong_usage_is_one_line(call: Call, arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert done.err.startswith("rest-local: error: ")
    assert "--help`" in done.err
    assert done.err.count("\n") == 1


def test_a_question_that_is_left_ends_its_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rest_local.cli.main.cli.invoke", Mock(side_effect=click.Abort))
    done = call("models")
    assert (done.code, done.err) == (130, "\n")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("chatt", "chat"), ("run", "chat"), ("search", "index search"), ("index ls", "list"), ("index buidl", "build"),
        ("config shw", "show"), ("generate --tokns 5", "--tokens"),
    ],
)  # fmt: skip
def test_a_mistyped_command_gets_a_suggestion(call: Call, line: str, meant: str) -> None:
    done = call(*line.split())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert re.search(rf" \(did you mean .*'{meant}'.*\?\); see `rest-local.* --help`$", done.err.strip())


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_reason_to_fail(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m rest_local --version {closed}', sys.executable],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_output_closed_by_the_reader_is_quiet(start: Start) -> None:
    reading, writing = os.pipe()
    process = start("generate", "x", body="script = [FakePiece('x' * 100, (1,), ('model',))] * 10_000", stdout=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_an_edit_whose_patch_nobody_reads_writes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("y = 1\n")
    reading, writing = os.pipe()
    os.close(reading)
    body = """
        opening.require_template = lambda *given: None
        script = [FakePiece("```py\\ny = 2\\n```\\n", (1,), ("target",))]
    """
    given = ("-m", "m.gguf", str(tmp_path / "a.py"), "change it", "--yes", "--no-code")
    process = start("edit", *given, body=body, stdin=subprocess.DEVNULL, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.py", "y = 1\n")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
@pytest.mark.parametrize("arguments", [("generate", "x"), ("--help",)])
def test_full_disk_is_one_line(start: Start, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b"rest-local: error: output: No space left on device\n"


def test_second_interrupt_ends_at_once_even_inside_a_c_call(start: Start) -> None:
    """A mutex that is locked twice stands for a long llama_decode: no signal ends it, and no Python handler can run.

    Signals sent in one breath are delivered as one, so the second is sent when the first was counted.
    """
    body = """
        import ctypes, os
        from types import SimpleNamespace
        sys.modules["rest_local.llama.context"] = SimpleNamespace(abort_all=lambda: os.write(1, b"counted"))
        def wait():
            signal.signal(signal.SIGINT, lambda *_: None)  # it may come before the call
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
            libc.pthread_mutex_lock(mutex)
            os.write(1, b"ready")
            libc.pthread_mutex_lock(mutex)
        script = [wait]
    """
    process = start("generate", "x", body=body, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"ready"
    process.send_signal(signal.SIGINT)
    assert os.read(process.stdout.fileno(), 100) == b"counted"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
