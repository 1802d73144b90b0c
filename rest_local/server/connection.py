"""HTTP/1.1 connections that end where a client keeps them waiting: uvicorn's protocol with limits for a request.

Contract: the head of a request is whole within `HEAD_SECONDS`, counted from the connection, or on a kept one from its
first byte; its body within `BODY_SECONDS` behind that, read or not. How the bytes are spread does not matter: without
this, a thousand sockets that send one a minute are all that `limit_concurrency` lets in. A late head is told 408; what
is late after it is cut off (`parsing` says 408 before). Between requests, uvicorn's own limit holds.

A client that does not read is cut off too: its socket's buffers are full, and stay so for `STALL_SECONDS`. Connections
beyond `limit_concurrency` are told 503 when they are made, not when they ask: idle ones hold descriptors as well, and
where those run out, asyncio logs a line for each connection that it cannot accept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rest_local.server.errors import RETRY_SECONDS, ApiError
from rest_local.server.parsing import SLOW_BODY_SECONDS

HEAD_SECONDS = 20.0
BODY_SECONDS = SLOW_BODY_SECONDS + 15.0  # so that who can be told is told
STALL_SECONDS = 30.0
LOG_SECONDS = 60.0  # between two lines about connections that were refused
MAX_CONNECTIONS = 1024
SPARE_DESCRIPTORS = 128  # for the model's files, datastores while they are opened anew, the log, pipes

log = logging.getLogger("rest_local.server")


def connection_limit() -> int:
    """Connections that can be open at once, by the descriptors that this process may have and those that it has."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    free = soft - len(os.listdir(folder)) - SPARE_DESCRIPTORS
    return max(min(MAX_CONNECTIONS, free), 16)


class TimedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owed = ""  # by the client: head, body or nothing
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # One less than uvicorn's own limit: with as many it answers 503 to those that are connected.
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            _refuse(transport, len(self.connections))
            return
        super().connection_made(transport)
        self._await("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._reads()
        super().resume_writing()

    def _reads(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # it was refused
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        self._reads()
        if self.transport is not None:  # it was not refused
            super().connection_lost(exc)

    def _look(self) -> None:
        state = self.conn.their_state
        begun = state is h11.IDLE and self.conn.trailing_data[0]
        self._await("head" if begun else "body" if state is h11.SEND_BODY else "")

    def _await(self, owed: str) -> None:
        """What is owed already has its time."""
        if owed == self._owed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._owed, self._timer = owed, None
        if owed:
            self._timer = self.loop.call_later(HEAD_SECONDS if owed == "head" else BODY_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._owed == "head" and self.conn.trailing_data[0] and not self.transport.is_closing():
            late = ApiError(408, "the head of the request did not come in time").response()
            head = h11.Response(status_code=late.status_code, headers=[*late.raw_headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(late.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


_told = -LOG_SECONDS


def _refuse(transport: asyncio.Transport, most: int) -> None:
    """503, and one line in the log a minute: a flood of connections is not to become a flood of lines."""
    global _told
    busy = ApiError(503, "too many connections", code="busy", headers={"retry-after": RETRY_SECONDS}).response()
    conn = h11.Connection(h11.SERVER)
    head = h11.Response(status_code=busy.status_code, headers=[*busy.raw_headers, (b"connection", b"close")])
    events = (head, h11.Data(data=bytes(busy.body)), h11.EndOfMessage())
    transport.write(b"".join(conn.send(event) or b"" for event in events))
    transport.close()
    if time.monotonic() - _told >= LOG_SECONDS:
        _told = time.monotonic()
        log.warning("%d connections are open, the most that are served; new ones are refused", most)
