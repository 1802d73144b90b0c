"""HTTP responses: the event streams of one request, JSON, and errors in the shapes of `rest_local.api.errors`.

Contract:

- However a request ends (the last piece, a disconnected client, a server that stops, an error), all of its streams end
  with it.
- The first pieces are passed on at once. After that, pieces are collected for `PACE` seconds, or until an answer ends,
  and passed on together.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rest_local.api.errors import ApiError, at_field, headers_of, shape_of
from rest_local.errors import ReaderTooSlow, RestLocalError, ServiceClosed

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from rest_local.decoding.stream import Piece
    from rest_local.decoding.streaming import Stream

CONNECTION = "rest_local.connection"  # the state of a request has its `ClientConnection` here

# Minimum seconds between two events of a stream: text that comes 50 times a second looks as if it came at once. An
# event costs the event loop of a process 0.1 ms and more, if a forward pass has replaced its code in the processor's
# caches. Two processes took 40 ms of processor time for 300 tokens of the toy model with 10 ms, and 28 with 20 ms.
PACE = 0.020

# Tokens and alternatives, about 100 bytes each, that may wait for a stream's client. A step counts as one token.
BACKLOG = 50_000

_OFFLINE = re.compile(r"(/v1)?/(batches|files)(/|$)")

# The number of an answer with its new pieces, or None if the answer and its result are complete.
News = tuple[int, Sequence["Piece"] | None]


class Pulse:
    """Wakes one waiting task in the loop that made the pulse. The engine's thread calls it for every step.

    The task calls `clear`, then looks for pieces, then waits, so that what arrives in between wakes it. If the pulse is
    called `most_missed` times without a `clear`, it calls `on_missed` once, in the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._armed = False
        self._missed = 0
        self.most_missed: float = math.inf
        self.on_missed: Callable[[], None] = lambda: None

    def __call__(self, ended: bool) -> None:
        """Report that something has arrived or that an answer has `ended`, which always wakes the task. Any thread."""
        self._missed += 1
        if self._missed == self.most_missed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.on_missed)
        if not (self._armed or ended):
            return
        self._armed = False
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Forget earlier calls. From here on only an end wakes the task."""
        self._event.clear()
        self._armed, self._missed = False, 0

    def arm(self) -> None:
        """Let the next call wake the task."""
        self._armed = True

    def disarm(self) -> None:
        """Let only an end wake the task again. Earlier calls still count."""
        self._armed = False

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for a call, but at most `seconds`."""
        timer = None if seconds is None else self._loop.call_later(seconds, self._event.set)
        try:
            await self._event.wait()
        finally:
            if timer is not None:
                timer.cancel()


