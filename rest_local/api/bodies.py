"""Types of the request bodies: OpenAI's, with llama-server's additions.

- Types are strict: a string is not a number.
- Unknown fields are ignored, because clients send many (`user`, `store`, `cache_control`, `id_slot`). Within
  `rest_local` they are refused.
- null means absent.
- Checking a list stops at its first wrong element. Collecting all errors of 350 000 elements took a minute and a
  gigabyte.
- Content parts and tools are plain JSON here; `rest_local.chat` checks them.

`requests` decides what a value means.

`check` refuses hostile JSON before any other code sees it. The security middleware limits the size, the parser the
depth (200 levels). The number of arrays and objects is limited here, because an empty one takes 2 bytes of text and 60
of memory.
"""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from rest_local.api.errors import ApiError

MAX_CHOICES = 16
MAX_STOPS = 16_384  # `StopFinder` hardly gets slower with their number
MAX_PROMPTS = 256
Milliseconds = Annotated[float, Field(le=1e9)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_BIASES = 100_000
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]


def _few(value: Any) -> Any:
    """Limit the number of entries first, because checking an object does not stop at the first wrong entry."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"more than {MAX_BIASES} entries")
    return value


Biases = Annotated[dict[str, float], BeforeValidator(_few)]
Pair = Annotated[list[TokenId | str | bool | float], Field(min_length=2, max_length=2)]
Stop = Annotated[str, Field(max_length=4096)]


class Body(BaseModel):
    """The base class of all bodies, with strict types and finite numbers. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


JsonObject = dict[str, Any]
Content = str | Many[JsonObject] | None  # text or parts, see `rest_local.chat.conversation.content_text`
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "refusal")


class Message(BaseModel):
    """One message. Further fields (`tool_calls`, `name`, `reasoning_content` ...) reach the template unchanged.

    Only an assistant's message may lack content: if it calls tools, or was cut off or refused before it had any.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: Content = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        others = (self.model_extra or {}) if self.role in ("assistant", "model") else {}
        if self.content is None and not any(others.get(name) for name in _IN_PLACE_OF_CONTENT):
            role = self.role if self.role.isidentifier() and len(self.role) < 20 else "other"
            more = ", or tool_calls" if role == "assistant" else ""
            told = {"field": "content", "role": role, "more": more}
            raise PydanticCustomError("missing", "a message of the role {role} needs content{more}", told)
        return self


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"] = "content"
    content: str | Many[JsonObject]


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    """The value of `response_format.json_schema`."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response format, or llama-server's `{"type": "json_object", "schema": {...}}`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class LarkGrammar(Body):
    """A grammar in llguidance's dialect of Lark. A plain string would be GBNF."""

    type: Literal["lark"]
    value: str


class Extension(Body):
    """The object `rest_local`, with the fields that only this server has.

    `origins` sends the source of each token.
    """

    origins: bool | None = None
    policy: str | None = None
    verify: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        given = [name for name, field in value.items() if field is not None] if isinstance(value, dict) else []
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            told = {"name": repr(unknown[:40]), "known": ", ".join(cls.model_fields)}
            raise PydanticCustomError("unknown_field", "unknown field {name}; there are {known}", told)
        return value


class GenerationBody(Body):
    """The fields of every call that generates, under OpenAI's names or llama-server's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=-2)] | None = None
    n_predict: Annotated[int, Field(ge=-2)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Many[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    min_keep: int | None = None
    logit_bias: Biases | Many[Pair] | None = None
    samplers: str | Many[str] | None = None
    grammar: str | LarkGrammar | None = None
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    cache_prompt: bool | None = None
    t_max_predict_ms: Milliseconds | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    prediction: Prediction | None = None
    datastore: str | Many[str] | None = None
    prompt_cache_key: str | None = None
    rest_local: Extension | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate_repetition_penalty(cls, value: Any) -> Any:
        """Translate vLLM's penalty, which counts the whole text."""
        if not isinstance(value, dict) or value.get("repetition_penalty") is None:
            return value
        return {"repeat_penalty": value["repetition_penalty"], "repeat_last_n": -1, **value}


class NamedFunction(Body):
    """A function that must be called."""

    name: str


class NamedTool(Body):
    """The object form of `tool_choice`."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(Body):
    """The tools that may be called, or one of which must be called."""

    mode: Literal["auto", "required"]
    tools: Many[NamedTool]


class AllowedTools(Body):
    """A `tool_choice` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=-2)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[JsonObject] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


PromptField = str | Many[TokenId | str | Many[TokenId | str]]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | bool | None = None


class EmbeddingBody(Body):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class NativeBody(GenerationBody):
    """The body of POST /completion."""

    prompt: PromptField
    n_probs: Annotated[int, Field(ge=0, le=100)] | None = None
    n_indent: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    response_fields: Annotated[Many[str], Field(max_length=256)] | None = None
    return_tokens: bool | None = None


class Extra(Body):
    """An excerpt from another file."""

    text: str
    filename: str | None = None


class InfillBody(NativeBody):
    """The body of POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[Many[Extra], Field(max_length=4096)] | None = None
    prompt: str = ""


class TokenizeBody(Body):
    """The body of POST /tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    tokens: Many[TokenId]


MAX_CONTAINERS = 500_000
Checked = TypeVar("Checked", bound=BaseModel)


def check(data: bytes, kind: type[Checked]) -> Checked:
    """Parse and validate JSON bytes. Raises ApiError 400."""
    value = load(data)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        if issubclass(kind, GenerationBody):
            _refuse_unsupported(value)
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


# Fields of other servers that would change an answer but have no counterpart here, with the values that are harmless.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1,), "top_a": (0,), "allowed_token_ids": ([],), "bad_words": ([],), "logits_processors": ([],),
    "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1,), "structured_outputs": ({},),
    "guided_json": ("",), "guided_regex": ("",), "guided_choice": ([],), "guided_grammar": ("",),
}  # fmt: skip


def _refuse_unsupported(value: JsonObject) -> None:
    for name, neutral in UNSUPPORTED.items():
        if value.get(name) is not None and value[name] not in neutral:
            message = f"{name}: there is no such sampling or constraint here"
            raise ApiError(400, message, code="unsupported", param=name)


def load(data: bytes) -> Any:
    """Parse a JSON value. Raises ApiError 400 for invalid JSON, NaN, numbers beyond a double, lone surrogates.

    PowerShell and .NET write a byte order mark in front, which a parser may ignore (RFC 8259).
    """
    data = data.removeprefix(BOM_UTF8)
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
    """Return True if all numbers are finite. The parser reads 1e400 as infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list) or all(map(_finite, value))


def _explain(error: ValidationError) -> ApiError:
    """Describe the first error and its place. The value is not repeated, because it may be a prompt."""
    first = error.errors(include_url=False, include_input=False)[0]
    # The place also contains names of a union's members (`str`, `list[...]`), which a client does not know.
    parts = [*first["loc"], *filter(None, [first.get("ctx", {}).get("field")])]
    where = ""
    for part in parts:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"):
            where += f".{part}" if where else part
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, code="invalid_type", param=re.split(r"[.\[]", where)[0] or None)
