"""Types of Ollama's request bodies.

As in `server.bodies`, with two differences that its clients need: a whole number may be written as 40.0, and a model
may be called `name` instead of `model`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from rest_local.server.bodies import MAX_PROMPTS, MAX_STOPS, Body, Extension, JsonObject, Many, Stop, TokenId

MAX_IMAGES = 64


def _whole(value: Any) -> Any:
    """An integer that JavaScript or Lua wrote as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Image = Annotated[str, Field(min_length=1)]
Images = Annotated[Many[Image], Field(max_length=MAX_IMAGES)]
Think = bool | Literal["low", "medium", "high", "max", ""]
KeepAlive = str | float
Format = dict[str, Any] | Literal["", "json"]


class Options(Body):
    """How an answer is generated. What has no meaning here is kept in `model_extra`, so that the answer can say so."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    num_predict: Annotated[Whole, Field(ge=-2)] | None = None
    num_keep: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class NamedBody(Body):
    """A body that names a model."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        """The model that the client named."""
        return self.model or self.name


class AnswerBody(NamedBody):
    """What the two calls that generate share. `stream`: true where it is missing. The last three fields are this
    server's own.
    """

    options: Options = Field(default_factory=Options)
    format: Format | None = None
    stream: bool = True
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    datastore: str | Many[str] | None = None
    prompt_cache_key: str | None = None
    rest_local: Extension | None = None


class CalledFunction(Body):
    """A call that the model made earlier."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class Called(Body):
    """An entry of `tool_calls`."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    """One message of a chat."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Many[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(AnswerBody):
    """POST /api/chat. Without messages the model is loaded and nothing is generated."""

    messages: Many[OllamaMessage] = Field(default_factory=list)
    tools: Many[JsonObject] | None = None


class GenerateBody(AnswerBody):
    """POST /api/generate. Without a prompt the model is loaded and nothing is generated.

    `context`: the tokens of an earlier conversation, as its last answer gave them.
    """

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: Images | None = None
    context: Many[TokenId] | None = None


class EmbedBody(NamedBody):
    """POST /api/embed."""

    input: str | Annotated[Many[str], Field(max_length=MAX_PROMPTS)]
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    options: JsonObject | None = None
    keep_alive: KeepAlive | None = None


class OldEmbedBody(NamedBody):
    """POST /api/embeddings, which came before /api/embed."""

    prompt: str = ""
    options: JsonObject | None = None
    keep_alive: KeepAlive | None = None


class ShowBody(NamedBody):
    """POST /api/show."""

    @model_validator(mode="after")
    def _check_name(self) -> ShowBody:
        if not self.asked:
            raise ValueError("name the model")
        return self
