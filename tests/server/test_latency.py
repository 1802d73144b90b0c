"""Latency of events: they are sent as soon as they are made."""

from __future__ import annotations

import socket

from rest_local.server.http import listen
from rest_local.server.settings import Settings


def test_accepted_sockets_have_the_tcp_protocol() -> None:
    """Only on those does asyncio turn off Nagle's algorithm, which delays an event until the last is acknowledged."""
    with listen(Settings(port=0)) as listening, socket.create_connection(listening.getsockname()[:2]) as client:
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
