"""Reads fields of plain JSON objects. Errors name the place as the client knows it, for example `input[3].type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_local.server.errors import ApiError


def bad(place: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """A refusal: 400, with the place as `param`."""
    return ApiError(400, f"{place}: {message}", code=code, param=place)


def given(value: Any, place: str) -> dict[str, Any]:
    """An object's fields; null means absent. Raises ApiError 400 for what is no object."""
    if not isinstance(value, Mapping):
        raise bad(place, "give an object")
    return {name: field for name, field in value.items() if field is not None}


def text_of(fields: Mapping[str, Any], name: str, place: str) -> str:
    """A field that is text and not empty. Raises ApiError 400."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"{place}.{name}", "give text")
    return value
