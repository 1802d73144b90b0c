"""A program that serves HTTP on a free port of this machine: start it, post JSON with a time limit, end it.

Every failure of the program is ServerFailed with its last lines: it ends, hangs, closes the connection or answers
something else. Then it has been ended. Proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rest_local.bench.comparing.program import KEPT_BYTES, Program, ProgramFailed
from rest_local.errors import RestLocalError

HOST = "127.0.0.1"
MOST_BYTES = 2**26  # of an answer
SHOWN_CHARACTERS = 200  # of an answer in an error
POLL_SECONDS, HEALTH_SECONDS = 0.02, 5.0
END_SECONDS = 0.5  # from the end of a connection to that of the program


class ServerFailed(RestLocalError):
    """The server does not do what it should. It has been ended."""


class Server:
    """A server. `command`: without `--host` and `--port`, which are added. `kept`: bytes of its output, None: all.

    Raises ServerFailed if the program cannot be started. Use `with`, or `close`.
    """

    def __init__(
        self, command: Sequence[str], *, kept: int | None = KEPT_BYTES, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = _free_port()
        where = ("--host", HOST, "--port", str(self.port))
        try:
            self._program = Program([*command, *where], kept=kept, environment=environment)
        except ProgramFailed as error:
            raise ServerFailed(str(error)) from error

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def output(self) -> str:
        """What it wrote; complete after `close`."""
        return self._program.output

    def start(self, limit: float) -> float:
        """Wait until `GET /health` is answered with 200. Returns the seconds. Raises ServerFailed after `limit`."""
        begun = time.monotonic()
        while (left := begun + limit - time.monotonic()) > 0:
            if not self._program.running:
                raise self._failed(f"ends at its start with {self._program.how_it_ended()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", None, min(left, HEALTH_SECONDS))[0] == 200:
                    return time.monotonic() - begun
            time.sleep(POLL_SECONDS)
        raise self._failed(f"is not ready after {limit:g} s")

    def post(self, path: str, body: Mapping[str, Any], limit: float) -> tuple[dict[str, Any], float]:
        """The JSON object of the answer, and the seconds that it took. Raises ServerFailed, also after `limit`."""
        begun = time.monotonic()
        try:
            status, content = self._request("POST", path, json.dumps(body).encode(), limit)
        except TimeoutError as error:
            raise self._failed(f"does not answer within {limit:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            if self._program.wait(END_SECONDS):
                ended = self._program.how_it_ended()
                raise self._failed(f"ends in the middle of an answer with {ended}") from error
            raise self._failed(f"breaks off an answer ({type(error).__name__}: {error})") from error
        seconds = time.monotonic() - begun
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._failed(f"answers something else than a JSON object: {_shown(content)}")
        if status != 200:
            raise self._failed(f"answers with status {status}: {_shown(content)}")
        return answer, seconds

    def close(self) -> None:
        """End it and wait for that. A second call does nothing."""
        self._program.end()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _request(self, method: str, path: str, body: bytes | None, limit: float) -> tuple[int, bytes]:
        """Status and content. Raises OSError or HTTPException; TimeoutError after `limit` seconds in all."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=limit)
        try:
            connection.connect()
            with _cut_off(connection.sock, limit):
                connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                content = response.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise http.client.HTTPException(f"more than {MOST_BYTES} bytes")
            if response.length:  # of the bytes that did not come
                raise http.client.IncompleteRead(content, response.length)
            return response.status, content
        finally:
            connection.close()

    def _failed(self, cause: str) -> ServerFailed:
        """The error, after the server was ended, so that its last lines are complete."""
        self.close()
        lines = self._program.last_lines()
        return ServerFailed(f"{cause}; it wrote: {lines}" if lines else f"{cause}; it wrote nothing")


@contextlib.contextmanager
def _cut_off(connection: socket.socket, limit: float) -> Iterator[None]:
    """Cut the connection after `limit` seconds, and raise TimeoutError. The socket's own limit is for each read: one
    byte from time to time would never exceed it.
    """
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _shown(content: bytes) -> str:
    return repr(content[:SHOWN_CHARACTERS].decode("utf-8", "replace"))
