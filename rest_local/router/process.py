"""The process of a model, seen by its parent: start, wait until it is loaded, stop, and how it ended.

All methods must be called in the event loop. A thread reads what the process tells, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rest_local.errors import RestLocalError
from rest_local.router.worker import Setup, packed

STOP_SECONDS = 60.0
"""For a process to end after its answers have: worker threads take 10 s at most, the rest is for saving sessions."""


class ModelProcessFailed(RestLocalError):
    """The process of a model did not load it. `exit_code`: of the error in that process."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelProcess:
    """One process. `on_end`: called in the loop when it has ended, however that came."""

    def __init__(self, setup: Setup, on_end: Callable[[ModelProcess], None]) -> None:
        self.setup, self._on_end = setup, on_end
        self.port = 0
        self.meta: dict[str, Any] = {}
        self.loaded_at = 0.0  # time.monotonic
        self.stopping = False
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before it is started."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self.loaded_at > 0 and not self.stopping and not self.ended.is_set()

    async def start(self) -> None:
        """Start it and wait until the model is loaded. Raises ModelProcessFailed."""
        if not self.stopping:
            self._child = await asyncio.to_thread(_started, self.setup)
            threading.Thread(target=self._listen, args=(self._child,), name="rest-local-model", daemon=True).start()
            if self.stopping:
                self._tell("stop")
        else:
            self.ended.set()
            self._fail("the server is stopping")
        await self._loaded

    def begin_stop(self) -> None:
        """Let it end its running answers and take no others. Idempotent."""
        if not self.stopping:
            self.stopping = True
            self._tell("stop")

    async def stop(self) -> None:
        """As `begin_stop`; returns when it has ended. It is killed if that takes too long."""
        self.begin_stop()
        if self._child is None and not self.ended.is_set():
            return  # `start` sees `stopping`
        try:
            await asyncio.wait_for(self.ended.wait(), self.setup.drain_seconds + STOP_SECONDS)
        except asyncio.TimeoutError:
            self.kill()
            await self.ended.wait()

    def reload(self) -> None:
        """Have it open the newest commits of its datastores."""
        self._tell("reload")

    def kill(self) -> None:
        """End it at once."""
        self.stopping = True
        if self._child is not None:
            self._child.kill()

    def how_it_ended(self) -> str:
        """Such as "signal 9 (SIGKILL)" or "exit code 1"."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def _tell(self, do: str) -> None:
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, which the thread tells
                child.stdin.write(json.dumps({"do": do}).encode() + b"\n")
                child.stdin.flush()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        """In the thread: pass on what the process tells, then its end."""
        assert child.stdout is not None
        assert child.stdin is not None
        with child.stdout as lines:
            for line in lines:
                self._pass(self._hear, json.loads(line))
        code = child.wait()
        with contextlib.suppress(OSError):
            child.stdin.close()
        self._pass(self._end, code)

    def _pass(self, call: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, value)

    def _hear(self, told: dict[str, Any]) -> None:
        if told["event"] == "listening":
            self.port = told["port"]
        elif told["event"] == "loaded":
            self.meta, self.loaded_at = told["meta"], time.monotonic()
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif told["event"] == "failed":
            self._fail(told["message"], told["exit_code"])

    def _end(self, code: int) -> None:
        self.exit_code = code
        self.ended.set()
        self._fail(f"model {self.setup.name}: its process ended while it loaded ({self.how_it_ended()})")
        self._on_end(self)

    def _fail(self, message: str, exit_code: int = 1) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(ModelProcessFailed(message, exit_code))
            self._loaded.exception()  # nothing may await it any more


def _started(setup: Setup) -> subprocess.Popen[bytes]:
    """The process, which has its setup. In a session of its own, so that Ctrl-C at the terminal reaches its parent
    alone, which lets it end its answers."""
    child = subprocess.Popen(
        [sys.executable, "-m", "rest_local.router.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=sys.platform != "win32",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once, which `_listen` tells
        child.stdin.write(packed(setup))
        child.stdin.flush()
    return child
