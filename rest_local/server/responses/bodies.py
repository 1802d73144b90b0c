"""The body of POST /v1/responses. Items and tools are plain JSON here; `items` and `tools` check them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rest_local.server.bodies import Body, GenerationBody, JsonObject, Many
from rest_local.server.errors import ApiError

MAX_ITEMS = 20_000
MAX_TOOLS = 2_000


class TextFormat(Body):
    """The value of `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """The value of `text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    """The value of `reasoning`."""

    effort: str | None = None
    summary: str | None = None


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[Many[JsonObject], Field(max_length=MAX_TOOLS)]


class ChosenTool(Body):
    """One tool that must be called. Types other than `function` and `custom` are refused later, by name."""

    type: str
    name: str | None = None
    namespace: str | None = None


ToolChoice = Literal["none", "auto", "required"] | AllowedTools | ChosenTool
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class ResponseBody(GenerationBody):
    """POST /v1/responses. The fields of the other calls that generate have their meaning here, too."""

    input: str | Annotated[Many[JsonObject], Field(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    tools: Annotated[Many[JsonObject], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[Many[str], Field(max_length=100)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    service_tier: str | None = None
    background: bool | None = None
    conversation: str | JsonObject | None = None
    prompt: JsonObject | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def includes_reasoning(self) -> bool:
        """Whether the client wants reasoning in a form that it can send back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer reports log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        """Raises ApiError 400 for what this server does not have."""
        refused = {
            "background": (self.background, "answers are not made in the background here"),
            "conversation": (self.conversation, "conversations are not kept here; use previous_response_id"),
            "prompt": (self.prompt, "prompts are not kept here; send instructions and input"),
        }
        for name, (value, reason) in refused.items():
            if value:
                raise ApiError(400, f"{name}: {reason}", code="unsupported_parameter", param=name)
        if not self.input and self.input != "" and not self.previous_response_id:
            text = "input: give text or a list of items, at least one, or previous_response_id"
            raise ApiError(400, text, code="missing_required_parameter", param="input")
        wanted = self.text.format if self.text else None
        if wanted is not None and wanted.type == "json_schema" and wanted.schema_ is None:
            raise ApiError(400, "text.format.schema: a json_schema needs one", param="text.format.schema")
