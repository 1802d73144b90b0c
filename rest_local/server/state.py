"""The state that all routes share: the settings, and the engine and its service once the model is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from rest_local.server.errors import ApiError, loading
from rest_local.server.settings import ANY_MODEL, Settings
from rest_local.server.workers import Scoring, Workers

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service
    from rest_local.llama.embedding import Embedder


@dataclass
class State:
    """The state of one server.

    name              of the model, known before it is loaded
    engine, service   set when the model is loaded
    embedder          made for the first request that needs it

    `Serving` closes the engine, the service, the embedder and `scoring`.
    """

    settings: Settings
    name: str
    engine: Engine | None = None
    service: Service | None = None
    embedder: Embedder | None = None
    scoring: Scoring = field(default_factory=Scoring)
    workers: Workers = field(default_factory=Workers)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_id(self) -> str:
        """The first alias, else the model's own name."""
        named = [alias for alias in self.settings.aliases if alias != ANY_MODEL]
        return named[0] if named else self.name

    @property
    def names(self) -> list[str]:
        """All names of the model, `model_id` first."""
        aliases = [alias for alias in self.settings.aliases if alias != ANY_MODEL]
        return list(dict.fromkeys([self.model_id, *aliases, self.name]))

    def check_model(self, name: str | None) -> str:
        """The name for the answer. A name is only compared, never used as a path. Raises ApiError 404."""
        if not name:
            return self.model_id
        if name in self.names or ANY_MODEL in self.settings.aliases:
            return name
        raise ApiError(404, "no such model; GET /v1/models lists the names", code="model_not_found", param="model")

    def loaded(self) -> tuple[Service, Engine]:
        """The service and the engine. Raises ApiError 503 while the model loads."""
        if self.service is None or self.engine is None:
            raise loading()
        return self.service, self.engine


def state_of(request: Request) -> State:
    """The server's state."""
    state: State = request.app.state.server
    return state
