"""Errors as HTTP responses: handlers for the application. `rest_local.api.errors` has their shapes."""

from __future__ import annotations

import re

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rest_local.api.errors import ApiError, at_field, headers_of, shape_of
from rest_local.errors import RestLocalError

_OFFLINE = re.compile(r"(/v1)?/(batches|files)(/|$)")


def response_of(error: ApiError, path: str = "") -> Response:
    """The HTTP response to a call of `path`."""
    return Response(to_json(shape_of(path)(error)), error.status, error.headers | headers_of(path), "application/json")


def answer_to(request: Request, error: RestLocalError) -> ApiError:
    """The error response to a request, or the last event of its stream. `param` is the field that is wrong."""
    return at_field(error, request.url.path, is_local=request.app.state.server.settings.is_local)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Handles ApiError."""
    assert isinstance(error, ApiError)
    return response_of(error, request.url.path)


async def on_own_error(request: Request, error: Exception) -> Response:
    """Handles RestLocalError."""
    assert isinstance(error, RestLocalError)
    return response_of(answer_to(request, error), request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handles errors of the router: unknown route, unknown method."""
    assert isinstance(error, HTTPException)
    messages = {404: "no such route", 405: "this route does not support the method"}
    message = messages.get(error.status_code, str(error.detail))
    if error.status_code == 404 and _OFFLINE.match(request.url.path):
        error, message = HTTPException(501), "batches are answered without a server: rest-local batch INPUT -o OUTPUT"
    return response_of(ApiError(error.status_code, message, headers=error.headers), request.url.path)


async def on_any_error(request: Request, error: Exception) -> Response:
    """Handles every other exception: a fault of the server. The response shows nothing of it, the log does."""
    return response_of(ApiError(500, "the server failed at this request; see its log"), request.url.path)
