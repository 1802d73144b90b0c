"""What goes wrong, as HTTP: one exception for the routes to raise, and the mapping of the program's own errors.

Every answer that is not a success has OpenAI's shape: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rest_local.errors import (
    CorpusEmpty,
    DatastoreError,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreVersion,
    DatastoreVocabulary,
    GenerationError,
    OptionError,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    RestLocalError,
    ServiceClosed,
    TemplateFailed,
)

RETRY_SECONDS = "1"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer that is not a success. `extra`: further fields of the error object, or others than usual."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers, self.extra = dict(headers or {}), dict(extra or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, fallback)
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields | self.extra}

    def response(self) -> Response:
        """The answer."""
        return Response(to_json(self.body), self.status, self.headers, "application/json")


def loading() -> ApiError:
    """What every call that needs the model gets until it is there."""
    return ApiError(503, "Loading model", code="loading", headers={"retry-after": RETRY_SECONDS})


def from_error(error: RestLocalError) -> ApiError:
    """The program's own errors as an answer."""
    text = str(error)
    if isinstance(error, PromptTooLong):
        like_llama = {"type": "exceed_context_size_error", "n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        return ApiError(400, text, code="context_length_exceeded", param="messages", extra=like_llama)
    if isinstance(error, (QueueFull, ServiceClosed)):
        return ApiError(503, text, code="busy", headers={"retry-after": RETRY_SECONDS})
    if isinstance(error, (OptionError, PromptEmpty, TemplateFailed, CorpusEmpty)):
        return ApiError(400, text, code="invalid_value")
    if isinstance(error, DatastoreNotFound):
        return ApiError(404, text, code="datastore_not_found")
    if isinstance(error, (DatastoreLocked, DatastoreVersion, DatastoreVocabulary)):
        return ApiError(409, text, code="datastore_conflict")
    if isinstance(error, (DatastoreError, GenerationError)):
        return ApiError(500, text, code="failed")
    return ApiError(500, text)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Handler of ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_own_error(request: Request, error: Exception) -> Response:
    """Handler of RestLocalError."""
    assert isinstance(error, RestLocalError)
    return from_error(error).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of what the router raises: no such route, no such method."""
    assert isinstance(error, HTTPException)
    messages = {404: "no such route", 405: "this route does not know the method"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def on_any_error(request: Request, error: Exception) -> Response:
    """Handler of everything else, which is a fault of the server: nothing of it is shown, the log has it."""
    return ApiError(500, "the server failed at this request; its log says how").response()
