"""Ollama's lists of models, of all that a router serves."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.models import Row, row_of, running, tags
from rest_local.router.pool import Entry, Pool
from rest_local.server.streaming import json_response


def rows(pool: Pool) -> list[Row]:
    """One row for each name of each model; what is known of a model that was never loaded is its file."""
    return [_row(pool, entry, name) for entry in pool.entries for name in entry.served.names]


def _row(pool: Pool, entry: Entry, name: str) -> Row:
    expires = None
    if pool.idle is not None:
        left = 0.0 if entry.users else time.monotonic() - entry.used_at
        expires = time.time() + max(pool.idle - left, 0.0)
    return row_of(name, entry.served.path, entry.meta, is_loaded=entry.status == "loaded", expires=expires)


async def list_models(request: HttpRequest) -> Response:
    """All models, loaded or not."""
    return json_response(tags(rows(request.app.state.server.pool)))


async def list_running(request: HttpRequest) -> Response:
    """The models in memory, and when they are unloaded unless they are used."""
    return json_response(running(rows(request.app.state.server.pool)))
