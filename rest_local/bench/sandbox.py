"""Run code that a model wrote, with its tests, in a process of its own that can do little and not for long.

Text goes in, an `Outcome` comes out. `rest_local.bench.sandboxed` is the program that runs there, and says how it is
shut in. Bounds that hold on Linux and macOS: wall clock, CPU time, size of files and of the output, open files, memory
(not on macOS), no further processes; an empty environment, no input, no descriptor but the one for the verdict, a
temporary working directory. When it ends or is ended, its whole process group is killed.

On Linux with user namespaces the code has no network, sees no other process, and can write to nothing but its working
directory, which is in memory. `Outcome.isolated` says which of this held. Without them the code can write where
`nobody` or the user can, and can reach the network: run nothing there that you would not run yourself. It can read
files of the user in any case. Windows has none of this, and is refused (`why_not`).

A passed test means that the code and the tests ran to their end: a secret token comes back only then. So `os._exit(0)`
does not pass. Code that searches the interpreter's memory for the token could claim to have passed; a model that
continues source text does not.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rest_local.bench import sandboxed
from rest_local.errors import RestLocalError

KEPT = 400  # characters of the output in an outcome


@dataclass(frozen=True)
class Limits:
    """seconds: by the wall clock. cpu: seconds. memory: bytes of address space. file, output: bytes."""

    seconds: float = 10.0
    cpu: int = 5
    memory: int = 512 << 20
    file: int = 1 << 20
    output: int = 64 << 10
    descriptors: int = 32

    def of_process(self) -> dict[str, int]:
        """For setrlimit, by the name of the resource."""
        return {
            "CPU": self.cpu,
            "AS": self.memory,
            "FSIZE": self.file,
            "NOFILE": self.descriptors,
            "NPROC": 0,
            "CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """reason: why it did not pass, "" if it did. isolated: of "network", "processes" and "files". output: its end."""

    passed: bool
    reason: str
    isolated: Sequence[str]
    output: str


class SandboxMissing(RestLocalError):
    """Code cannot be run safely on this system."""


def why_not() -> str | None:
    """The reason why nothing can be run here; None if it can."""
    if sys.platform == "win32":
        return "Windows has no limits that a process cannot leave; run this on Linux or macOS"
    return None


def run(program: str, limits: Limits | None = None, *, isolate: bool = True) -> Outcome:
    """Run a program, such as a solution and its tests. Takes 50 to 100 ms for a short one.

    `isolate`: with namespaces, where the system has them. Raises SandboxMissing, OSError.
    """
    if reason := why_not():
        raise SandboxMissing(reason)
    limits = limits or Limits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="rest-local-sandbox-") as folder:
        if os.getuid() == 0:
            os.chmod(folder, 0o777)  # the code runs as the user `nobody`
        given = {
            "program": program,
            "token": token,
            "limits": limits.of_process(),
            "folder": folder,
            "isolate": isolate,
        }
        reports, output, ended = _run(given, limits)
    if refused := next((line["refused"] for line in reports if "refused" in line), None):
        raise SandboxMissing(refused)
    isolated: list[str] = next((line["isolated"] for line in reports if "isolated" in line), [])
    passed = any(line.get("token") == token for line in reports)
    text = output.decode("utf-8", "replace").strip()
    reason = "" if passed else ended or (text.splitlines() or ["ended before the end of its tests"])[-1][:KEPT]
    return Outcome(passed, reason, tuple(isolated), text[-KEPT:])


def _run(given: dict[str, Any], limits: Limits) -> tuple[list[dict[str, Any]], bytes, str]:
    """The lines of the verdict, the output, and why it was ended."""
    verdict, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", sandboxed.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={}, cwd=given["folder"],
            pass_fds=(theirs,), start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(verdict)
        raise
    finally:
        os.close(theirs)
    try:
        output, ended = _follow(process, json.dumps({**given, "verdict": theirs}).encode(), limits)
    finally:
        _kill(process)
        reports = _reports(verdict)
    return reports, output, ended


def _follow(process: subprocess.Popen[bytes], given: bytes, limits: Limits) -> tuple[bytes, str]:
    """Give it the program and read its output until it ends or exceeds a limit."""
    into, out = process.stdin, process.stdout
    if into is None or out is None:
        raise SandboxMissing("the process has no pipes")
    deadline = time.monotonic() + limits.seconds
    with suppress(BrokenPipeError):  # it ended at once, and its output says why
        into.write(given)
        into.close()
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            part = os.read(out.fileno(), 1 << 16)
            if not part:
                return output, _status(process, deadline, limits)
            output += part
            if len(output) > limits.output:
                return output[: limits.output], f"more than {limits.output} bytes of output"
    return output, f"not done after {limits.seconds:g} s"


def _status(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> str:
    """It closed its output: wait for its end."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"not done after {limits.seconds:g} s"
    ended_by = process.returncode - sandboxed.SIGNALLED
    if ended_by == signal.SIGKILL:
        return f"killed, as the system does after {limits.cpu} s of CPU time"
    return f"ended by signal {ended_by}" if ended_by > 0 else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process group, which is its own."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):  # all have ended; macOS refuses for what only waits for us
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):
                pipe.close()


def _reports(verdict: int) -> list[dict[str, Any]]:
    """The lines of the verdict that are objects. Reads what is there and closes it."""
    os.set_blocking(verdict, False)
    try:
        content = os.read(verdict, 1 << 14)
    except BlockingIOError:  # something that was not in the group holds it open, and wrote nothing
        content = b""
    finally:
        os.close(verdict)
    found = []
    for line in content.splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict):
            found.append(report)
    return found
