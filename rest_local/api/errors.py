"""Error responses in the shapes of the protocols. Of HTTP, only status codes are known here.

An error has the shape of the protocol that its path belongs to (`shape_of`):

- OpenAI's, `{"error": {"message", "type", "param", "code"}}`, unless the path says otherwise
- Anthropic's under /v1/messages, `{"type": "error", "error": {"type", "message"}}`
- Ollama's under /api/, `{"error": "message"}`
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rest_local.errors import (
    CannotGenerate,
    CorpusEmpty,
    DatastoreError,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreVersion,
    DatastoreVocabulary,
    GenerationError,
    GrammarsBusy,
    OptionError,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    RestLocalError,
    ServiceClosed,
    TemplateFailed,
    Unexpected,
    in_options,
)

log = logging.getLogger("rest_local.server")
RETRY_SECONDS = "1"
_FIELD = re.compile(r"([a-z_]+)[\[.:]")  # an OptionError begins with the option: `tools[0].type: give ...`
_INPUT = ("/embeddings", "/responses")  # these calls name the prompt `input`
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error response. The fields in `extra` are added to the error object, or replace its own."""

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
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, fallback)
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields | self.extra}


Shape = Callable[[ApiError], dict[str, Any]]


def openai_shape(error: ApiError) -> dict[str, Any]:
    return error.body


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's object, with OpenAI's `param` and `code` added if they say more.

    Agents recognize a prompt that is too long by the words and the two numbers of Anthropic's message, and shorten it.
    """
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == "context_length_exceeded" and "n_prompt_tokens" in error.extra:
        message = (
            f"prompt is too long: {error.extra['n_prompt_tokens']} tokens > {error.extra['n_ctx']} maximum; "
            "shorten it, or start the server with a larger --ctx"
        )
    fields = {"type": _ANTHROPIC_TYPES.get(error.status, fallback), "message": message}
    more = {"param": error.param, "code": error.code} | error.extra | fields
    return {"type": "error", "error": {name: value for name, value in more.items() if value is not None}}


def ollama_shape(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def responses_error(error: ApiError) -> dict[str, Any]:
    """Return the event `error` of OpenAI's Responses API. Most clients read the object in it, not its fields."""
    fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return fields | error.body


def shape_of(path: str) -> Shape:
    """Return the shape of errors for the URL's path."""
    if path.startswith("/v1/messages"):
        return anthropic_shape
    return ollama_shape if path.startswith("/api/") else openai_shape


def headers_of(path: str) -> dict[str, str]:
    """Return headers for every response to a path, including errors: Anthropic's clients report the request id."""
    return {"request-id": f"req_{secrets.token_hex(12)}"} if shape_of(path) is anthropic_shape else {}


def loading() -> ApiError:
    """Return the error for calls that need the model while it loads."""
    return ApiError(503, "Loading model", code="loading", headers={"retry-after": RETRY_SECONDS})


def wrong(place: str, message: str, *, code: str = "invalid_value", param: str | None = None) -> ApiError:
    """Return a 400 error for a `place` in the client's body (`input[3].type`), which is also the default of `param`."""
    return ApiError(400, f"{place}: {message}", code=code, param=param or place)


def no_such_model() -> ApiError:
    """Return the error for a name that means no model."""
    message = "no such model; GET /v1/models lists the names, and with --alias '*' any name will do"
    return ApiError(404, message, code="model_not_found", param="model")


_WITHOUT_PATHS = {
    404: "no such datastore; GET /datastores lists them",
    409: "the datastore is being written, or is of another format or vocabulary; see the server's log",
    500: "the datastore cannot be read or written; see the server's log",
}
_FAILED = "the request failed; see the server's log"


def from_error(error: RestLocalError, *, is_local: bool) -> ApiError:
    """Translate one of the package's errors. Other machines get no message that may contain a path."""
    answer = _answer(error)
    names_none = isinstance(error, (OptionError, GenerationError, CorpusEmpty)) and not isinstance(error, Unexpected)
    if is_local or names_none:
        return answer
    log.warning("%s", error)
    text = _WITHOUT_PATHS[answer.status] if isinstance(error, DatastoreError) else _FAILED
    return ApiError(answer.status, text, code=answer.code)


_STATUS = (  # the first match counts
    (CannotGenerate, 501, "no_generation"),
    ((QueueFull, GrammarsBusy, ServiceClosed), 503, "busy"),
    ((OptionError, PromptEmpty, TemplateFailed, CorpusEmpty), 400, "invalid_value"),
    (DatastoreNotFound, 404, "datastore_not_found"),
    ((DatastoreLocked, DatastoreVersion, DatastoreVocabulary), 409, "datastore_conflict"),
    ((DatastoreError, GenerationError), 500, "failed"),
)


def _answer(error: RestLocalError) -> ApiError:
    text = in_options(str(error))
    if isinstance(error, PromptTooLong):
        like_llama = {"type": "exceed_context_size_error", "n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        # Clients look for llama-server's words: `too large`, and `exceeds the available context size`.
        text = (
            f"the text is too large: it has {'about ' * error.estimated}{error.n_prompt} tokens, which exceeds the "
            f"available context size ({error.n_ctx} tokens); shorten it, or start the server with a larger --ctx"
        )
        return ApiError(400, text, code="context_length_exceeded", param="prompt", extra=like_llama)
    found = ((status, code) for kinds, status, code in _STATUS if isinstance(error, kinds))
    status, code = next(found, (500, None))
    return ApiError(status, text, code=code, headers={"retry-after": RETRY_SECONDS} if status == 503 else None)


def at_field(error: RestLocalError, path: str, *, is_local: bool) -> ApiError:
    """Translate an error as `from_error` does, with `param` set to the field of the call that is wrong."""
    answer = from_error(error, is_local=is_local)
    if isinstance(error, PromptTooLong):
        of_chat = "/chat/" in path or shape_of(path) is anthropic_shape
        answer.param = "messages" if of_chat else "input" if path.endswith(_INPUT) else "prompt"
    elif isinstance(error, OptionError) and (field := _FIELD.match(str(error))):
        answer.param = field[1]
    return answer


def given(value: Any, place: str) -> dict[str, Any]:
    """Return an object's fields without those that are null. Raises ApiError 400 if the value is no object."""
    if not isinstance(value, Mapping):
        raise wrong(place, "give an object")
    return {name: field for name, field in value.items() if field is not None}


def text_of(fields: Mapping[str, Any], name: str, place: str) -> str:
    """Return a field that must be non-empty text. Raises ApiError 400."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{place}.{name}", "give text")
    return value
