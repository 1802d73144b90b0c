"""Run work in child processes that may crash, hang, take all memory or be taken over by hostile input.

- `run` starts a process for one task and waits for its end. The task is JSON on the command line; the child reports in
  lines of JSON (`report`), so the last line tells what it was doing when it died.
- `Worker` is a process that answers requests one at a time, with limits of time and memory. Its module calls `serve`
  at its end. A child that exceeds a limit ends, and the next request starts another.

The time of a request is processor time, because on a busy machine a child mostly waits for a processor. A bound by the
clock, `WAIT` times as large, ends one that waits or was taken over. Memory is address space; macOS ignores that limit.

Knows nothing about the tasks. The parent survives any behaviour of a child, and reads at most as much as it asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rest_local import stop

WAIT = 12
START_SECONDS = 60.0
KILL_SECONDS = 5.0  # a killed process may not end while it waits in a driver
_ROOT = Path(__file__).parents[1]  # `-m` searches the working directory first, so do not use the user's
_LENGTH = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
_POLL_SECONDS = 0.05  # interval of the checks whether the thread was stopped


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@dataclass(frozen=True)
class ChildResult:
    """The end of a child of `run`, and its output."""

    code: int | None  # exit status, negative for a signal; None if it was killed after `timeout` seconds
    lines: Sequence[dict[str, Any]]  # the printed JSON objects
    errors: str  # the end of stderr
    timeout: float

    @classmethod
    def of(cls, code: int | None, output: bytes, errors: bytes, timeout: float) -> ChildResult:
        """Parse the output of a child."""
        lines = []
        for line in output.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        objects = [line for line in lines if isinstance(line, dict)]
        return cls(code, objects, errors[-4000:].decode("utf-8", "replace"), timeout)

    @property
    def seen(self) -> dict[str, Any]:
        """Merge all lines into one object. The last of equal names counts."""
        return {name: value for line in self.lines for name, value in line.items()}

    @property
    def signal_name(self) -> str:
        """Return the name of the signal that ended the child, such as SIGSEGV, or an empty string."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def end(self) -> str:
        """Describe how a child ended that did not report the end of its task."""
        if self.code is None:
            return f"did not finish in {self.timeout:.0f} s"
        return f"crashed ({self.signal_name})" if self.signal_name else f"ended with exit code {self.code}"


