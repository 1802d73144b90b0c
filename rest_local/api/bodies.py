"""Types of the request bodies: OpenAI's, with llama-server's additions.

- Types are strict: a string is not a number.
- Unknown fields are ignored, because clients send many (`user`, `store`, `cache_control`, `id_slot`). The log names
  those that no API has (`warn_of_unknown`). Within `rest_local` unknown fields are refused.
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

import json
import logging
import math
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from rest_local.api.errors import ApiError

MAX_CHOICES = 16
MAX_STOPS = 16_384  # `StopFinder` hardly gets slower with their number
MAX_PROMPTS = 256
MAX_DOCUMENTS = 1024
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

    `origins` sends the source of each token. With `t_max_prompt_ms` the answer is empty if its prompt takes longer.
    llama-server ignores that name outside of this object, and llama.vim, which sends it, would keep the empty answer.
    """

    origins: bool | None = None
    policy: str | None = None
    verify: str | None = None
    context_shift: bool | None = None
    t_max_prompt_ms: Milliseconds | None = None

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
    n_keep: int | None = None
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
    def _translate_vllm(cls, value: Any) -> Any:
        return _from_vllm(dict(value)) if isinstance(value, dict) else value


def _from_vllm(value: JsonObject) -> JsonObject:
    """Translate vLLM's `repetition_penalty`, `guided_*` and `structured_outputs` into this server's fields.

    vLLM's penalty counts the whole text.
    """
    if (penalty := value.pop("repetition_penalty", None)) is not None:
        value = {"repeat_penalty": penalty, "repeat_last_n": -1, **value}
    wanted = value.pop("structured_outputs", None)
    guided = dict(wanted) if isinstance(wanted, dict) else {}
    for kind in ("json", "regex", "choice", "grammar"):
        if (given := value.pop(f"guided_{kind}", None)) is not None:
            guided[kind] = given
    guided = {kind: given for kind, given in guided.items() if given not in (None, False, "", [])}
    if not guided:
        return value
    kind, given = next(iter(guided.items()))
    if len(guided) > 1 or any(value.get(name) for name in ("grammar", "json_schema")):
        raise PydanticCustomError("conflict", "give one grammar, schema, regular expression or choice")
    if kind == "json":
        return value | {"json_schema": from_json(given) if isinstance(given, str) else given}
    if kind == "json_object":
        return value | {"response_format": {"type": "json_object"}}
    if kind == "grammar" and isinstance(given, str):
        return value | {"grammar": given if "::=" in given else {"type": "lark", "value": given}}
    if kind == "regex" and isinstance(given, str):
        pattern = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], given.replace("\n", "\\n"))
        return value | {"grammar": {"type": "lark", "value": f"start: /{pattern}/"}}
    if kind == "choice" and isinstance(given, list) and all(isinstance(text, str) for text in given):
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in given)
        return value | {"grammar": {"type": "lark", "value": f"start: {texts}"}}
    raise PydanticCustomError("unsupported", "structured_outputs.{kind} is not supported", {"kind": kind[:40]})


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


def _prompt_string(value: Any) -> Any:
    """Unwrap llama-server's `{"prompt_string": "..."}` and `{"content": [{"type": "text", ...}]}`.

    Other objects stay as they are, and are refused later.
    """
    if isinstance(value, list):
        return [_prompt_string(each) if isinstance(each, dict) else each for each in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("prompt_string"), str) and not value.get("multimodal_data"):
        return value["prompt_string"]
    parts = value.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        texts = [part.get("text") for part in parts]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else value
    return value


PromptField = Annotated[str | Many[TokenId | str | Many[TokenId | str]], BeforeValidator(_prompt_string)]


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


class DocumentText(Body):
    """A document as an object, as Cohere and Jina take it."""

    text: str


