"""Runs a server of one model or several: bind, start the processes, serve, drain, close.

Signals are those of `rest_local.server.run`: SIGTERM and Ctrl-C let running answers end, a second one ends all
processes at once, SIGHUP stops or opens the datastores' newest commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rest_local.router.app import RouterState, create_router
from rest_local.router.batch_calls import ROUTES as BATCH_ROUTES
from rest_local.router.batch_calls import upload_limits
from rest_local.router.batches import Batches
from rest_local.router.files import Limits
from rest_local.router.memory import Need
from rest_local.router.pool import Pool, Served
from rest_local.router.process import ModelProcessFailed
from rest_local.router.worker import Setup
from rest_local.server.errors import ApiError
from rest_local.server.http import DRAIN_SECONDS, HttpServer
from rest_local.server.settings import ANY_MODEL, Settings


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
    kept     folder of files and batches; None: the server has no such calls
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
        kept: Path | None = None,
    ) -> None:
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="rest-local-"))  # mode 0700
        secret = secrets.token_hex(16).encode()
        served = [_served(each, settings, queue, drain_seconds, secret, self.folder) for each in models]
        self.pool = Pool(served, limit=limit, idle=idle, queue=queue)
        self.state = RouterState(settings, self.pool, self.folder)
        self._eager = eager
        self._error: ModelProcessFailed | ApiError | None = None
        self.loaded = threading.Event()  # or failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app = create_router(self.state, *((BATCH_ROUTES, upload_limits(Limits())) if kept else ()))
        self.batches = Batches(kept, self.state.ask, keys=settings.keys) if kept else None
        self.app.state.batches = self.batches
        self.http = _Server(self, drain_seconds)

    def run(self, listening: socket.socket) -> None:
        """Serve until stopped. Raises ModelProcessFailed if the default model cannot be loaded at the start, and
        KeyboardInterrupt for Ctrl-C."""
        try:
            self.http.run(sockets=[listening])
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
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

    async def serve(self, http: Callable[[], object]) -> None:
        """Serve with the processes started, and end them."""
        self._loop = asyncio.get_running_loop()
        begun = asyncio.create_task(self._begin())
        try:
            await http()  # type: ignore[misc]
        finally:
            if self.http.force_exit:
                self.pool.kill()
            if self.batches is not None:
                await self.batches.close()
            await self.pool.close()
            await begun

    def begin_stop(self) -> None:
        """No new work: first of all of batches, which would take processes that end for faults."""
        if self.batches is not None:
            self.batches.begin_stop()
        self.pool.begin_stop()

    async def _begin(self) -> None:
        self.pool.start()
        if self.batches is not None:
            self.batches.start()
        if self._eager:
            try:
                await self.pool.load(self.pool.entries[0])
            except (ModelProcessFailed, ApiError) as error:
                if not self.http.should_exit:  # else the stop caused it
                    self._error = error
                    self.http.stop()
        self.state.ready = self._error is None
        self.loaded.set()


class _Server(HttpServer):
    def __init__(self, routing: Routing, drain_seconds: int) -> None:
        # The second descriptor is for the connection to the process of the model.
        super().__init__(routing.app, routing.reload, routing.begin_stop, drain_seconds, descriptors=2)
        self._routing = routing

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve with the processes of the models."""

        async def http() -> None:
            await super(_Server, self).serve(sockets)

        await self._routing.serve(http)


def _served(
    choice: ModelChoice, settings: Settings, queue: int, drain_seconds: int, secret: bytes, folder: Path
) -> Served:
    anything = (ANY_MODEL,) if ANY_MODEL in settings.aliases else ()
    own = replace(settings, aliases=(*choice.aliases, *anything))
    setup = Setup(own, choice.name, choice.load, queue, drain_seconds, secret, folder)  # type: ignore[arg-type]
    return Served(setup, choice.path, choice.need, choice.aliases)
