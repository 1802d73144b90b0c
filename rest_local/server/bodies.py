"""Types of the request bodies: OpenAI's, with llama-server's additions.

- Types are strict: a string is not a number.
- Unknown fields are ignored, because clients send many (`user`, `store`, `cache_control`, `id_slot`).
- null means absent.
- Checking a list stops at its first wrong element: the errors of a list of 350 000 took a minute and a gigabyte.
- Content parts and tools are plain JSON here; `rest_local.chat` checks them.

What a value means is decided in `requests` and `prompts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 16
MAX_STOPS = 16_384  # the cost of a search hardly depends on their number (`StopFinder`)
MAX_PROMPTS = 256

Milliseconds = Annotated[float, Field(le=1e9)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_BIASES = 100_000
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]


def _few(value: Any) -> Any:
    """Checked before the elements, because checking an object does not stop at the first wrong one."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"more than {MAX_BIASES} entries")
    return value


Biases = Annotated[dict[str, float], BeforeValidator(_few)]
Pair = Annotated[list[TokenId | str | bool | float], Field(min_length=2, max_length=2)]
Stop = Annotated[str, Field(max_length=4096)]


class Body(BaseModel):
    """Base class: strict types, finite numbers, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


JsonObject = dict[str, Any]
Content = str | Many[JsonObject] | None
"""Text, or parts, which `rest_local.chat.conversation.content_text` reads."""


class Message(BaseModel):
    """One message. Further fields (`tool_calls`, `name`, `reasoning_content` ...) reach the template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: Content = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role == "user" and self.content is None:
            raise ValueError("a message of the user needs content")
        return self


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"] = "content"
    content: str | Many[JsonObject]


class StreamOptions(Body):
    """What the end of a stream contains."""

    include_usage: bool | None = None


class JsonSchema(Body):
    """The value of `response_format.json_schema`."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's types, and llama-server's `{"type": "json_object", "schema": {...}}`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class LarkGrammar(Body):
    """A grammar in llguidance's dialect of Lark; a plain string is GBNF."""

    type: Literal["lark"]
    value: str


class Extension(Body):
    """The object `rest_local`: fields that only this server has.

    `origins`: send the source of each token. `t_max_prompt_ms`: the answer is empty if its prompt takes longer.
    llama-server ignores that name outside of this object, and llama.vim, which sends it, would keep the empty answer.
    """

    origins: bool | None = None
    policy: str | None = None
    verify: str | None = None
    exact: bool | None = None
    context_shift: bool | None = None
    t_max_prompt_ms: Milliseconds | None = None


class GenerationBody(Body):
    """Fields of every call that generates, under OpenAI's names or llama-server's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=-2)] | None = None
    n_predict: Annotated[int, Field(ge=-2)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
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
    prediction: Prediction | None = None
    datastore: str | Many[str] | None = None
    rest_local: Extension | None = None


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """`tool_choice` as an object."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=-2)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[JsonObject] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


PromptField = str | Many[str] | Many[TokenId] | Many[Many[TokenId]]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | bool | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class NativeBody(GenerationBody):
    """POST /completion."""

    prompt: str | Many[TokenId | str | Many[TokenId | str]]
    n_probs: Annotated[int, Field(ge=0, le=100)] | None = None
    n_indent: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    response_fields: Annotated[Many[str], Field(max_length=256)] | None = None
    return_tokens: bool | None = None


class Extra(Body):
    """A part of another file."""

    text: str
    filename: str | None = None


class InfillBody(NativeBody):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[Many[Extra], Field(max_length=4096)] | None = None
    prompt: str = ""


class TokenizeBody(Body):
    """POST /tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Many[TokenId]


class TemplateBody(Body):
    """POST /apply-template."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    tools: Many[JsonObject] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class SearchBody(Body):
    """POST /datastores/{name}/search."""

    text: Annotated[str, Field(min_length=1)]
    limit: Annotated[int, Field(ge=1, le=100)] | None = None


class DocumentBody(Body):
    """POST /datastores/{name}/documents."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    text: Annotated[str, Field(min_length=1)]
    allow_secrets: bool | None = None
