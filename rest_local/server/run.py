"""Runs a server: bind, load the model while /health answers 503, serve, drain, close.

- SIGTERM and Ctrl-C stop listening and let running answers end, for at most `drain_seconds`. A second SIGTERM ends the
  process at once. While the model loads, they end that before its next forward pass.
- SIGHUP opens the newest commits of the datastores.

There is one process and one event loop. The engine has a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from rest_local.errors import RestLocalError
from rest_local.server.access import JsonLines
from rest_local.server.app import create_app
from rest_local.server.connection import TimedProtocol, connection_limit
from rest_local.server.datastores import reopen
from rest_local.server.settings import Settings
from rest_local.server.state import State
from rest_local.stop import Stop

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service

log = logging.getLogger("rest_local.server")

DRAIN_SECONDS = 30
IDLE_SECONDS = 75  # of a kept connection; editors send the next request within a minute
MAX_HEAD = 1 << 16  # bytes of a request's line and headers
BACKLOG = 128  # connections that wait to be accepted; asyncio also tries this often when descriptors run out
WORKERS_SECONDS = 10.0  # for worker threads to stop; a chat template may take half of that


class HttpServer(uvicorn.Server):
    """uvicorn's server with other signal handlers. `interrupted`: Ctrl-C ended it."""

    def __init__(self, config: uvicorn.Config, on_hangup: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.interrupted = False
        self._on_hangup = on_hangup
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse requests that are not decoding yet; uvicorn then waits for the others."""
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's method, does not raise the signal again: to end on SIGTERM is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._terminate,
            signal.SIGINT: self._interrupt,
        }
        if hasattr(signal, "SIGHUP"):
            handled[signal.SIGHUP] = lambda number, frame: self._on_hangup()
        before = {number: signal.signal(number, handler) for number, handler in handled.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second time
        self.should_exit = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self.handle_exit(number, frame)


class Serving:
    """One server and its engine.

    load    loads the engine; called in a thread of its own
    queue   number of requests that may wait
    start   makes the service of the engine and `queue`
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        load: Callable[[], Engine],
        *,
        queue: int = 64,
        drain_seconds: int = DRAIN_SECONDS,
        start: Callable[[Engine, int], Service] | None = None,
    ) -> None:
        self.settings, self.state = settings, State(settings, name)
        self._load, self._start, self._queue = load, start or _start, queue
        self.loaded = threading.Event()  # or failed
        self._error: BaseException | None = None
        self._stop = Stop()  # of loading
        config = uvicorn.Config(
            create_app(self.state),
            http=TimedProtocol,  # of h11, which bounds a request's head; httptools reads headers of any size
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=drain_seconds,
            limit_concurrency=connection_limit() + 1,  # see `TimedProtocol.connection_made`
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        self.http = HttpServer(config, self._hang_up, self.state.workers.stop)

    def run(self, listening: socket.socket) -> None:
        """Serve until stopped. Raises what `load` raises, and KeyboardInterrupt for Ctrl-C."""
        loader = threading.Thread(target=self._open, name="rest-local-load", daemon=True)
        loader.start()
        try:
            self.http.run(sockets=[listening])
        finally:
            stopped = self._error is None  # an error of loading from here on is caused by the stop
            self._stop.set()
            loader.join()
            self._close()
        if self.http.interrupted:
            raise KeyboardInterrupt
        if self._error is not None and not stopped:
            raise self._error

    def stop(self) -> None:
        """Stop as SIGTERM does. Any thread."""
        self.http.should_exit = True

    def reload(self) -> None:
        """Open the newest commits of the datastores."""
        try:
            service, engine = self.state.service, self.state.engine
            if service is not None and engine is not None:
                reopen(service, engine)
                log.info("datastores opened again", extra={"fields": {"event": "reload"}})
        except RestLocalError as error:
            log.warning("%s", error)

    def _hang_up(self) -> None:
        threading.Thread(target=self.reload, name="rest-local-reload", daemon=True).start()

    def _open(self) -> None:
        try:
            with self._stop.here():
                self.state.engine = self._load()
            self.state.service = self._start(self.state.engine, self._queue)
            log.info("model loaded", extra={"fields": {"event": "loaded", "model": self.state.model_id}})
        except BaseException as error:  # `run` raises it
            self._error = error
            self.http.should_exit = True
        self.loaded.set()

    def _close(self) -> None:
        service, engine = self.state.service, self.state.engine
        self.state.service = None
        self.state.workers.stop()
        if not self.state.workers.ended(WORKERS_SECONDS):
            log.warning("a request is still being prepared after %.0f s", WORKERS_SECONDS)
        if service is not None:
            service.close()
        if self.state.embedder is not None:
            self.state.embedder.close()
        self.state.scoring.close()
        if engine is not None:
            engine.close()


def _start(engine: Engine, queue: int) -> Service:
    from rest_local.decoding.service import Service

    engine.model.vocabulary.grammar_tokens()  # 1 s at 128 000 tokens, in part with the GIL held
    return Service(engine, queue=queue)


def listen(settings: Settings) -> socket.socket:
    """A bound, listening socket. Raises RestLocalError if the port is taken or the address does not exist."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=128)
    except OSError as error:
        cause = error.strerror or str(error)
        raise RestLocalError(f"port {settings.port} on {settings.host}: {cause}; give another --port") from error
    # asyncio disables Nagle's algorithm only on sockets created with IPPROTO_TCP, which `create_server` does not set:
    # each event of a stream would wait up to 40 ms for the acknowledgement of the one before.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listening.detach())
    listening.set_inheritable(True)
    return listening


def log_to_stderr() -> None:
    """Log requests and warnings to stderr as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("rest_local.server", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
