"""A server in a thread of its own, and calls to it."""

import contextlib
import faulthandler
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from rest_local.server.app import Serving
from rest_local.server.http import listen


@dataclass
class Live:
    """A running server. `service`: the scripted service, if there is one."""

    port: int
    serving: Serving
    thread: threading.Thread
    service: Any = None

    def stop(self) -> None:
        """Stop the server and wait for its thread."""
        self.serving.stop()
        self.thread.join(120)
        if self.thread.is_alive():
            faulthandler.dump_traceback(sys.__stderr__)  # It shows where the server hangs.
        assert not self.thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def later(self, path: str, body: Any, **options: Any) -> Future[httpx.Response]:
        """Wait for the answer in a thread, because the test gives its text."""
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(self.post, path, body, **options)
        pool.shutdown(wait=False)
        return answer

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)


@contextlib.contextmanager
def served(serving: Serving) -> Iterator[Live]:
    """Run the server in a thread of its own, and stop it at the end."""
    with listen(serving.settings) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=serving.run, args=([listening],), name="server")
        thread.start()
        try:
            live = Live(port, serving, thread)
            yield live
        finally:
            live.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that no event tells of."""
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def sent(live: Live, path: str, body: Any, *, buffer: int = 0) -> socket.socket:
    """Return a connection that has sent a request, and holds `buffer` bytes of the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", live.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


ASKED_MOST = 20_000  # times; a server that is never idle is found after a minute


def becomes_idle(live: Live) -> None:
    """Wait until no slot is in use."""
    with live.client() as client:
        for _ in range(ASKED_MOST):
            if not any(slot["is_processing"] for slot in client.get("/slots").json()):
                return
    raise AssertionError("a slot is still in use without a request")


Scripted = Callable[..., Live]
"""The type of the fixture `scripted`."""


def prompt_of(live: Live, number: int = 0) -> str:
    """Return the text that the scripted model was given."""
    tokens = live.service.stream(number).request.prompt
    return b"".join(map(live.service.engine.model.vocabulary.piece, tokens)).decode()


def data_of(text: str) -> list[Any]:
    """Return the objects of a stream of server-sent events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pieces(text: str, size: int = 5) -> tuple[str, ...]:
    """Cut the text as a model gives it."""
    return tuple(text[start : start + size] for start in range(0, len(text), size))
