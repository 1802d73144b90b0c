"""Forwards one request to the process of a model, and its answer back as it comes.

- Each request has a connection of its own to the process, on the loopback. When the client disconnects, that connection
  is closed, which the process sees as its client's end. What the client does not read is not read from the process.
- A client that disconnects while its model is loaded waits no more; the load goes on.
- A request that did not reach a process, because that had just ended, is sent to the next one.
- If the process ends before its answer has begun, the request is sent once more, to the next process: nothing of an
  answer has reached the client. Requests that ended two processes may be the cause: the answer is 502 with the reason.
- After an answer has begun, an error is its last event, in the form of the protocol, if it is a stream of events; any
  other answer is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import anyio
import h11
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rest_local.api.answers import EVENT_STREAM, event
from rest_local.api.errors import ApiError, responses_error, shape_of
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcess
from rest_local.server.security import CLIENT, FORWARDED, SECRET
from rest_local.server.streaming import watched

NDJSON = "application/x-ndjson"
_READ = 1 << 16
_TRIES = 3  # processes that a request is sent to, if it reaches none of them
_MOST_ENDED = 2  # processes that may end before they have answered one request
_END_SECONDS = 1.0  # for the pool to learn that a process has ended, once its connections are closed
_OF_CONNECTION = frozenset(
    name.encode()
    for name in (
        "connection", "content-length", "date", "expect", "keep-alive", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", SECRET, CLIENT,
    )
)  # fmt: skip

Headers = list[tuple[bytes, bytes]]


class ProcessEnded(Exception):
    """The process closed the connection before its answer was complete."""


class Forwarded(Response):
    """The answer of a model's process. `body`: of the request, which has been read. `load`: as for `Pool.using`."""

    def __init__(self, pool: Pool, entry: Entry, body: bytes, *, load: bool = True) -> None:
        super().__init__()
        self._pool, self._entry, self._body, self._load = pool, entry, body, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as here:
            async with watched(receive, here.cancel):
                await self._forward(scope, send)

    async def _forward(self, scope: Scope, send: Send) -> None:
        unreached, ended = 0, 0
        while True:
            async with self._pool.using(self._entry, load=self._load) as process:
                try:
                    exchange = await Exchange.begin(process, *_of_client(scope), self._body)
                except OSError as error:
                    unreached += 1
                    if unreached == _TRIES:
                        raise _unreachable(self._entry) from error
                    await _end_of(process)
                    continue
                try:
                    status, headers = await self._head(exchange, scope)
                except ProcessEnded as error:
                    exchange.abort()
                    await _end_of(process)
                    ended += 1
                    if ended == _MOST_ENDED:
                        raise self._ended(process) from error
                    continue
                await self._pass_on(process, exchange, status, headers, scope, send)
                return

    @staticmethod
    async def _head(exchange: Exchange, scope: Scope) -> tuple[int, Headers]:
        """Status and headers of the answer. Raises ProcessEnded."""
        scope[FORWARDED] = True  # the process logs it
        try:
            return await exchange.head()
        except ProcessEnded:
            scope[FORWARDED] = False
            raise
        except BaseException:
            exchange.abort()
            raise

    async def _pass_on(
        self, process: ModelProcess, exchange: Exchange, status: int, headers: Headers, scope: Scope, send: Send
    ) -> None:
        try:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            try:
                async for data in exchange.body():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ProcessEnded:
                scope[FORWARDED] = False
                await _end_of(process)
                last = _last_event(
                    scope["path"], dict(headers).get(b"content-type", b"").decode(), self._ended(process)
                )
                if last is None:
                    raise
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            exchange.abort()

    def _ended(self, process: ModelProcess) -> ApiError:
        name = self._entry.names[0]
        how = f" with {process.how_it_ended()}" if process.ended.is_set() else ""
        return ApiError(502, f"the process of model {name} ended{how}; it is started again", code="model_crashed")


async def _end_of(process: ModelProcess) -> None:
    """Wait until the pool knows that a process has ended whose connections are closed, else it is used again."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.ended.wait(), _END_SECONDS)


def _unreachable(entry: Entry) -> ApiError:
    return ApiError(503, f"model {entry.names[0]} takes no requests", code="busy", headers={"retry-after": "1"})


def _last_event(path: str, media_type: str, error: ApiError) -> bytes | None:
    """An error after an answer has begun; None where the protocol has no form for it."""
    value = shape_of(path)(error)
    media_type = media_type.partition(";")[0]
    if media_type == NDJSON:
        return to_json(value) + b"\n"
    if media_type != EVENT_STREAM:
        return None
    if path in ("/v1/responses", "/responses"):
        return event(responses_error(error), "error")
    return event(value, "error" if path.startswith("/v1/messages") else None)


def _of_client(scope: Scope) -> tuple[bytes, bytes, Headers]:
    """Method, target and headers of a client's request, with the client's address."""
    query = scope["query_string"]
    target = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    address, port = scope.get("client") or ("?", 0)
    named = b",".join(value.lower() for name, value in scope["headers"] if name == b"connection")
    left_out = _OF_CONNECTION | {name.strip() for name in named.split(b",")} - {b"host"}
    headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
    return scope["method"].encode(), target, [*headers, (CLIENT.encode(), f"{address}:{port}".encode())]


class Exchange:
    """One request to a process and its answer. `begin` it, then read `head` and `body`; `abort` in any case."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._conn = h11.Connection(h11.CLIENT)

    @classmethod
    async def begin(
        cls, process: ModelProcess, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> Exchange:
        """Connect and send a request. Raises OSError if the process does not take it."""
        own = [(SECRET.encode(), process.setup.secret), (b"connection", b"close")]
        own.append((b"content-length", str(len(body)).encode()))
        events = (h11.Request(method=method, target=target, headers=[*headers, *own]), h11.Data(data=body))
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        exchange = cls(reader, writer)
        try:
            writer.write(b"".join(exchange._conn.send(each) or b"" for each in (*events, h11.EndOfMessage())))
            await writer.drain()
        except BaseException:
            exchange.abort()
            raise
        return exchange

    async def head(self) -> tuple[int, Headers]:
        """The status and the headers. Raises ProcessEnded."""
        found = await self._next()
        assert isinstance(found, h11.Response)
        length = [pair for pair in found.headers if pair[0] == b"content-length"]
        return found.status_code, [*(pair for pair in found.headers if pair[0] not in _OF_CONNECTION), *length]

    async def body(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ProcessEnded."""
        while isinstance(found := await self._next(), h11.Data):
            yield bytes(found.data)

    def abort(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.transport.abort()

    async def _next(self) -> h11.Event:
        while True:
            try:
                found = self._conn.next_event()
                if found is h11.NEED_DATA:
                    self._conn.receive_data(await self._reader.read(_READ))
                elif isinstance(found, (h11.ConnectionClosed, h11.PAUSED)):
                    raise ProcessEnded
                elif not isinstance(found, h11.InformationalResponse):
                    return found  # type: ignore[return-value]
            except (h11.RemoteProtocolError, OSError) as error:
                raise ProcessEnded from error
