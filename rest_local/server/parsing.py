"""Parses and checks bodies. Hostile JSON is refused here, before any other code sees it.

The security middleware limits the size, the parser the depth (200 levels). The number of arrays and objects is limited
here, because an empty one takes 2 bytes of text and 60 of memory.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from rest_local.server.errors import ApiError

MAX_CONTAINERS = 500_000
SLOW_BODY_SECONDS = 60.0

Checked = TypeVar("Checked", bound=BaseModel)


async def parse(request: Request, kind: type[Checked]) -> Checked:
    """The body of a request. Raises ApiError 400, 408 (the client stopped sending), 413."""
    try:
        with anyio.fail_after(SLOW_BODY_SECONDS):
            data = await request.body()
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before its request was complete") from error
    return check(data, kind) if len(data) < 1 << 14 else await anyio.to_thread.run_sync(check, data, kind)


def check(data: bytes, kind: type[Checked]) -> Checked:
    """The body in JSON bytes. Raises ApiError 400."""
    return checked(load(data), kind)


def checked(value: Any, kind: type[Checked]) -> Checked:
    """A JSON value as a body. Raises ApiError 400."""
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def load(data: bytes) -> Any:
    """A JSON value. Raises ApiError 400 for invalid JSON, NaN, numbers beyond a double, lone surrogates."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"the body contains more than {MAX_CONTAINERS} arrays and objects", code="invalid_json")
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not _finite(value):
        raise ApiError(400, "the body contains a number that is too large", code="invalid_json")
    return value


def _finite(value: Any) -> bool:
    """Whether all numbers are finite: the parser reads 1e400 as infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list) or all(map(_finite, value))


def _is_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool")


def _explain(error: ValidationError) -> ApiError:
    """The first error with its place. The value is not repeated, because it may be a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # The place also contains names of a union's members (`str`, `list[...]`), which a client does not know.
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _is_field(part))
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, code="invalid_type", param=where.partition(".")[0] or None)
