"""The HTTP server of a process: its socket, its connections with their time limits, its signals, its log.

`TimedProtocol` is uvicorn's HTTP/1.1 protocol with time limits:

- The head of a request must arrive within `HEAD_SECONDS`, else the answer is 408. The time counts from the connection,
  or from the first byte on a connection that is kept open.
- The body must arrive within `BODY_SECONDS` after that, else the connection is closed. (`answering` answers 408 first.)
- A client must read: a connection whose buffers stay full for `STALL_SECONDS` is closed.
- Connections beyond `limit_concurrency` get 503 when they are made, before any request. Idle connections use
  descriptors too, and when they run out, asyncio logs a line for each connection that it cannot accept.

Without the first two limits, a thousand sockets that send one byte a minute would keep every other client out. Between
requests, uvicorn's own limit applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rest_local.api.errors import RETRY_SECONDS, ApiError
from rest_local.errors import RestLocalError
from rest_local.server.answering import SLOW_BODY_SECONDS
from rest_local.server.security import DRAINED_BYTES, MAX_HEAD, SILENT_SECONDS, JsonLines, TerminalLines
from rest_local.server.settings import ServerSettings
from rest_local.server.streaming import CONNECTION, response_of

HEAD_SECONDS = 20.0
BODY_SECONDS = SLOW_BODY_SECONDS + 15.0  # leaves `answering` the time to answer 408
STALL_SECONDS = 30.0
LOG_SECONDS = 60.0  # refused connections are logged at most this often
MAX_CONNECTIONS = 1024
SPARE_DESCRIPTORS = 128  # the model's files, reopened datastores, the log and pipes need some

log = logging.getLogger("rest_local.server")


def connection_limit(descriptors: int = 1) -> int:
    """Return how many connections can be open, each with some `descriptors`: all free ones, less a reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    free = soft - len(os.listdir(folder)) - SPARE_DESCRIPTORS
    return max(min(MAX_CONNECTIONS, free // descriptors), 16)


class TimedProtocol(H11Protocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, CONNECTION: self}
        self._awaited = ""  # the client has to send this next: head, body or nothing
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._ignored: int | None = None  # counts bytes after an error that ends the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Refuse before uvicorn's own limit is reached, because that answers 503 to connections that are already open.
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            _refuse(transport, len(self.connections))
            return
        super().connection_made(transport)
        self._await("head")

    def write(self, data: bytes) -> None:
        """Send a non-empty part of an answer without a length, after `http.response.start`. Then await `flow.drain`.

        This bypasses the middleware. It would only pass the part on, but costs more than everything else.
        """
        if not self.cycle.disconnected:
            chunked = self.scope["http_version"] >= "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

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
        if self.transport is None:  # `_refuse` has answered
            return
        if self._ignored is not None:
            self._ignored += len(data)
            if self._ignored > DRAINED_BYTES:
                self.transport.close()
            return
        super().data_received(data)
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP.

        A running request ends as if its client had left, because its answer cannot be sent any more. Neither can an
        error if the request is a HEAD. The connection is closed when the client closes it, or soon: closing it with
        unread bytes would reset it.
        """
        begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not begun:
            cause = sys.exc_info()[1]  # uvicorn is handling it
            large = isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431
            with contextlib.suppress(h11.LocalProtocolError):
                self._say(ApiError(431, "the head of the request is too large") if large else ApiError(400, msg))
        self._ignored = 0
        with contextlib.suppress(OSError):  # the client is gone
            self.transport.write_eof()
        self.loop.call_later(SILENT_SECONDS, self.transport.close)

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
        """Start the timer for the head or the body, unless it is already running."""
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = awaited, None
        if awaited:
            self._timer = self.loop.call_later(HEAD_SECONDS if awaited == "head" else BODY_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._awaited == "head" and self.conn.trailing_data[0] and not self.transport.is_closing():
            self._say(ApiError(408, "the head of the request did not arrive in time"))
        self.transport.close()

    def _say(self, error: ApiError) -> None:
        self.transport.write(_last_answer(self.conn, error))


def _last_answer(conn: h11.Connection, error: ApiError) -> bytes:
    """Return the bytes of an error that ends the connection."""
    answer = response_of(error)
    head = h11.Response(status_code=answer.status_code, headers=[*answer.raw_headers, (b"connection", b"close")])
    return b"".join(conn.send(each) or b"" for each in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()))


_logged_at = -LOG_SECONDS


def _refuse(transport: asyncio.Transport, most: int) -> None:
    """Answer 503, and log at most one line a minute: many connections must not fill the log."""
    global _logged_at
    busy = ApiError(503, "too many connections", code="busy", headers={"retry-after": RETRY_SECONDS})
    transport.write(_last_answer(h11.Connection(h11.SERVER), busy))
    transport.close()
    if time.monotonic() - _logged_at >= LOG_SECONDS:
        _logged_at = time.monotonic()
        log.warning("%d connections are open, which is the limit; new ones are refused", most)


DRAIN_SECONDS = 30
IDLE_SECONDS = 75  # editors send the next request within a minute
END_SECONDS = 5  # time to send the errors of answers that are ended after DRAIN_SECONDS
BACKLOG = 128  # pending connections; asyncio also tries to accept this often when descriptors run out


class Stoppable:
    """A server that signals stop: SIGTERM, Ctrl-C and a hangup.

    `should_exit` asks it to end, `force_exit` at once after a second signal. `interrupted` means that Ctrl-C ended it.
    """

    should_exit = force_exit = interrupted = False
    _captured = False
    _loop: asyncio.AbstractEventLoop | None = None

    def on_stop(self) -> None:
        """Wake up to stop. The loop calls this after each `stop` and each signal to stop."""

    def in_loop(self, call: Callable[[], object]) -> None:
        """Call something in the loop, if it runs. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the block runs. Ending on SIGTERM is a success.

        Nested blocks change nothing: what SIGHUP does depends on how it was handled before.
        """
        if self._captured or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._captured = True
        handled: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._terminate,
            signal.SIGINT: self._interrupt,
        }
        ignored = outlives_terminal()
        handled[signal.SIGHUP] = lambda number, frame: None if ignored else self.stop()
        before = {number: signal.signal(number, handler) for number, handler in handled.items()}
        try:
            yield
        finally:
            self._captured = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Stop as SIGTERM does. A second call changes nothing: the shell and the kernel both report a hangup."""
        self.should_exit = True
        self.in_loop(self.on_stop)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # a second signal ends the process at once
        self.stop()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self._terminate(number, frame)


class HttpServer(Stoppable, uvicorn.Server):
    """uvicorn's server with other settings and signal handlers.

    When it stops, running answers have `drain_seconds` to end. A connection may need several `descriptors`.
    """

    def __init__(self, app: ASGIApp, drain_seconds: int = DRAIN_SECONDS, descriptors: int = 1) -> None:
        config = uvicorn.Config(
            app,
            http=TimedProtocol,  # h11 bounds a request's head, while httptools reads headers of any size
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=drain_seconds + END_SECONDS,
            limit_concurrency=connection_limit(descriptors) + 1,  # see `TimedProtocol.connection_made`
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._stopped = asyncio.Event()

    def begin_stop(self) -> None:
        """Refuse requests that are not decoding yet. Called when the server stops, before it waits for the others."""

    def end_answers(self) -> None:
        """End the answers that still run after `drain_seconds`, so that each client gets an error.

        Otherwise uvicorn cancels them, and clients get half an answer or a bare 500.
        """

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        """Wake up once a second, for the date in headers.

        uvicorn's method wakes up ten times to see if it has to stop. Each time costs as much as an event of a stream.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), 1.0)

    def on_stop(self) -> None:
        self._stopped.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_stop()
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self.end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def outlives_terminal() -> bool:
    """Return True if no terminal can end this process: it has none, as a service, or it ignores hangups."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:  # there is no controlling terminal
        return True
    return False


def listen(settings: ServerSettings) -> socket.socket:
    """Return a bound, listening socket.

    Raises RestLocalError if the port is taken or the address does not exist. The same goes for a loopback name such as
    `llm.localhost` that means another address here, if there is no key.
    """
    try:
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        settings.check_address(str(address[0]))
        listening = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        cause = error.strerror or str(error)
        raise RestLocalError(f"port {settings.port} on {settings.host}: {cause}; give another --port") from error
    # asyncio disables Nagle's algorithm only on sockets created with IPPROTO_TCP, which `create_server` does not set:
    # each event of a stream would wait up to 40 ms for the acknowledgement of the one before.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listening.detach())
    listening.set_inheritable(True)
    return listening


def listen_on_all(settings: ServerSettings) -> list[socket.socket]:
    """Return a socket for each address, all on one port. Raises what `listen` raises."""
    sockets: list[socket.socket] = []
    try:
        for host in settings.hosts:
            port = sockets[0].getsockname()[1] if sockets else settings.port
            sockets.append(listen(replace(settings, host=host, port=port)))
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def log_to_stderr() -> None:
    """Log requests and warnings to stderr, as lines of JSON or at a terminal as short ones."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalLines() if sys.stderr.isatty() else JsonLines())
    levels = {"rest_local.server": logging.INFO, "uvicorn.error": logging.WARNING}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
