"""Runs one module of this package in a child process, which may crash or hang, and reports how it ended.

Knows nothing about the task of the child: its input is JSON on the command line, its output lines of JSON. The parent
survives any behaviour of the child, and waits at most `timeout` and a few seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILL_SECONDS = 5.0  # a process that waits in a driver does not end when it is killed


@dataclass(frozen=True)
class ChildResult:
    """How a child ended. `lines`: the JSON objects that it printed. `code`: its exit status, negative for a signal,
    None if it was killed after `timeout` seconds. `errors`: the end of its stderr.
    """

    code: int | None
    lines: Sequence[dict[str, Any]]
    errors: str

    @property
    def signal_name(self) -> str:
        """The signal that ended it, such as SIGSEGV; empty without one."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def command(module: str, task: str) -> list[str]:
    """The command line of the child."""
    return [sys.executable, "-m", module, task]


def run(module: str, task: str, timeout: float) -> ChildResult:
    """Start the child and wait for it. `task`: its input. Raises OSError if it cannot be started."""
    root = Path(__file__).parents[2]  # `-m` searches the working directory first, so do not use the user's
    with subprocess.Popen(
        command(module, task),
        cwd=root,
        env={"GOMP_SPINCOUNT": "0", **os.environ},  # waiting threads must not spin, as other programs may be running
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output, errors = _killed(process)
            return ChildResult(None, _objects(output), _tail(errors))
        except BaseException:
            process.kill()
            raise
    return ChildResult(process.returncode, _objects(output), _tail(errors))


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    process.kill()
    try:
        return process.communicate(timeout=KILL_SECONDS)
    except subprocess.TimeoutExpired as error:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        process.returncode = -signal.SIGKILL  # otherwise the end of the `with` block waits for the process
        return error.stdout or b"", error.stderr or b""


def _objects(output: bytes) -> list[dict[str, Any]]:
    found = []
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _tail(errors: bytes) -> str:
    return errors[-4000:].decode("utf-8", "replace")
