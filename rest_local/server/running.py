"""Tickets of the engine, awaited: what came, an end when the client goes away, an answer sent in events.

Contract: whatever ends the block (the last piece, a client that is gone, a server that stops, a fault), no ticket goes
on running behind it. What came is handed on at once, but behind something that was handed on only after `PACE`, all of
it together, or when an answer ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rest_local.errors import ReaderTooSlow, RestLocalError, ServiceClosed
from rest_local.server.errors import answer_to

if TYPE_CHECKING:
    from rest_local.decoding.service import Ticket
    from rest_local.decoding.stream import Piece

DONE = b"data: [DONE]\n\n"


PACE = 0.010
"""Seconds between two events of a stream, longer than which nothing is held: a screen shows 60 pictures a second.

An event costs the loop 60 us where its code is in the processor's caches and 0.2 ms where a model went through them in
between; a model of 0.9 ms a token that sent one for each lost a sixth of its speed on two cores."""


BACKLOG = 50_000
"""Tokens and alternatives, about 100 bytes each, that may wait for a stream's reader; a step counts as one token."""


News = tuple[int, Sequence["Piece"] | None]
"""The number of an answer and what came of it, at least one piece; None: it is done, with its result complete."""


class Pulse:
    """Wakes one waiter in the loop that made it, from any thread, where that waiter wants it.

    A waiting reader calls `clear`, then looks, then waits: what comes in between wakes it. Where something came
    `most_missed` times since the last look, `on_missed` is called, once, in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._armed = False
        self._missed = 0
        self.most_missed: float = math.inf
        self.on_missed: Callable[[], None] = lambda: None

    def __call__(self, ended: bool) -> None:
        """Called in the engine's thread: something came, or an answer ended, which wakes in any case."""
        self._missed += 1
        if self._missed == self.most_missed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.on_missed)
        if not (self._armed or ended):
            return
        self._armed = False
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Forget what woke before; only an end wakes."""
        self._event.clear()
        self._armed, self._missed = False, 0

    def arm(self) -> None:
        """Anything wakes, once."""
        self._armed = True

    def disarm(self) -> None:
        """Only an end wakes again; what has woken already stays."""
        self._armed = False

    async def wait(self, seconds: float | None = None) -> None:
        """Until it is woken, so many seconds at most."""
        timer = None if seconds is None else self._loop.call_later(seconds, self._event.set)
        try:
            await self._event.wait()
        finally:
            if timer is not None:
                timer.cancel()


class Running:
    """The tickets of one HTTP request. `entries`: what each of its tokens holds, itself and alternatives."""

    def __init__(self, tickets: Sequence[Ticket], pulse: Pulse, entries: int = 1) -> None:
        self.tickets, self._pulse, self._entries = list(tickets), pulse, entries
        self._stopped: set[int] = set()
        self._lagging = False

    def bound(self) -> None:
        """It is read as it comes: end it where the reader lags so far that what waits would fill the memory."""
        self._pulse.on_missed = self._lag
        self._pulse.most_missed = max(BACKLOG // self._entries, 1)

    def _lag(self) -> None:
        self._lagging = True
        self.cancel()

    def stop(self, number: int) -> None:
        """Ends one ticket because its answer is complete."""
        self._stopped.add(number)
        self.tickets[number].cancel()

    def cancel(self) -> None:
        """Ends what still runs; again does nothing."""
        for ticket in self.tickets:
            ticket.cancel()

    async def pieces(self, *, meanwhile: bool = True) -> AsyncIterator[list[News]]:
        """What came, until all tickets are done; not `meanwhile`: only what came of those that are done.

        Raises what a ticket ended with, ServiceClosed where the service ended it.
        """
        open_ = dict(enumerate(self.tickets))
        while open_:
            begun, news = time.monotonic(), self._look(open_, meanwhile)
            done = [number for number, pieces in news if pieces is None]
            errors = [error for number in done if (error := self._error(number)) is not None]
            if news:
                yield [each for each in news if each[1] is not None] if errors else news
            if errors:
                raise errors[0]
            for number in done:
                del open_[number]
            if not news:
                await self._pulse.wait()
            elif open_ and (left := begun + PACE - time.monotonic()) > 0:
                await self._pulse.wait(left)

    def _look(self, open_: Mapping[int, Ticket], meanwhile: bool) -> list[News]:
        """What there is now; if that is nothing, the pulse wakes when there is."""
        self._pulse.clear()
        news = _taken(open_, meanwhile)
        if not news and meanwhile:
            self._pulse.arm()
            news = _taken(open_, meanwhile)  # what came in between woke nobody
            if news:
                self._pulse.disarm()  # nothing is to wake who waits for the time of the next event
        return news

    @contextlib.asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While the block runs, a client that goes away ends the tickets. They have ended when it is left."""
        async with watched(receive, self.cancel):
            try:
                yield
            finally:
                self.cancel()

    def _error(self, number: int) -> RestLocalError | None:
        ticket = self.tickets[number]
        if ticket.error is not None:
            return ticket.error
        if self._lagging and number not in self._stopped:
            return ReaderTooSlow()
        if ticket.result.finish_reason == "cancelled" and number not in self._stopped:
            return ServiceClosed()  # or the client is gone, and reads no answer anyway
        return None


def _taken(open_: Mapping[int, Ticket], meanwhile: bool) -> list[News]:
    """What came of each; of those that are not done only `meanwhile`."""
    news: list[News] = []
    for number, ticket in open_.items():
        done = ticket.done  # before the pieces are taken: what comes in between is there at the next look
        if (done or meanwhile) and (pieces := ticket.poll()):
            news.append((number, pieces))
        if done:
            news.append((number, None))
    return news


@contextlib.asynccontextmanager
async def watched(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """While the block runs, `gone` is called where the client goes away. The request's body has been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """Server-sent events. What fails behind the first byte is the last event; its HTTP status has been sent."""

    media_type = "text/event-stream"

    def __init__(self, running: Running, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._running, self._events = running, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._running.attended(receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except RestLocalError as error:
                told = event(answer_to(Request(scope), error).body)
                await send({"type": "http.response.body", "body": told, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(value: Any) -> bytes:
    """One event that holds a JSON value."""
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer; numbers that JSON has no word for are null."""
    return Response(to_json(value, inf_nan_mode="null"), status, media_type="application/json")
