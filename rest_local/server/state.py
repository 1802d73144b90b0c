"""The state that all routes share: the settings, and the engine and its service once the model is loaded.

`Workers` prepare requests outside of the event loop. Templates are rendered and texts are tokenized
in worker threads, inside a `Stop`. A client that disconnects, or a server that stops, sets it, and the work ends at its
next check, within milliseconds. The model must not be freed before `Workers.ended`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.requests import Request as HttpRequest

from rest_local.api.errors import loading, no_such_model
from rest_local.api.models import Row, find_name, meta, named_row
from rest_local.server.settings import ANY_MODEL, ServerSettings
from rest_local.server.streaming import watched
from rest_local.stop import Stop

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service
    from rest_local.llama.embedding import Embedder


log = logging.getLogger("rest_local.server")

WORKERS_SECONDS = 10.0  # a chat template may need half of that to stop

T = TypeVar("T")


class Workers:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stops: set[Stop] = set()
        self._stopping = False

    async def run(self, request: HttpRequest, call: Callable[[], T]) -> T:
        """Run `call` in a thread and return its result. Raises what it raises, and ServiceClosed if it is stopped."""
        stop = Stop()

        def work() -> T:
            with self._changed:
                self._stops.add(stop)
                if self._stopping:
                    stop.set()
            try:
                with stop.here():
                    stop.check()
                    return call()
            finally:
                with self._changed:
                    self._stops.discard(stop)
                    self._changed.notify_all()

        try:
            async with watched(request.receive, stop.set):
                return await anyio.to_thread.run_sync(work)
        finally:
            stop.set()  # a cancelled task does not end its thread, but this does

    def stop(self) -> None:
        """Stop all current and future work. Any thread may call this."""
        with self._changed:
            self._stopping = True
            stops = list(self._stops)
        for stop in stops:
            stop.set()

    def ended(self, seconds: float) -> bool:
        """Wait until no work is running. Returns False if some still is after these `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._stops, seconds)


def server_of(request: Request) -> Any:
    """Return the `State` of a server, or the `RouterState` in front of several models. Both have what callers use."""
    return request.app.state.server


@dataclass
class State:
    """The model of one server: `load` it, and `close` it after its last request.

    `engine` and `service` are set when the model is loaded, `embedder` by the first request that needs it.
    """

    settings: ServerSettings
    name: str  # the model's name, known before it is loaded
    engine: Engine | None = None
    service: Service | None = None
    embedder: Embedder | None = None
    workers: Workers = field(default_factory=Workers)
    started: int = field(default_factory=lambda: int(time.time()))
    _loading: Stop = field(default_factory=Stop)

    def load(self, load: Callable[[], Engine], start: Callable[[Engine], Service]) -> None:
        """Load the engine and start its service. Raises what `load` raises, and ServiceClosed after `begin_stop`."""
        with self._loading.here():
            self.engine = load()
        self.service = start(self.engine)

    def begin_stop(self) -> None:
        """Refuse requests that are not decoding yet, and break off loading. Any thread may call this."""
        self._loading.set()
        self.workers.stop()

    def end_answers(self) -> None:
        """End the answers that still run, each with an error. Any thread may call this; it returns at once."""
        if self.service is not None:
            threading.Thread(target=self.service.close, name="rest-local-end", daemon=True).start()

    def close(self) -> None:
        """Free everything. Must be called after `load` has returned."""
        service, self.service = self.service, None
        self.begin_stop()
        if not self.workers.ended(WORKERS_SECONDS):
            log.warning("a request is still being prepared after %.0f s", WORKERS_SECONDS)
        if service is not None:
            service.close()
        if self.embedder is not None:
            self.embedder.close()
        if self.engine is not None:
            self.engine.close()

    @property
    def ready(self) -> bool:
        return self.service is not None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of `GET /v1/models` for each name of the model."""
        known = {"meta": meta(self.engine)} if self.engine is not None else {}
        return [named_row(name, self.started) | known for name in self.names]

    def ollama_rows(self) -> list[Row]:
        engine = self.engine
        known, path = (meta(engine), engine.model.path) if engine is not None else ({}, Path(self.name))
        return [Row(name, path, known, is_loaded=engine is not None) for name in self.names]

    @property
    def model_id(self) -> str:
        """Return the first alias, or else the model's own name."""
        named = [alias for alias in self.settings.aliases if alias != ANY_MODEL]
        return named[0] if named else self.name

    @property
    def names(self) -> list[str]:
        """Return all names of the model, `model_id` first."""
        aliases = [alias for alias in self.settings.aliases if alias != ANY_MODEL]
        return list(dict.fromkeys([self.model_id, *aliases, self.name]))

    def check_model(self, name: str | None) -> str:
        """Return the name for the answer, as the client wrote it (`find_name`). Raises ApiError 404."""
        if not name:
            return self.model_id
        if find_name(name, self.names) or ANY_MODEL in self.settings.aliases:
            return name
        raise no_such_model()

    def loaded(self) -> tuple[Service, Engine]:
        """Return the service and the engine. Raises ApiError 503 while the model loads."""
        if self.service is None or self.engine is None:
            raise loading()
        return self.service, self.engine


def state_of(request: Request) -> State:
    """Return the state of the model that answers a request."""
    state: State = request.app.state.server
    return state
