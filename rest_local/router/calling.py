"""Calls of the server to itself: a request to an ASGI application in this process, and its whole answer.

What `call` does is what a client's request does, all checks included: it brings the client's key. Where the task is
cancelled, so is the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message

Ask = Callable[[str, str, bytes, "bytes | None"], Awaitable[tuple[int, bytes]]]
CLIENT = "batch"  # in the place of an address, for the log


def calls_of(app: ASGIApp) -> Ask:
    """`ask(method, target, body, key)` of an application: the status and the body of the answer. Raises what the
    application raises.
    """

    async def ask(method: str, target: str, body: bytes, key: bytes | None) -> tuple[int, bytes]:
        path, _, query = target.partition("?")
        headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
        if body:
            headers.append((b"content-type", b"application/json"))
        if key is not None:
            headers.append((b"x-api-key", key))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": (CLIENT, 0),
            "server": ("127.0.0.1", 0),
        }
        begun = False
        status, parts = 0, []

        async def receive() -> Message:
            nonlocal begun
            if begun:
                await asyncio.Event().wait()  # a client that stays; the task of the request ends first
            begun = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await app(scope, receive, send)
        return status, b"".join(parts)

    return ask
