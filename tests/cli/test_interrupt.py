"""Ctrl-C with the real model in a process of its own: in prefill, while tokens come, and twice."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.toy import demo_model

from rest_local.cli import interrupt
from rest_local.llama.model import Model

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]
GIVEN = ("generate", "--ctx", "1024", "--threads", "1", "--policy", "off")

# Runs the command line; every decode of the generation proper (not those of the measurements at load) first calls
# `at(number, tokens in the batch)`. A signal that a process sends to itself needs no waiting and no luck.
PROGRAM = """
import os, signal, sys
from rest_local.cli import main
from rest_local.decoding.engine import Engine
from rest_local.llama.context import Context
{at}
calls, decode, generate = 0, Context.decode, Engine.generate
def watched(self, *given, **more):
    def counted(context):
        global calls
        calls += 1
        at(calls, context.batch.n_tokens)
        return decode(context)
    Context.decode = counted
    return generate(self, *given, **more)
Engine.generate = watched
sys.argv = ["rest-local", *sys.argv[1:]]
main.main()
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a command line in a process; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, at: str | None = None, prompt: bytes = b"import os\n") -> subprocess.Popen[bytes]:
        program = ["-m", "rest_local"] if at is None else ["-c", PROGRAM.format(at=textwrap.dedent(at))]
        command = [sys.executable, *program, *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        stdin = started[-1].stdin
        assert stdin is not None
        stdin.write(prompt)
        stdin.close()
        started[-1].stdin = None  # `communicate` would write to it
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def endless() -> tuple[str, ...]:
    """Return options that forbid every token a text can end with."""
    with Model.open(demo_model(), vocab_only=True) as model:
        return tuple(word for token in model.vocabulary.ends for word in ("--logit-bias", f"{token}=-inf"))


def test_interrupt_once_text_has_come_keeps_it(start: Start, endless: tuple[str, ...]) -> None:
    process = start(*GIVEN, "-n", "1000", *endless)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"")
    assert first
    assert rest.endswith(b"\n")
    (first + rest).decode("utf-8")


def test_interrupt_in_a_long_prompt_stops_before_the_next_batch(start: Start) -> None:
    at = """
        def at(call, n):
            print(f"batch of {n}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
    """
    process = start(*GIVEN, at=at, prompt=b"value = other + 1\n" * 110)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, b"")
    assert err.count(b"batch of") == 1
    assert int(err.split()[-1]) > 100


def test_an_interrupt_in_a_callback_of_llama_cpp_ends_the_next_decode(start: Start) -> None:
    """Python can only drop what is raised there."""
    at = """
        from rest_local.llama import library
        def at(call, n):
            print(f"decode {call}", file=sys.stderr, flush=True)
            if call == 3:
                library.log_lines.feed = lambda level, text: signal.raise_signal(signal.SIGINT)
                library._log_callback(4, b"an error", None)
    """
    process = start(*GIVEN, at=at)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"decode 1\ndecode 2\ndecode 3\n")


def test_what_a_terminal_was_set_to_is_put_back_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    done: list[str] = []
    monkeypatch.setattr(interrupt, "at_end", [lambda: done.append("put back")])
    monkeypatch.setattr(os, "_exit", end)
    reading, writing = os.pipe()
    os.write(writing, bytes([signal.SIGINT, 0, signal.SIGINT]))
    os.close(writing)
    interrupt._count(reading)
    assert done == [], "the first one was dealt with"
    reading, writing = os.pipe()
    os.write(writing, bytes([signal.SIGINT, signal.SIGINT]))
    with pytest.raises(Ended, match="130"):
        interrupt._count(reading)
    assert done == ["put back"]
    for descriptor in (reading, writing):
        os.close(descriptor)
