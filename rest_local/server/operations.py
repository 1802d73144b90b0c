"""The calls of a server. A protocol's modules export `ROUTES`, which `app` joins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    streams: bool = False  # True if the body may request a stream as the answer
    of_server: bool = False  # True if no model is needed, so the router answers it itself


Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Routes = tuple[tuple[Operation, Endpoint], ...]

get, post, delete = partial(Operation, "GET"), partial(Operation, "POST"), partial(Operation, "DELETE")