def run(module: str, task: str, timeout: float) -> ChildResult:
    """Run `main(task)` of a module in a child and wait for it. Raises OSError if the child cannot be started."""
    with subprocess.Popen(
        command(module, task),
        cwd=_ROOT,
        env={**os.environ, "GOMP_SPINCOUNT": "0"},  # waiting threads must not spin, as other programs may be running
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                output, errors = process.communicate(timeout=KILL_SECONDS)
            except subprocess.TimeoutExpired as error:
                for pipe in (process.stdout, process.stderr):
                    if pipe:
                        pipe.close()
                process.returncode = -9  # The `with` block would wait for the process otherwise.
                output, errors = error.stdout or b"", error.stderr or b""
            return ChildResult.of(None, output, errors, timeout)
        except BaseException:
            process.kill()
            raise
    return ChildResult.of(process.returncode, output, errors, timeout)


def report(**fields: object) -> None:
    """Print a line for the parent, from a child of `run`. It is flushed before the next stage begins."""
    print(json.dumps(fields), flush=True)


class Busy(Exception):
    """Requests of other threads take too long."""


class NotStarted(Exception):
    """The child cannot be started, or ends before the first request."""


class TookTooLong(Exception):
    """The request exceeded its time."""


class Died(Exception):
    """The child crashed, ran out of memory, or answered with more than was asked for."""


class Worker:
    """A child process for requests, and the lock that gives access to it. Thread-safe.

    `module` calls `serve` when it is run. A request waits up to `turn_seconds` for those of other threads.
    """

    def __init__(self, module: str, turn_seconds: float = float("inf")) -> None:
        self.module, self.turn_seconds = module, turn_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._owner_pid = 0  # a process forked from the owner starts a child of its own
        _workers.add(self)

    def ask(self, request: bytes, seconds: float, wait: float | None = None, most: int = 1 << 30) -> bytes:
        """Send a request, and return the child's answer of at most `most` bytes.

        The child has `seconds` of processor time, and `wait` seconds by the clock, by default WAIT times as many.
        Raises Busy, NotStarted, TookTooLong, Died, and ServiceClosed if the thread was stopped (`rest_local.stop`).
        """
        until = time.monotonic() + self.turn_seconds
        while not self._turn.acquire(timeout=max(0.0, min(_POLL_SECONDS, until - time.monotonic()))):
            stop.check()
            if time.monotonic() >= until:
                raise Busy
        try:
            return self._talk(request, seconds, WAIT * seconds if wait is None else wait, most)
        except BaseException:
            self._kill()
            raise
        finally:
            self._turn.release()

    def _talk(self, request: bytes, seconds: float, wait: float, most: int) -> bytes:
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        until = time.monotonic() + wait
        try:
            _write(child.stdin, _LENGTH.pack(len(request)) + _SECONDS.pack(seconds) + request, until)
            return _frame(child.stdout, until, most)
        except TimeoutError:
            raise TookTooLong from None
        except (BrokenPipeError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            if child.returncode == -signal.SIGPROF:
                raise TookTooLong from None
            raise Died from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner_pid != os.getpid():
            self.process = None
        if self.process is not None and self.process.poll() is None:
            return self.process
        self._kill()
        try:
            self.process = subprocess.Popen(
                command(self.module),
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal must not reach the child
                bufsize=0,
            )
        except OSError as error:
            raise NotStarted(f"no process can be started: {error}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._owner_pid = os.getpid()
        try:
            _frame(self.process.stdout, time.monotonic() + START_SECONDS, 0)
        except (TimeoutError, EOFError) as error:
            raise NotStarted("the child process ended before it began") from error
        return self.process

    def close(self) -> None:
        """End the child. The next request starts another."""
        with self._turn:
            self._kill()

    def _kill(self) -> None:
        child, self.process = self.process, None
        if child is None or self._owner_pid != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # data that was not sent is not needed
                    pipe.close()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


def _frame(output: IO[bytes], until: float, most: int) -> bytes:
    """Read the next answer. Raises TimeoutError at `until`, ServiceClosed, and EOFError if the child ended, or sends
    more than `most` bytes or a second answer.
    """
    (length,) = _LENGTH.unpack(_read(output, _LENGTH.size, until))
    if length > most:
        raise EOFError
    found = _read(output, length, until)
    if _is_ready(output, 0.0):
        raise EOFError
    return found


def _read(output: IO[bytes], size: int, until: float) -> bytes:
    parts = []
    while size:
        if _wait(output, until):
            part = os.read(output.fileno(), min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


def _write(target: IO[bytes], data: bytes, until: float) -> None:
    """Write all of the data. Raises TimeoutError at the time `until`, because a child may stop reading."""
    view = memoryview(data)
    while view:
        if _wait(target, until, select.POLLOUT):
            view = view[os.write(target.fileno(), view) :]


def _wait(pipe: IO[bytes], until: float, event: int = select.POLLIN) -> bool:
    """Wait a short while for the pipe and return True if it is ready. Raises TimeoutError at `until`; ServiceClosed."""
    stop.check()
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return _is_ready(pipe, min(left, _POLL_SECONDS), event)


def _is_ready(pipe: IO[bytes], seconds: float, event: int = select.POLLIN) -> bool:
    """Return True if the pipe can be read or written within this time, or has ended."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1e3 * seconds))


def serve(answer: Callable[[bytes], bytes], memory: int, niceness: int = 0) -> None:
    """Answer the requests of a `Worker`, in its child, until the input ends. An exception of `answer` ends the child.

    `memory` limits the address space in bytes, which includes imported modules.
    """
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))
    os.nice(niceness)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(_LENGTH.pack(0))
    sink.flush()
    while head := source.read(_LENGTH.size):
        (seconds,) = _SECONDS.unpack(source.read(_SECONDS.size))
        request = source.read(*_LENGTH.unpack(head))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        found = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sink.write(_LENGTH.pack(len(found)) + found)
        sink.flush()
