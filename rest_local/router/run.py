"""Runs a server of one model or several: bind, start the processes, serve, drain, close.

Signals are those of `rest_local.server.run`: SIGTERM and Ctrl-C let running answers end, a second one ends all
processes at once, SIGHUP stops or opens the datastores' newest commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rest_local.api.errors import ApiError
from rest_local.router.app import RouterState, create_router
from rest_local.router.memory import Need
from rest_local.router.pool import Pool, Served
from rest_local.router.private import PrivateFolder
from rest_local.router.process import ModelProcessFailed
from rest_local.router.worker import Setup
from rest_local.server.http import DRAIN_SECONDS, HttpServer
from rest_local.server.settings import ANY_MODEL, Settings

LOOK_SECONDS = 0.1  # between two looks whether a second signal has come


@dataclass(frozen=True)
class ModelChoice:
    """A model to serve: its name, its file, what loads it, and what it will take."""

    name: str
    path: Path
    load: Callable[[], object]
    need: Callable[[], Need]
    aliases: tuple[str, ...] = ()


class Routing:
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
        served = [_served(each, settings, queue, drain_seconds, secret, self.folder) for each in models]
        self.pool = Pool(served, limit=limit, idle=idle, queue=queue)
        self.state = RouterState(settings, self.pool, self.folder)
        self._eager = eager
        self._error: ModelProcessFailed | ApiError | None = None
        self.loaded = threading.Event()  # or failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app = create_router(self.state)
        self.http = _Server(self, drain_seconds)

    def run(self, *listening: socket.socket) -> None:
        """Serve until stopped. Raises ModelProcessFailed if the default model cannot be loaded at the start, and
        KeyboardInterrupt for Ctrl-C."""
        try:
            self.http.run(sockets=[*listening])
        finally:
            self._private.close()
        if self.http.interrupted:
            raise KeyboardInterrupt
        if isinstance(self._error, ApiError):
            raise ModelProcessFailed(self._error.message)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop as SIGTERM does. Any thread."""
        self.http.stop()

    def reload(self) -> None:
        """Have all processes open the newest commits of their datastores. Any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        for entry in self.pool.entries:
            if entry.process is not None:
                entry.process.reload()

    async def serve(self, http: Callable[[], Awaitable[None]]) -> None:
        """Serve with the processes started, and end them."""
        self._loop = asyncio.get_running_loop()
        forced, begun = asyncio.create_task(self._kill_if_forced()), asyncio.create_task(self._begin())
        try:
            await http()
        finally:
            await self.pool.close()
            forced.cancel()
            await begun

    async def _kill_if_forced(self) -> None:
        """End all processes at once when a second signal has come, whether answers still run or processes end."""
        while not self.http.force_exit:
            await asyncio.sleep(LOOK_SECONDS)
        self.pool.kill()

    async def _begin(self) -> None:
        self.pool.start()
        try:
            if self._eager:
                await self.pool.load(self.pool.entries[0])
            self.state.ready = True
        except (ModelProcessFailed, ApiError) as error:
            if not self.http.should_exit:  # else the stop caused it
                self._error = error
        finally:
            if not self.state.ready:
                self.http.stop()
            self.loaded.set()


class _Server(HttpServer):
    def __init__(self, routing: Routing, drain_seconds: int) -> None:
        # The second descriptor is for the connection to the process of the model.
        super().__init__(routing.app, routing.reload, routing.pool.begin_stop, drain_seconds, descriptors=2)
        self._routing = routing

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve with the processes of the models."""

        async def http() -> None:
            await super(_Server, self).serve(sockets)

        with self.capture_signals():  # while the processes end, too
            await self._routing.serve(http)


def _served(
    choice: ModelChoice, settings: Settings, queue: int, drain_seconds: int, secret: bytes, folder: Path
) -> Served:
    anything = (ANY_MODEL,) if ANY_MODEL in settings.aliases else ()
    own = replace(settings, aliases=(*choice.aliases, *anything))
    setup = Setup(own, choice.name, choice.load, queue, drain_seconds, secret, folder)  # type: ignore[arg-type]
    return Served(setup, choice.path, choice.need, choice.aliases)
