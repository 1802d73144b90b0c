"""The server of the process that clients reach. It answers some calls itself and forwards the others.

Every route of `rest_local.server` is also a route of this application. It answers calls marked `of_server`, and
forwards any other to the process of the model that the body's field `model` names, or else the query (`?model=NAME`),
or else to the default model. Host, origin, key and size are checked here.

`GET /slots` and `GET /metrics` do not load a model.

`Forwarded` sends one request to the process of a model, and passes its answer on as it arrives:

- A request has its own loopback connection to the process. When the client disconnects, it is closed, which the
  process sees as its client's end. If the client does not read, neither does the router.
- A client that disconnects while its model is loaded no longer waits, but the load goes on.
- A request that did not reach a process, because that had just ended, is sent to the next one.
- If the process ends before its answer has begun, the answer is 502 with the reason. An answer that has begun is cut
  off, as that of a single model is.

Signals are those of `rest_local.server.app`: SIGTERM, SIGHUP and Ctrl-C let running answers end, and a second one ends
all processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rest_local.api.bodies import Body, load
from rest_local.api.errors import ApiError
from rest_local.api.models import Row, named_row
from rest_local.router.memory import Need
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcess, ModelProcessFailed, Setup
from rest_local.server import app as model_app
from rest_local.server.answering import parse, read
from rest_local.server.http import DRAIN_SECONDS, HttpServer
from rest_local.server.operations import Routes, post
from rest_local.server.security import CLIENT, FORWARDED, SECRET
from rest_local.server.settings import ANY_MODEL, ServerSettings
from rest_local.server.streaming import json_response, watched

_SMALL = 1 << 14  # a body of fewer bytes is parsed in the event loop
_STATISTICS = ("/slots", "/metrics")


@dataclass
class RouterState:
    settings: ServerSettings
    pool: Pool
    ready: bool = False  # True after the default model is loaded, or if it need not be
    started: int = field(default_factory=lambda: int(time.time()))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of `GET /v1/models` for each name. A model that was loaded before has `meta`."""
        return [
            named_row(name, self.started)
            | {"status": {"value": entry.status}}
            | ({"meta": entry.meta} if entry.meta else {})
            for entry in self.pool.entries
            for name in entry.names
        ]

    def ollama_rows(self) -> list[Row]:
        """Return a row for each name of each model. Of a model that was never loaded, only its file is known."""
        found = []
        for entry in self.pool.entries:
            expires = None
            if self.pool.idle is not None:
                left = 0.0 if entry.users else time.monotonic() - entry.used_at
                expires = time.time() + max(self.pool.idle - left, 0.0)
            is_loaded = entry.status == "loaded"
            found += [Row(name, entry.path, entry.meta, is_loaded, expires) for name in entry.names]
        return found

    def entry(self, name: str | None) -> Entry:
        """Return the model of that name. Raises ApiError 404."""
        return self.pool.entry(name, anything=ANY_MODEL in self.settings.aliases)


def router_of(request: HttpRequest) -> RouterState:
    state: RouterState = request.app.state.server
    return state


class ModelBody(Body):
    """The body of POST /models/load and /models/unload."""

    model: str


async def forward(request: HttpRequest) -> Response:
    """Return the answer of the model. Raises ApiError 400, 404, and what `Pool.using` raises."""
    router = router_of(request)
    body = await read(request) if request.method in ("POST", "PUT", "PATCH") else b""
    entry = router.entry(await _model_of(request, router, body))
    load = request.method not in ("GET", "HEAD") or request.url.path not in _STATISTICS
    if load or entry.status == "loaded":
        return Forwarded(router.pool, entry, body, load=load)
    if request.url.path == "/slots":
        return json_response([])
    if not router.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    return Response(b"", media_type="text/plain")


