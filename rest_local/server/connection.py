"""HTTP/1.1 connections with time limits: uvicorn's protocol, which ends connections whose client keeps it waiting.

- The head of a request must arrive within `HEAD_SECONDS`, else 408. The time counts from the connection, or from the
  first byte on a kept connection.
- The body must arrive within `BODY_SECONDS` after that, else the connection is closed (`parsing` answers 408 earlier).
- A client must read: a connection whose buffers stay full for `STALL_SECONDS` is closed.
- Connections beyond `limit_concurrency` get 503 when they are made, before any request: idle connections use
  descriptors too, and asyncio logs a line for each connection that it cannot accept when they run out.

Without the first two limits, a thousand sockets that send one byte a minute would keep every other client out. Between
requests, uvicorn's own limit applies.
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
BODY_SECONDS = SLOW_BODY_SECONDS + 15.0  # later than the 408 of `parsing`
STALL_SECONDS = 30.0
LOG_SECONDS = 60.0  # between two log lines about refused connections
MAX_CONNECTIONS = 1024
SPARE_DESCRIPTORS = 128  # for the model's files, datastores while they are opened anew, the log, pipes

log = logging.getLogger("rest_local.server")


def connection_limit() -> int:
    """Connections that can be open at once: the free descriptors of this process, less a reserve."""
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
        self._awaited = ""  # from the client: head, body or nothing
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # One less than uvicorn's own limit, at which it answers 503 to connections that are already open.
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            _refuse(transport, len(self.connections))
            return
        super().connection_made(transport)
        self._await("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _stop_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # the connection was refused
            return
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        self._stop_stall_timer()
        if self.transport is not None:  # the connection was not refused
            super().connection_lost(exc)

    def _update_timer(self) -> None:
        state = self.conn.their_state
        begun = state is h11.IDLE and self.conn.trailing_data[0]
        self._await("head" if begun else "body" if state is h11.SEND_BODY else "")

    def _await(self, awaited: str) -> None:
        """Start the timer for the head or the body, unless it runs already."""
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = awaited, None
        if awaited:
            self._timer = self.loop.call_later(HEAD_SECONDS if awaited == "head" else BODY_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._awaited == "head" and self.conn.trailing_data[0] and not self.transport.is_closing():
            late = ApiError(408, "the head of the request did not arrive in time").response()
            head = h11.Response(status_code=late.status_code, headers=[*late.raw_headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(late.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


_logged_at = -LOG_SECONDS


def _refuse(transport: asyncio.Transport, most: int) -> None:
    """Answers 503, and logs at most one line a minute: many connections must not fill the log."""
    global _logged_at
    busy = ApiError(503, "too many connections", code="busy", headers={"retry-after": RETRY_SECONDS}).response()
    conn = h11.Connection(h11.SERVER)
    head = h11.Response(status_code=busy.status_code, headers=[*busy.raw_headers, (b"connection", b"close")])
    events = (head, h11.Data(data=bytes(busy.body)), h11.EndOfMessage())
    transport.write(b"".join(conn.send(event) or b"" for event in events))
    transport.close()
    if time.monotonic() - _logged_at >= LOG_SECONDS:
        _logged_at = time.monotonic()
        log.warning("%d connections are open, which is the limit; new ones are refused", most)
