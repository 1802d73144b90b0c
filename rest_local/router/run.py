"""Runs a server of one model or several: bind, start the processes, serve, drain, close.

Signals are those of `rest_local.server.app`: SIGTERM and Ctrl-C let running answers end, a second one ends all
processes at once, SIGHUP stops or opens the datastores' newest commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from rest_local.api.errors import ApiError
from rest_local.router.app import RouterState, create_router
from rest_local.router.memory import Need
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcessFailed, Setup
from rest_local.server.http import DRAIN_SECONDS, HttpServer
from rest_local.server.settings import ANY_MODEL, Settings

LOOK_SECONDS = 0.1  # between two looks whether a second signal has come
PREFIX = "rest-local-server-"
LOCK = "lock"
YOUNGEST = 60.0  # seconds: a younger folder may not be locked yet


@dataclass(frozen=True)
class ModelChoice:
    """A model to serve: its name, its file, what loads it, and what it will take."""

    name: str
    path: Path
    load: Callable[[], object]
    need: Callable[[], Need]
    aliases: tuple[str, ...] = ()


class Routing(HttpServer):
    """One server. `run` it in the main thread, or in any other without signals.

    models   the first one is the default
    eager    load the default model at the start; if that fails, the server ends with its error
    limit, idle, queue   as for `Pool`
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[ModelChoice],
        *,
        eager: bool = True,
        limit: int | None = None,
        idle: float | None = None,
        queue: int = 64,
        drain_seconds: int = DRAIN_SECONDS,
    ) -> None:
        self.settings = settings
        self._private = PrivateFolder()
        self.folder = self._private.path
        secret = secrets.token_hex(16).encode()
        anything = (ANY_MODEL,) if ANY_MODEL in settings.aliases else ()
        entries = []
        for each in models:
            own = replace(settings, aliases=(*each.aliases, *anything))
            setup = Setup(own, each.name, each.load, queue, drain_seconds, secret, self.folder)  # type: ignore[arg-type]
            entries.append(Entry(setup, each.path, each.need, each.aliases))
        self.pool = Pool(entries, limit=limit, idle=idle, queue=queue)
        self.state = RouterState(settings, self.pool, self.folder)
        self._eager = eager
        self._error: ModelProcessFailed | ApiError | None = None
        self.loaded = threading.Event()  # or failed
        self._loop: asyncio.AbstractEventLoop | None = None
        # The second descriptor is for the connection to the process of the model.
        super().__init__(create_router(self.state), drain_seconds, descriptors=2)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped. Raises ModelProcessFailed if the default model cannot be loaded at the start, and
        KeyboardInterrupt for Ctrl-C."""
        try:
            super().run(sockets)
        finally:
            self._private.close()
        if self.interrupted:
            raise KeyboardInterrupt
        if isinstance(self._error, ApiError):
            raise ModelProcessFailed(self._error.message)
        if self._error is not None:
            raise self._error

    def reload(self) -> None:
        """Have all processes open the newest commits of their datastores. Any thread; returns at once."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.pool.reload)

    def begin_stop(self) -> None:
        self.pool.begin_stop()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve with the processes of the models, and end them."""
        self._loop = asyncio.get_running_loop()
        with self.capture_signals():  # while the processes end, too
            forced, begun = asyncio.create_task(self._kill_if_forced()), asyncio.create_task(self._begin())
            try:
                await super().serve(sockets)
            finally:
                await self.pool.close()
                forced.cancel()
                await begun

    async def _kill_if_forced(self) -> None:
        """End all processes at once when a second signal has come, whether answers still run or processes end."""
        while not self.force_exit:
            await asyncio.sleep(LOOK_SECONDS)
        self.pool.kill()

    async def _begin(self) -> None:
        self.pool.start()
        try:
            if self._eager:
                await self.pool.load(self.pool.entries[0])
            self.state.ready = True
        except (ModelProcessFailed, ApiError) as error:
            if not self.should_exit:  # else the stop caused it
                self._error = error
        finally:
            if not self.state.ready:
                self.stop()
            self.loaded.set()


class PrivateFolder:
    """A new folder of mode 0700 for what the models' processes share and must not outlive the server, locked until
    `close` removes it. Raises OSError if it cannot be made.

    A server that was killed leaves its folder. The next server of the same user removes it: a folder whose lock is free
    belongs to none that runs.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._lock.acquire()

    def close(self) -> None:
        """Remove it. Idempotent."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders that killed servers of this user have left. Folders of other users are left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime < YOUNGEST or folder.is_symlink() or not folder.is_dir():
                continue
            if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
                continue
            with FileLock(folder / LOCK, timeout=0, thread_local=False):
                pass
            shutil.rmtree(folder, ignore_errors=True)