async def _model_of(request: HttpRequest, router: RouterState, body: bytes) -> str | None:
    """Return the name of the model in a request. Raises ApiError 400 for a body that is no JSON object."""
    if not body:
        return request.query_params.get("model")
    value = load(body) if len(body) < _SMALL else await anyio.to_thread.run_sync(load, body)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    name = value.get("model")
    if not name and request.url.path.startswith("/api/"):
        name = value.get("name")  # older clients of Ollama call it so
    if name is not None and not isinstance(name, str):
        raise ApiError(400, "model: Input should be a valid string", code="invalid_type", param="model")
    return name or request.query_params.get("model")


async def load_model(request: HttpRequest) -> Response:
    router, body = router_of(request), await parse(request, ModelBody)
    await router.pool.load(router.entry(body.model))
    return json_response({"success": True})


async def unload_model(request: HttpRequest) -> Response:
    router, body = router_of(request), await parse(request, ModelBody)
    await router.pool.unload(router.entry(body.model))
    return json_response({"success": True})


ROUTES: Routes = (
    (post("/models/load", of_server=True), load_model),
    (post("/models/unload", of_server=True), unload_model),
)


def create_router(state: RouterState) -> Starlette:
    shared = ((each, endpoint if each.of_server else forward) for each, endpoint in model_app.ROUTES)
    return model_app.assemble((*shared, *ROUTES), state, state.settings)


_TRIES = 3  # maximum attempts for a request that reaches no process
_END_SECONDS = 1.0  # a process closes its connections before the pool learns that it has ended
_LENGTH = b"content-length"
_OF_CONNECTION = frozenset(
    name.encode()
    for name in (
        "connection", "content-length", "date", "expect", "keep-alive", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", SECRET, CLIENT,
    )
)  # fmt: skip


class Forwarded(Response):
    """The answer of a model's process to a request with this `body`. `load` is as for `Pool.using`."""

    def __init__(self, pool: Pool, entry: Entry, body: bytes, *, load: bool = True) -> None:
        super().__init__()
        self._pool, self._entry, self._body, self._load = pool, entry, body, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as here:
            async with watched(receive, here.cancel):
                await self._forward(scope, send)

    async def _forward(self, scope: Scope, send: Send) -> None:
        for _ in range(_TRIES):
            async with self._pool.using(self._entry, load=self._load) as process:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
                except OSError:
                    await _end_of(process)
                    continue
                try:
                    writer.write(_request(scope, process, self._body))
                    await self._pass_on(process, reader, scope, send)
                finally:
                    writer.transport.abort()
                return
        name = self._entry.names[0]
        raise ApiError(503, f"model {name} takes no requests", code="busy", headers={"retry-after": "1"})

    async def _pass_on(self, process: ModelProcess, reader: asyncio.StreamReader, scope: Scope, send: Send) -> None:
        begun = False
        scope[FORWARDED] = True
        try:
            status, headers = await _head(reader)
            passed = [pair for pair in headers if pair[0] not in _OF_CONNECTION or pair[0] == _LENGTH]
            await send({"type": "http.response.start", "status": status, "headers": passed})
            begun = True
            async for data in _body(reader, dict(headers), scope["method"]):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            scope[FORWARDED] = False
            await _end_of(process)
            if begun:
                return  # The server closes the connection, because the answer is not complete.
            how = f" with {process.how_it_ended()}" if process.ended.is_set() else ""
            text = f"the process of model {self._entry.names[0]} ended{how}; ask again"
            raise ApiError(502, text, code="model_crashed") from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end_of(process: ModelProcess) -> None:
    """Wait until the pool knows that a process with closed connections has ended, so that it does not use it again."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.ended.wait(), _END_SECONDS)


def _request(scope: Scope, process: ModelProcess, body: bytes) -> bytes:
    """Return a client's request as its process gets it, with the client's address and the process's secret."""
    query = scope["query_string"]
    target = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    address, port = scope.get("client") or ("?", 0)
    named = b",".join(value.lower() for name, value in scope["headers"] if name == b"connection")
    left_out = _OF_CONNECTION | {name.strip() for name in named.split(b",")} - {b"host"}
    headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
    headers += [(CLIENT.encode(), f"{address}:{port}".encode()), (SECRET.encode(), process.setup.secret or b"")]
    headers += [(_LENGTH, str(len(body)).encode())]
    first = b"%b %b HTTP/1.1" % (scope["method"].encode(), target)
    return b"\r\n".join((first, *(b"%b: %b" % pair for pair in headers), b"", body))


