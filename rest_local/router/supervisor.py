"""The parent of a server with one model.

It holds the listening sockets and serves nothing. Clients reach its child, the server, directly.

- A child that crashes is started again at once, or after STEADY_SECONDS if it had served for less or cannot be started.
  Connections wait in the sockets meanwhile.
- The child ends with its parent (`rest_local.router.process`), and the parent with a child that ends by itself with
  success, because a signal has stopped it. An error of the first start ends the parent with the same error.
- Signals are those of `rest_local.server.app`. A second one kills the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from rest_local.router.app import ModelChoice
from rest_local.router.process import ModelProcess, ModelProcessFailed, Setup
from rest_local.server.http import DRAIN_SECONDS, Stoppable
from rest_local.server.settings import ServerSettings

log = logging.getLogger("rest_local.server")

STEADY_SECONDS = 5.0


class Supervisor(Stoppable):
    """Keeps the child of one server running. `run` it in the main thread, or in any other without signals."""

    def __init__(self, setup: Setup, sockets: Sequence[socket.socket]) -> None:
        self._setup, self._sockets = setup, sockets
        self._process: ModelProcess | None = None
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """Serve until stopped. Raises ModelProcessFailed for the first start, and KeyboardInterrupt."""
        asyncio.run(self.serve())
        if self.interrupted:
            raise KeyboardInterrupt

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self.capture_signals():
            await self._serve_once(is_first=True)
            while not self.should_exit:
                await self._serve_once()

    async def _serve_once(self, *, is_first: bool = False) -> None:
        """Start the child, wait until it has ended, and then until it has to be started again."""
        self._process = process = ModelProcess(self._setup, lambda ended: None)
        try:
            await process.start()
            await process.ended.wait()
        except ModelProcessFailed as error:
            await process.stop()
            if not self.should_exit:  # a stop may have caused the error
                if is_first:
                    raise
                log.warning("%s", error)
        if process.exit_code == 0:
            self.stop()
        if self.should_exit:
            return
        fields = {"event": "crash", "model": self._setup.name, "how": process.how_it_ended()}
        log.error("the process of the model ended by itself", extra={"fields": fields})
        if not process.loaded_at or time.monotonic() - process.loaded_at < STEADY_SECONDS:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), STEADY_SECONDS)

    def on_stop(self) -> None:
        for each in self._sockets:
            each.close()  # connections are refused once the child has closed its copies, too
        self._stopped.set()
        if self._process is not None:
            if self.force_exit:
                self._process.kill()
            else:
                self._stopping = asyncio.create_task(self._process.stop())


def supervise(settings: ServerSettings, choice: ModelChoice, sockets: Sequence[socket.socket], queue: int = 64) -> None:
    """Serve one model on listening sockets, in which `queue` requests may wait. Raises what `Supervisor.run` raises."""
    setup = Setup(
        settings=replace(settings, aliases=choice.aliases_in(settings)),
        name=choice.name,
        load=choice.load,  # type: ignore[arg-type]
        queue=queue,
        drain_seconds=DRAIN_SECONDS,
        secret=None,
        sockets=tuple(each.fileno() for each in sockets),
    )
    Supervisor(setup, sockets).run()
