"""Work of a request outside the event loop. It ends when the client is gone or the server stops.

Contract: templates are rendered and texts are tokenized in threads, inside a `Stop`. A client that goes away, or a
server that stops, sets it: tokenizing ends at the next part, within milliseconds. Whoever frees the model asks `ended`
first, so that the model outlives these threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
from starlette.requests import Request as HttpRequest

from rest_local.server.running import watched
from rest_local.stop import Stop

T = TypeVar("T")


class Workers:
    """One server's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stops: set[Stop] = set()
        self._stopping = False

    async def run(self, request: HttpRequest, call: Callable[[], T]) -> T:
        """What `call` gives, made in a thread. Raises what it raises, ServiceClosed where it was stopped."""
        stop = Stop()

        def work() -> T:
            with self._changed:
                self._stops.add(stop)
                if self._stopping:
                    stop.set()
            try:
                with stop.here():
                    stop.check()
                    return call()
            finally:
                with self._changed:
                    self._stops.discard(stop)
                    self._changed.notify_all()

        try:
            async with watched(request.receive, stop.set):
                return await anyio.to_thread.run_sync(work)
        finally:
            stop.set()  # where the request's task was cancelled, the thread goes on until it reads this

    def stop(self) -> None:
        """Ends what is under way, and all that begins later. Any thread."""
        with self._changed:
            self._stopping = True
            stops = list(self._stops)
        for stop in stops:
            stop.set()

    def ended(self, seconds: float) -> bool:
        """Waits until none is under way, so long at most; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._stops, seconds)
