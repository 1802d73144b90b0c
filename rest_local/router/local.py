"""A model in the process of the server itself, with the methods of `ModelProcess`.

In a separate process, each request and each event of a stream would pass a second server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rest_local.api.models import meta
from rest_local.errors import RestLocalError
from rest_local.router.process import ModelProcessFailed, Setup
from rest_local.server.app import start_service
from rest_local.server.state import State


class LocalModel:
    """One load of a model. Its methods are called in the event loop only."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.state = setup, State(setup.settings, setup.name)
        self.meta: dict[str, Any] = {}
        self.loaded_at = 0.0
        self.stopping = False
        self._loading = asyncio.Event()
        self._loading.set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        return self.loaded_at > 0 and not self.stopping

    async def start(self) -> None:
        """Load the model. Raises ModelProcessFailed."""
        setup = self.setup
        self._loading.clear()
        try:
            await asyncio.to_thread(self.state.load, setup.load, lambda engine: start_service(engine, setup.queue))
        except RestLocalError as error:
            raise ModelProcessFailed(str(error), error.exit_code) from error
        finally:
            self._loading.set()
        assert self.state.engine is not None
        self.meta, self.loaded_at = meta(self.state.engine), time.monotonic()

    def begin_stop(self) -> None:
        """Break off loading, and refuse requests that are not decoding yet. Idempotent."""
        self.stopping = True
        self.state.begin_stop()

    async def stop(self) -> None:
        """Free the model. Must be called when no answers run; otherwise they end with an error."""
        self.begin_stop()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._loading.wait()
        await asyncio.to_thread(self.state.close)

    def kill(self) -> None:
        """End the answers that still run."""
        self.begin_stop()
        self.state.end_answers()