async def _head(reader: asyncio.StreamReader) -> tuple[int, list[tuple[bytes, bytes]]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return int(status.split()[1]), [(name.lower(), value.strip()) for name, _, value in pairs]


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes], method: str) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Raises IncompleteReadError, ConnectionError."""
    if b"transfer-encoding" in headers:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = 0 if method == "HEAD" else int(headers.get(_LENGTH, 0))
    while left:
        data = await reader.read(left)
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        yield data


@dataclass(frozen=True)
class ModelChoice:
    """A model to serve: its name, its file, how to load it, and the memory it needs."""

    name: str
    path: Path
    load: Callable[[], object]
    need: Callable[[], Need]
    aliases: tuple[str, ...] = ()

    def aliases_in(self, settings: ServerSettings) -> tuple[str, ...]:
        """Return the aliases of this model in a server: its own, and `*` if any name will do."""
        return (*self.aliases, *((ANY_MODEL,) if ANY_MODEL in settings.aliases else ()))


class Routing(HttpServer):
    """A server of several models. `run` it in the main thread, or in any other without signals.

    Args:
        models: the first one is the default
        eager: load the default model at the start; if that fails, the server ends with its error
        limit, idle, queue: see `Pool`
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ModelChoice],
        *,
        eager: bool = True,
        limit: int | None = None,
        idle: float | None = None,
        queue: int = 64,
        drain_seconds: int = DRAIN_SECONDS,
    ) -> None:
        self.settings = settings
        secret = secrets.token_hex(16).encode()
        entries = []
        for each in models:
            own = replace(settings, aliases=each.aliases_in(settings))
            setup = Setup(own, each.name, each.load, queue, drain_seconds, secret)  # type: ignore[arg-type]
            entries.append(Entry(setup, each.path, each.need, each.aliases))
        self.pool = Pool(entries, limit=limit, idle=idle, queue=queue)
        self.state = RouterState(settings, self.pool)
        self._eager = eager
        self._error: ModelProcessFailed | ApiError | None = None
        self.loaded = threading.Event()  # set when loading has succeeded or failed
        # The second descriptor is for the connection to the process of the model.
        super().__init__(create_router(self.state), drain_seconds, descriptors=2)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped. Raises ModelProcessFailed for the default model at the start, KeyboardInterrupt."""
        super().run(sockets)
        if self.interrupted:
            raise KeyboardInterrupt
        if isinstance(self._error, ApiError):
            raise ModelProcessFailed(self._error.message)
        if self._error is not None:
            raise self._error

    def begin_stop(self) -> None:
        self.pool.begin_stop()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve with the processes of the models, and end them."""
        with self.capture_signals():  # signals must also be handled while the processes end
            begun = asyncio.create_task(self._begin())
            try:
                await super().serve(sockets)
            finally:
                await self.pool.close()
                await begun

    def on_stop(self) -> None:
        """End all processes at once after a second signal, whether answers still run or processes end."""
        super().on_stop()
        if self.force_exit:
            self.pool.kill()

    async def _begin(self) -> None:
        self.pool.start()
        try:
            if self._eager:
                await self.pool.load(self.pool.entries[0])
            self.state.ready = True
        except (ModelProcessFailed, ApiError) as error:
            if not self.should_exit:  # a stop may have caused the error
                self._error = error
        finally:
            if not self.state.ready:
                self.stop()
            self.loaded.set()
