"""Runs one module of this package in a child process, which may crash or hang, and says how it ended.

Knows nothing about what the child does: it is told something as JSON on its command line and prints lines of JSON.
The parent survives whatever the child does, and waits no longer than `timeout` and a few seconds.
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

KILL_SECONDS = 5.0  # a process that a driver holds does not end when it is killed


@dataclass(frozen=True)
class Ended:
    """`lines`: what it printed, as far as each is a JSON object. `code`: its exit status, negative for a signal, None
    where it was killed after `timeout` seconds. `errors`: the end of what it wrote to stderr.
    """

    code: int | None
    lines: Sequence[dict[str, Any]]
    errors: str

    @property
    def signal_name(self) -> str:
        """Such as SIGSEGV; empty where no signal ended it."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def command(module: str, told: str) -> list[str]:
    """What is started."""
    return [sys.executable, "-m", module, told]


def run(module: str, told: str, timeout: float) -> Ended:
    """Starts the child and waits for it. Raises OSError where it cannot be started."""
    root = Path(__file__).parents[2]  # -m looks in the working directory first: let that be ours, not the user's
    with subprocess.Popen(
        command(module, told),
        cwd=root,
        env={"GOMP_SPINCOUNT": "0", **os.environ},  # threads that wait do not spin: others may use the machine
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output, errors = _killed(process)
            return Ended(None, _objects(output), _tail(errors))
        except BaseException:
            process.kill()
            raise
    return Ended(process.returncode, _objects(output), _tail(errors))


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    process.kill()
    try:
        return process.communicate(timeout=KILL_SECONDS)
    except subprocess.TimeoutExpired as error:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        process.returncode = -signal.SIGKILL  # else the end of the `with` block waits for it
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
