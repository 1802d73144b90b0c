"""The process of one model, as its parent sees it (`ModelProcess`), and what it does itself (`serve`).

It runs the server of `rest_local.server` on a loopback port that only the parent can use, or on the sockets of
`rest_local.router.supervisor`, which clients reach.

Protocol: the parent writes a `Setup` to stdin (its length in 8 bytes, little-endian, and the pickle), and closes stdin
when the process has to stop. The process writes lines of JSON to stdout:

    {"event": "listening", "port": 40123}
    {"event": "loaded", "meta": {...}}                  the model's description for GET /v1/models
    {"event": "failed", "message": "...", "exit_code": 1}

It ends when stdin ends, also because the parent is gone, and after `failed`. Anything else that writes to stdout
in that process reaches stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import RawIOBase
from typing import TYPE_CHECKING, Any, BinaryIO

from rest_local.errors import RestLocalError
from rest_local.server.settings import ServerSettings

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from rest_local.decoding.engine import Engine
    from rest_local.server.http import HttpServer
    from rest_local.server.state import State

# A process may take this long to end after its answers: worker threads take 10 s at most, the rest saves sessions.
STOP_SECONDS = 60.0
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Setup:
    """The pickled instructions for a process."""

    settings: ServerSettings
    name: str  # the model's name
    load: Callable[[], Engine]
    queue: int
    drain_seconds: int
    secret: bytes | None  # required in every request; None if clients reach the process
    sockets: tuple[int, ...] = ()  # inherited descriptors to listen on

    def open(self, parent: ParentChannel) -> tuple[HttpServer, list[socket.socket]]:
        """Return the server, and the sockets that it listens on. Called in the process."""
        from rest_local.api.models import meta
        from rest_local.server.app import Serving, log_loaded
        from rest_local.server.http import listen

        def loaded(state: State) -> None:
            assert state.engine is not None
            parent.tell("loaded", meta=meta(state.engine))
            if self.sockets:
                log_loaded(state)

        # asyncio disables Nagle's algorithm only on sockets with this protocol (`server.http.listen`).
        listening = [socket.socket(proto=socket.IPPROTO_TCP, fileno=each) for each in self.sockets]
        if not listening:
            listening = [listen(replace(self.settings, host="127.0.0.1", port=0))]
            parent.tell("listening", port=listening[0].getsockname()[1])
        serving = Serving(
            self.settings,
            self.name,
            self.load,
            queue=self.queue,
            drain_seconds=self.drain_seconds,
            secret=self.secret,
            on_loaded=loaded,
        )
        return serving, listening


class ModelProcessFailed(RestLocalError):
    """Raised if the process of a model did not load it. `exit_code` is that of the error in the process."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelProcess:
    """One process, as its parent's event loop sees it. `on_end` is called when it has ended in any way."""

    def __init__(self, setup: Setup, on_end: Callable[[ModelProcess], None]) -> None:
        self.setup, self._on_end = setup, on_end
        self.port = 0
        self.meta: dict[str, Any] = {}
        self.loaded_at = 0.0
        self.stopping = False
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self._killed = False
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._child: Process | None = None

    @property
    def pid(self) -> int:
        """Return the process's id, or 0 before it is started."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_serving(self) -> bool:
        return self.loaded_at > 0 and not self.stopping and not self.ended.is_set()

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Raises ModelProcessFailed."""
        try:
            if self.stopping:
                raise ModelProcessFailed("the server is stopping")
            self._child = await _started(self.setup)
        except (OSError, ModelProcessFailed) as error:  # no memory, processes or descriptors are left
            self.ended.set()
            if isinstance(error, ModelProcessFailed):
                raise
            raise ModelProcessFailed(f"model {self.setup.name}: its process could not be started ({error})") from error
        self._listening = asyncio.create_task(self._listen(self._child))
        if self._killed:
            self.kill()
        elif self.stopping:
            self._close_stdin()
        await self._loaded

    def begin_stop(self) -> None:
        """Let the process end its running answers and take no others. Idempotent."""
        if not self.stopping:
            self.stopping = True
            self._close_stdin()

    async def stop(self) -> None:
        """Call `begin_stop`, and wait until the process has ended. It is killed if that takes too long."""
        self.begin_stop()
        try:
            await asyncio.wait_for(self.ended.wait(), self.setup.drain_seconds + STOP_SECONDS)
        except asyncio.TimeoutError:
            self.kill()
            await self.ended.wait()

    def kill(self) -> None:
        self.stopping = self._killed = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    def how_it_ended(self) -> str:
        """Return a text such as "signal 9 (SIGKILL)" or "exit code 1"."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def _close_stdin(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    async def _listen(self, child: Process) -> None:
        """Handle the events of the process until it ends."""
        assert child.stdout is not None
        while not child.stdout.at_eof():
            with contextlib.suppress(ValueError):  # a hook of the interpreter may print before `main` begins
                self._hear(json.loads(await child.stdout.readline()))
        self.exit_code = await child.wait()
        self.ended.set()
        self._fail(f"model {self.setup.name}: its process ended while it loaded ({self.how_it_ended()})")
        self._on_end(self)

    def _hear(self, told: Any) -> None:
        if not isinstance(told, dict) or "event" not in told:
            return
        if told["event"] == "listening":
            self.port = told["port"]
        elif told["event"] == "loaded":
            self.meta, self.loaded_at = told["meta"], time.monotonic()
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif told["event"] == "failed":
            self._fail(told["message"], told["exit_code"])

    def _fail(self, message: str, exit_code: int = 1) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(ModelProcessFailed(message, exit_code))
            self._loaded.exception()  # nothing may await it any more


async def _started(setup: Setup) -> Process:
    """Start the process with its setup, in a session of its own: Ctrl-C reaches only its parent. Raises OSError."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rest_local.router.process",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=LONGEST_LINE,
        start_new_session=True,
        pass_fds=setup.sockets,
    )
    data = pickle.dumps(setup)
    assert child.stdin is not None
    child.stdin.write(len(data).to_bytes(8, "little") + data)
    return child