class StreamGroup:
    """The streams of one HTTP request. A log-probability entry has up to `entries` tokens, including alternatives."""

    def __init__(self, streams: Sequence[Stream], pulse: Pulse, entries: int = 1) -> None:
        self.streams, self._pulse, self._entries = list(streams), pulse, entries
        self._stopped: set[int] = set()
        self._lagging = False

    def bound(self) -> None:
        """Limit the backlog of a stream: end the request if its client reads so slowly that memory would fill up."""
        self._pulse.on_missed = self._lag
        self._pulse.most_missed = max(BACKLOG // self._entries, 1)

    def _lag(self) -> None:
        self._lagging = True
        self.cancel()

    def stop(self, number: int) -> None:
        """Cancel one stream because its answer is complete."""
        self._stopped.add(number)
        self.streams[number].cancel()

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def pieces(self, *, meanwhile: bool = True, every: float | None = None) -> AsyncIterator[list[News]]:
        """Yield new pieces until all streams are done. Without `meanwhile`, yield only those of streams that are done.

        Yields an empty list whenever nothing came for `every` seconds. Raises the error of a stream, and ServiceClosed
        if the service cancelled one.
        """
        open_ = dict(enumerate(self.streams))
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
                await self._pulse.wait(every)
                if every is not None and time.monotonic() - begun >= every:
                    yield []
            elif open_ and (left := begun + PACE - time.monotonic()) > 0:
                await self._pulse.wait(left)

    def _look(self, open_: Mapping[int, Stream], meanwhile: bool) -> list[News]:
        """Return the pieces that are there. If there are none, let the pulse wake the task when there are."""
        self._pulse.clear()
        news = _taken(open_, meanwhile)
        if not news and meanwhile:
            self._pulse.arm()
            news = _taken(open_, meanwhile)  # pieces that arrived before `arm` woke no task
            if news:
                self._pulse.disarm()  # the task waits for the time of the next event instead
        return news

    @contextlib.asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel the streams when the client disconnects or the block ends."""
        async with watched(receive, self.cancel):
            try:
                yield
            finally:
                self.cancel()

    def _error(self, number: int) -> RestLocalError | None:
        stream = self.streams[number]
        if stream.error is not None:
            return stream.error
        if self._lagging and number not in self._stopped:
            return ReaderTooSlow()
        if stream.result.finish_reason == "cancelled" and number not in self._stopped:
            return ServiceClosed()  # a client that has disconnected reads no answer anyway
        return None


def _taken(open_: Mapping[int, Stream], meanwhile: bool) -> list[News]:
    """Return the new pieces of each stream. Without `meanwhile`, take only from streams that are done."""
    news: list[News] = []
    for number, stream in open_.items():
        done = stream.done  # reading this before the pieces ensures that a finished stream loses none
        if (done or meanwhile) and (pieces := stream.poll()):
            news.append((number, pieces))
        if done:
            news.append((number, None))
    return news


@contextlib.asynccontextmanager
async def watched(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `gone` if the client disconnects while the block runs. The request's body must have been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class ClientConnection(Protocol):
    """`server.http.TimedProtocol`, as a stream sees it. `cycle` is the request that it serves."""

    flow: FlowControl
    cycle: RequestResponseCycle

    def write(self, data: bytes) -> None: ...


class EventStream(Response):
    """A stream of events, server-sent ones unless `media_type` says otherwise.

    The HTTP status is sent first, so a later error arrives as the last event, which `error_event` makes.
    """

    def __init__(
        self,
        streams: StreamGroup,
        events: AsyncIterator[bytes],
        media_type: str,
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._streams, self._events, self._error_event = streams, events, error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._streams.attended(receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # Without a separate task, each event would cost something in every layer around this one.
            await asyncio.create_task(self._write(scope))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, scope: Scope) -> None:
        client: ClientConnection = scope["state"][CONNECTION]
        try:
            async for data in self._events:
                client.write(data)
                await client.flow.drain()
        except RestLocalError as error:
            client.write(self._error_event(answer_to(Request(scope), error)))


def json_response(value: Any) -> Response:
    """Make a JSON response. NaN and infinity become null."""
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")


def response_of(error: ApiError, path: str = "") -> Response:
    """Return the HTTP response to a call of `path`."""
    return Response(to_json(shape_of(path)(error)), error.status, error.headers | headers_of(path), "application/json")


def answer_to(request: Request, error: RestLocalError) -> ApiError:
    """Return the error for a response or the last event of a stream. `param` is the field that is wrong."""
    return at_field(error, request.url.path, is_local=request.app.state.server.settings.is_local)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer an exception of an endpoint or the router.

    A fault of the server, which is any other exception, shows only in the log.
    """
    path = request.url.path
    if isinstance(error, RestLocalError):
        error = answer_to(request, error)
    elif isinstance(error, HTTPException):
        messages = {404: "no such route", 405: "this route does not support the method"}
        status, message = error.status_code, messages.get(error.status_code, str(error.detail))
        if status == 404 and _OFFLINE.match(path):
            status, message = 501, "batches are answered without a server: rest-local batch INPUT -o OUTPUT"
        error = ApiError(status, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed at this request; see its log")
    return response_of(error, path)
