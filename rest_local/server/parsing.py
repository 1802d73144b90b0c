"""From bytes to a checked body: hostile JSON is refused here, before anything looks at it.

Bounded: the size by the security middleware, the depth by the parser (200), the number of arrays and objects here,
since an empty one is 2 bytes of text and 60 of memory.
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
        raise ApiError(408, "the body did not come in time", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away before its request was complete") from error
    return check(data, kind) if len(data) < 1 << 14 else await anyio.to_thread.run_sync(check, data, kind)


def check(data: bytes, kind: type[Checked]) -> Checked:
    """The body that JSON bytes hold. Raises ApiError 400."""
    value = load(data)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from error


def load(data: bytes) -> Any:
    """A JSON value. Raises ApiError 400 for what is not JSON, holds NaN, a number beyond a double, a lone surrogate."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} arrays and objects", code="invalid_json")
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not _finite(value):
        raise ApiError(400, "the body holds a number that is too large", code="invalid_json")
    return value


def _finite(value: Any) -> bool:
    """The parser reads 1e400 as infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list) or all(map(_finite, value))


def _is_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool")


def _explain(error: ValidationError) -> ApiError:
    """The first complaint, with where it is. The value itself is not repeated: it may be a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # The names of a union's members are in the place too (`str`, `Part`, `list[...]`); a client knows fields only.
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _is_field(part))
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, code="invalid_type", param=where.partition(".")[0] or None)