class ParentChannel:
    """A channel for lines to the parent. Any thread may use it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def tell(self, event: str, **fields: Any) -> None:
        """Write one line. A parent that is gone reads nothing, which `stop_with_parent` notices."""
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError), self._lock:
            self._file.write(line)
            self._file.flush()


def main() -> int:
    """Serve what stdin says until it ends, and return the exit code.

    stdout is for the parent, so everything else goes to stderr.
    """
    own = os.dup(1)
    os.dup2(2, 1)
    # A thread that waits for its end would still hold a buffer's lock when the interpreter ends.
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    setup: Setup = pickle.loads(_exactly(stdin, int.from_bytes(_exactly(stdin, 8), "little")))
    return serve(setup, stdin, ParentChannel(os.fdopen(own, "wb")))


def _exactly(file: RawIOBase, n: int) -> bytes:
    """Return the next `n` bytes. Raises EOFError."""
    data = b""
    while len(data) < n:
        if not (part := file.read(n - len(data))):
            raise EOFError
        data += part
    return data


def serve(setup: Setup, stdin: RawIOBase, parent: ParentChannel) -> int:
    """Serve `setup` until `stdin` ends, and return the exit code."""
    from rest_local.server.http import log_to_stderr

    log_to_stderr()
    try:
        server, sockets = setup.open(parent)
        threading.Thread(target=stop_with_parent, args=(stdin, server), name="rest-local-parent", daemon=True).start()
        server.run(sockets)
    except RestLocalError as error:
        parent.tell("failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code
    return 0


def stop_with_parent(stdin: RawIOBase, server: HttpServer) -> None:
    """Stop the server when the parent closes the pipe or is gone."""
    while stdin.read(1):
        pass
    server.stop()


if __name__ == "__main__":
    sys.exit(main())
