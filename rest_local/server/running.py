"""Tickets of the engine, awaited: pieces as they come, an end when the client goes away, an answer sent in events.

Contract: whatever ends the block (the last piece, a client that is gone, a server that stops, a fault), no ticket goes
on running behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rest_local.errors import ServiceClosed
from rest_local.server.errors import ApiError, from_error

if TYPE_CHECKING:
    from rest_local.decoding.service import Ticket
    from rest_local.decoding.stream import Piece

DONE = b"data: [DONE]\n\n"


class Pulse:
    """An event of the loop that made it, set from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Until it is set again."""
        await self._event.wait()
        self._event.clear()


class Running:
    """The tickets of one HTTP request."""

    def __init__(self, tickets: Sequence[Ticket], pulse: Pulse) -> None:
        self.tickets, self._pulse = list(tickets), pulse
        self._stopped: set[int] = set()

    def stop(self, number: int) -> None:
        """Ends one ticket because its answer is complete."""
        self._stopped.add(number)
        self.tickets[number].cancel()

    def cancel(self) -> None:
        """Ends what still runs; again does nothing."""
        for ticket in self.tickets:
            ticket.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """(number of the ticket, piece) as they come; None when that ticket is done, with its result complete.

        Raises ApiError where a ticket ended with an error, or the service ended it.
        """
        open_ = dict(enumerate(self.tickets))
        while open_:
            for number, ticket in list(open_.items()):
                done = ticket.done  # before the pieces are taken: what comes in between wakes us again
                for piece in ticket.poll():
                    yield number, piece
                if done:
                    del open_[number]
                    self._check(number, ticket)
                    yield number, None
            if open_:
                await self._pulse.wait()

    @contextlib.asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While the block runs, a client that goes away ends the tickets. They have ended when it is left."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def _check(self, number: int, ticket: Ticket) -> None:
        if ticket.error is not None:
            raise from_error(ticket.error)
        if ticket.result.finish_reason == "cancelled" and number not in self._stopped:
            raise from_error(ServiceClosed())  # or the client is gone, and reads no answer anyway


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
            except ApiError as error:
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(value: Any) -> bytes:
    """One event that holds a JSON value."""
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer; numbers that JSON has no word for are null."""
    return Response(to_json(value, inf_nan_mode="null"), status, media_type="application/json")
