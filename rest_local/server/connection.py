"""HTTP/1.1 connections that end where a client keeps them waiting: uvicorn's protocol with limits for a request.

Contract: the head of a request is whole within `HEAD_SECONDS`, counted from the connection, or on a kept one from its
first byte; its body within `BODY_SECONDS` behind that, read or not. How the bytes are spread does not matter: without
this, a thousand sockets that send one a minute are all that `limit_concurrency` lets in. A late head is told 408; what
is late behind it is cut off (`parsing` says 408 before). Between requests, uvicorn's own limit holds.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rest_local.server.errors import ApiError
from rest_local.server.parsing import SLOW_BODY_SECONDS

HEAD_SECONDS = 20.0
BODY_SECONDS = SLOW_BODY_SECONDS + 15.0  # so that who can be told is told


class TimedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owed = ""  # by the client: head, body or nothing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
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
