"""Renders chat templates in a child process: a template that loops or allocates without end costs only the child.

Contract:

- There is one child for this process. The first call starts it (0.1 s), the next calls use it, one at a time.
- The child has `MEMORY` bytes of address space, and `SECONDS` for a template. A child that exceeds them is killed, and
  the next call starts another. macOS ignores the limit of address space: only time and text size are bounded there.
- Requests to the child are pickles, because this process writes them. Answers are JSON, because a template may have
  taken over the child.

A chat of 20 messages takes 0.28 ms; in this process it took 0.06 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rest_local import stop
from rest_local.errors import TemplateFailed, TemplateTooCostly

SECONDS = 5.0
"""For one template. The largest conversation that the server accepts (8 MB) renders in well under one second."""

MEMORY = 1 << 30
MAX_TEXT = 1 << 26
"""Characters of a rendered prompt."""

_LENGTH = struct.Struct("<Q")
_POLL_SECONDS = 0.05  # between two checks whether the thread was stopped


class Renderer:
    """A child process and the lock that gives access to it. Thread-safe."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started the child; a process forked from it starts its own

    def render(self, template: str, names: Mapping[str, Any]) -> str:
        """The text. Raises TemplateFailed, a TypeError of the template, ServiceClosed if the thread is stopped."""
        request = pickle.dumps((template, dict(names)))
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            stop.check()
        try:
            answer = json.loads(self._ask(request))
        except BaseException:
            self._kill()
            raise
        finally:
            self._turn.release()
        if "text" in answer:
            return str(answer["text"])
        kind, cause = answer.get("kind"), str(answer.get("cause"))
        if kind == "TypeError":
            raise TypeError(cause)
        raise TemplateTooCostly(cause) if kind == "limit" else TemplateFailed(cause)

    def close(self) -> None:
        """Ends the child. The next call starts another."""
        with self._turn:
            self._kill()

    def _ask(self, request: bytes) -> bytes:
        until = time.monotonic() + SECONDS
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(_LENGTH.pack(len(request)) + request)
            child.stdin.flush()
            (length,) = _LENGTH.unpack(_read(child.stdout, _LENGTH.size, until))
            if length > 8 * MAX_TEXT:
                raise TemplateTooCostly(f"its text has more than {MAX_TEXT} characters")
            return _read(child.stdout, length, until)
        except TimeoutError:
            raise TemplateTooCostly(f"it takes longer than {SECONDS:.0f} s") from None
        except (BrokenPipeError, EOFError):
            raise TemplateTooCostly(f"it ended the process that renders it (memory: {MEMORY >> 20} MB)") from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():
            self._child = None
        if self._child is None or self._child.poll() is not None:
            self._kill()
            command = [sys.executable, "-m", "rest_local.chat.renderer"]
            root = Path(__file__).parents[2]  # -m looks in the working directory first
            pipe = subprocess.PIPE
            try:
                self._child = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise TemplateFailed(f"no process can be started to render it: {error}") from error
            self._owner = os.getpid()
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _read(file: IO[bytes], size: int, until: float) -> bytes:
    """Exactly `size` bytes. Raises TimeoutError at the time `until`, EOFError, ServiceClosed."""
    descriptor, parts = file.fileno(), bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while len(parts) < size:
            stop.check()
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not ready.select(min(left, _POLL_SECONDS)):
                continue
            part = os.read(descriptor, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
    return bytes(parts)


_renderer = Renderer()
atexit.register(_renderer.close)


def render_limited(template: str, names: Mapping[str, Any]) -> str:
    """`rest_local.chat.sandbox.render_here` in the child of this process."""
    return _renderer.render(template, names)


def _answer(request: bytes) -> dict[str, str]:
    from rest_local.chat.sandbox import render_here

    template, names = pickle.loads(request)
    try:
        text = render_here(template, names)
    except MemoryError:
        return {"kind": "limit", "cause": f"it takes more than {MEMORY >> 20} MB of memory"}
    except TypeError as error:
        return {"kind": "TypeError", "cause": str(error)[:1000]}
    except TemplateFailed as error:
        return {"cause": error.cause[:1000]}
    except Exception as error:
        return {"cause": f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > MAX_TEXT:
        return {"kind": "limit", "cause": f"its text has more than {MAX_TEXT} characters"}
    return {"text": text}


def main() -> None:
    """The child process: answers requests until its input ends."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_LENGTH.size):
        answer = json.dumps(_answer(source.read(*_LENGTH.unpack(head)))).encode()
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main()
