"""A program that a benchmark starts and ends: its output is read all the time, and nothing of it remains.

The program runs under `guard`, a second process that ends it when this process ends, also by SIGKILL. Ctrl-C at the
terminal does not reach it: it has a process group of its own, and `end` is called by the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rest_local.bench.comparing import guard
from rest_local.errors import RestLocalError, printable

KEPT_BYTES = 2**16
SHOWN_LINES, SHOWN_CHARACTERS = 3, 300  # of a program's output in an error


class ProgramFailed(RestLocalError):
    """A program could not be started."""


class Output:
    """Reads a stream in a thread until its end. Keeps the last `kept` bytes, None: all."""

    def __init__(self, stream: IO[bytes], kept: int | None) -> None:
        self._stream, self._kept = stream, kept
        self._bytes = bytearray()
        self._thread = threading.Thread(target=self._read, name="rest-local-output", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What was kept so far."""
        return bytes(self._bytes).decode("utf-8", "replace")

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, and close it. If a child of the program holds it open, the thread remains."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._stream.close()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), 2**16):
            self._bytes += part
            if self._kept is not None and len(self._bytes) > 2 * self._kept:
                del self._bytes[: -self._kept]


class Program:
    """A running program. Thread-safe except `end`.

    `kept`: bytes of its output that `output` holds, None: all. Raises ProgramFailed if it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, kept: int | None = KEPT_BYTES, environment: Mapping[str, str] | None = None
    ) -> None:
        self.pid = 0
        self._code: int | None = None
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=sys.platform != "win32",  # Ctrl-C at the terminal does not reach it
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
        except (OSError, ValueError) as error:  # no memory, processes or descriptors are left; a NUL in the command
            raise ProgramFailed(f"cannot be started ({error})") from error
        assert self._guard.stderr is not None
        self._output = Output(self._guard.stderr, kept)
        try:
            told = self._hear()
        except BaseException:
            self.end()
            raise
        if "pid" not in told:
            self.end()
            raise ProgramFailed(f"cannot be started ({told.get('error') or self.last_lines() or 'no reason given'})")
        self.pid = told["pid"]

    @property
    def output(self) -> str:
        """What it wrote to its output and its errors; complete when it has ended."""
        return self._output.text()

    @property
    def running(self) -> bool:
        return self._guard.poll() is None

    def wait(self, seconds: float) -> bool:
        """Whether it ends within this time."""
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End it and what it started, and wait for that; a few seconds at most. A second call does nothing."""
        into, out = self._guard.stdin, self._guard.stdout
        assert into is not None
        assert out is not None
        with contextlib.suppress(OSError):
            into.close()
        if not self.wait(guard.GRACE_SECONDS + 5):
            self._guard.kill()
            self._guard.wait()
            if self.pid and sys.platform != "win32":
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
        self.exit_code()
        self._output.join(2.0)
        out.close()

    def exit_code(self) -> int | None:
        """Of the program, minus a signal's number; None while it runs, and if that is not known."""
        out = self._guard.stdout
        if self._code is None and not self.running and out is not None and not out.closed:
            self._code = self._hear().get("code")
        return self._code

    def how_it_ended(self) -> str:
        """Such as "signal 11 (SIGSEGV)" or "exit code 1"."""
        code = self.exit_code()
        if code is None or code >= 0:
            return f"exit code {'unknown' if code is None else code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def last_lines(self) -> str:
        """The last lines of its output, printable and on one line."""
        lines = [line.strip() for line in self.output[-KEPT_BYTES:].splitlines() if line.strip()]
        return printable(" | ".join(line[:SHOWN_CHARACTERS] for line in lines[-SHOWN_LINES:]))

    def _hear(self) -> dict[str, Any]:
        """The next thing that the guard tells; empty after the last."""
        assert self._guard.stdout is not None
        try:
            told = json.loads(self._guard.stdout.readline(2**16) or b"{}")
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}


def output_of(command: Sequence[str], seconds: float, kept: int, environment: Mapping[str, str] | None = None) -> str:
    """What a program writes that ends by itself, at least its last `kept` bytes. Raises ProgramFailed, also if it runs
    for longer than `seconds`.
    """
    program = Program(command, kept=kept, environment=environment)
    try:
        if not program.wait(seconds):
            raise ProgramFailed(f"does not end within {seconds:g} s when it is called with {command[-1]}")
    finally:
        program.end()
    return program.output