Document = str | DocumentText
Documents = Annotated[Many[Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankBody(Body):
    """The body of POST /v1/rerank. TEI's names `texts` and `return_text` are answered in TEI's shape."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None

    @model_validator(mode="after")
    def _check_documents(self) -> RerankBody:
        if self.documents is None and self.texts is None:
            raise ValueError("documents: give at least one")
        return self


class NativeBody(GenerationBody):
    """The body of POST /completion."""

    prompt: PromptField
    n_probs: Annotated[int, Field(ge=0, le=100)] | None = None
    post_sampling_probs: bool | None = None
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
        checked = kind.model_validate(value)
        if issubclass(kind, Body):
            known = {*kind.model_fields, *(field.alias or "" for field in kind.model_fields.values())}
            warn_of_unknown(value, known, Extension.model_fields if "rest_local" in known else ())
        return checked
    except ValidationError as error:
        raise _explain(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


# Fields of other servers that would change an answer but have no counterpart here, with the values that are harmless.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1,), "top_a": (0,), "allowed_token_ids": ([],), "bad_words": ([],), "logits_processors": ([],),
    "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1,), "guided_whitespace_pattern": ("",),
}  # fmt: skip


def _refuse_unsupported(value: JsonObject) -> None:
    for name, neutral in UNSUPPORTED.items():
        if value.get(name) is not None and value[name] not in neutral:
            raise ApiError(400, f"{name}: this server has no such sampling", code="unsupported", param=name)


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


log = logging.getLogger("rest_local.server")
MAX_WARNINGS = 100  # a client can send any number of names, so warnings are limited per process
_NAME = re.compile(r"[A-Za-z][\w.-]{0,39}")
# Fields of OpenAI, llama-server, Anthropic, Ollama, then of vLLM, OpenRouter and others. A client of several servers
# sends all of its fields to each, so those without a meaning here are not worth a warning.
_IGNORED = """
    audio background best_of client_metadata context_management conversation dimensions echo encoding_format
    frequency_penalty function_call functions include input instructions logit_bias logprobs max_completion_tokens
    max_output_tokens max_tool_calls metadata modalities moderation n parallel_tool_calls previous_response_id
    prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning reasoning_effort response_format
    safety_identifier service_tier store stream_options text tool_choice tools top_logprobs truncation user
    verbosity web_search_options
    adaptive_decay adaptive_target add_special backend_sampling cache_prompt chat_format continue_final_message
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_range embd_normalize generation_prompt grammar_lazy grammar_triggers grammar_type id_slot image_data
    input_extra input_prefix input_suffix lora min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl
    n_discard n_indent n_probs parse_tool_calls penalize_nl penalty_prompt post_sampling_probs preserved_tokens
    reasoning_budget_message reasoning_budget_tokens reasoning_control reasoning_format reasoning_in_content
    response_fields return_progress return_tokens slot_id sse_ping_interval system_prompt t_max_prompt_ms tfs_z
    thinking_budget_tokens thinking_forced_open timings_per_token top_n_sigma typical_p with_pieces xtc_probability
    xtc_threshold
    anthropic_beta anthropic_version betas cache_control container diagnostics inference_geo mcp_servers
    output_config output_format speed stop_sequences system thinking thread
    context format images keep_alive name options raw shift suffix template think truncate
    add_generation_prompt allowed_token_ids bad_words chat_id chat_template chat_template_kwargs documents
    early_stopping enable_thinking extra_body features files filter_options guided_choice guided_grammar guided_json
    guided_regex id include_reasoning include_stop_str_in_output length_penalty logits_processors
    mm_processor_kwargs min_tokens models num_ctx plugins priority prompt_logprobs provider repetition_penalty
    request_id route session_id skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs
    template_kwargs tool_ids top_a transforms truncate_prompt_tokens usage use_beam_search variables
"""
IGNORED = frozenset(_IGNORED.split())
_warned: set[str] = set()


def warn_of_unknown(given: Iterable[str], known: Collection[str], own: Collection[str]) -> None:
    """Log a warning, once in this process, for each field that no API has: most likely it is misspelt.

    Only names are logged, never values, which may be prompts. `known` are the fields of the call, `own` those within
    `rest_local`.
    """
    for name in given:
        if (
            name in known
            or name in IGNORED
            or name in _warned
            or len(_warned) >= MAX_WARNINGS
            or not _NAME.fullmatch(name)
        ):
            continue
        _warned.add(name)
        near = get_close_matches(name, [*known, *own], 1)
        place = "rest_local." if near and near[0] not in known else ""
        meant = f"; did you mean {place}{near[0]}?" if near else ""
        log.warning("field %s of a request is unknown and does nothing%s", name, meant)
