"""The server of one model: the ASGI application, and `Serving`, which loads the model, serves, drains and closes.

From the outside in: `Drained` (the end of a connection); the request log; `AccessMiddleware` (size of the head, Host,
Origin); CORS, if origins are allowed; `BodyMiddleware` (key, type and size of the body); the routes.

There is one process and one event loop; the engine has a thread of its own. While the model loads, /health answers 503.

- SIGTERM and Ctrl-C stop listening and let running answers end, for at most `drain_seconds`. A second SIGTERM ends the
  process at once. While the model loads, both stop it before its next forward pass.
- SIGHUP stops as SIGTERM does, because the terminal was closed. A process that no terminal can close (a service,
  `nohup`) ignores it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from rest_local.api.errors import ApiError
from rest_local.errors import RestLocalError
from rest_local.server import datastores, routes
from rest_local.server.http import DRAIN_SECONDS, HttpServer
from rest_local.server.operations import Routes, get
from rest_local.server.page import page
from rest_local.server.security import AccessLog, AccessMiddleware, BodyMiddleware, Drained, Inner
from rest_local.server.settings import ServerSettings
from rest_local.server.state import State
from rest_local.server.streaming import on_error

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service


ROUTES: Routes = (
    *routes.ROUTES,
    *datastores.ROUTES,
    (get("/", of_server=True), page),
)
_OTHER_NAMES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}


def create_app(state: State, secret: bytes | None = None) -> Starlette:
    """Make the application of one model's server. Its caller adds engine and service to the state once they are loaded.

    With a `secret`, only the process that forwards requests and knows it may call.
    """
    return assemble(ROUTES, state, state.settings, secret)


def assemble(routes: Routes, state: object, settings: ServerSettings, secret: bytes | None = None) -> Starlette:
    """Make an application of these routes with their aliases and middleware. Endpoints find `state` in it."""
    endpoints = {(each.method, each.path): endpoint for each, endpoint in routes}
    named = [Route(operation.path, endpoint, methods=[operation.method]) for operation, endpoint in routes]
    named.append(Route("/page/{file}", page, methods=["GET"]))
    for other, path in _OTHER_NAMES.items():
        found = [(method, endpoint) for (method, name), endpoint in endpoints.items() if name == path]
        named += [Route(other, endpoint, methods=[method]) for method, endpoint in found]
    app = Starlette(
        routes=named,
        middleware=[
            Middleware(Drained),
            Middleware(AccessLog),
            *_admission(routes, settings, secret),
            Middleware(BodyMiddleware, settings),
        ],
        exception_handlers=dict.fromkeys((ApiError, RestLocalError, HTTPException, Exception), on_error),
    )
    app.state.server = state
    return app


def _admission(routes: Routes, settings: ServerSettings, secret: bytes | None) -> list[Middleware]:
    """Return the middleware that checks where a request comes from."""
    if secret is not None:
        return [Middleware(Inner, secret)]
    if not settings.allowed_origins:
        return [Middleware(AccessMiddleware, settings)]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=sorted({each.method for each, _ in routes}),
        allow_headers=["*"],  # OpenAI's and Anthropic's packages send a dozen headers of their own
    )
    return [Middleware(AccessMiddleware, settings), cors]


log = logging.getLogger("rest_local.server")


class Serving(HttpServer):
    """One server and its engine. `run` it in the main thread, or in any other without signals.

    A separate thread calls `load`, then `on_loaded`, which by default logs this. `start` makes the service, in which
    `queue` requests may wait. `secret` is as for `create_app`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        name: str,
        load: Callable[[], Engine],
        *,
        queue: int = 64,
        drain_seconds: int = DRAIN_SECONDS,
        start: Callable[[Engine, int], Service] | None = None,
        secret: bytes | None = None,
        on_loaded: Callable[[State], None] | None = None,
    ) -> None:
        self.settings, self.state = settings, State(settings, name)
        self._load, self._start, self._queue = load, start or start_service, queue
        self._on_loaded = on_loaded or log_loaded
        self.loaded = threading.Event()  # set when loading has succeeded or failed
        self._error: BaseException | None = None
        super().__init__(create_app(self.state, secret), drain_seconds)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped. Raises what `load` raises, and KeyboardInterrupt for Ctrl-C."""
        loader = threading.Thread(target=self._open, name="rest-local-load", daemon=True)
        loader.start()
        try:
            super().run(sockets)
        finally:
            self.state.begin_stop()
            loader.join()
            self.state.close()
        if self.interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error

    def begin_stop(self) -> None:
        self.state.begin_stop()

    def end_answers(self) -> None:
        self.state.end_answers()

    def _open(self) -> None:
        try:
            self.state.load(self._load, lambda engine: self._start(engine, self._queue))
            self._on_loaded(self.state)
        except BaseException as error:  # `run` raises it
            if not self.should_exit:  # a stop may have caused the error
                self._error = error
            self.stop()
        self.loaded.set()


def log_loaded(state: State) -> None:
    log.info("model loaded", extra={"fields": {"event": "loaded", "model": state.model_id}})


def start_service(engine: Engine, queue: int) -> Service:
    """Start the service of an engine. `queue` requests may wait."""
    from rest_local.decoding.service import Service

    if engine.decoder.generates:
        engine.model.vocabulary.grammar_tokens()  # takes 1 s for 128 000 tokens, partly with the GIL held
    return Service(engine, queue=queue)
