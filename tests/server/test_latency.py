"""What would make every answer wait: an event has to leave when it is made."""

from __future__ import annotations

import socket

from rest_local.server.run import listen
from rest_local.server.settings import Settings


def test_accepted_connections_say_they_are_tcp() -> None:
    """asyncio turns Nagle's algorithm off on no others; with it an event waits for the acknowledgement of the last."""
    with listen(Settings(port=0)) as listening, socket.create_connection(listening.getsockname()[:2]) as client:
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
