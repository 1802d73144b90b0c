"""Types of the request bodies of Anthropic's Messages API.

As in `rest_local.server.bodies`: types are strict, unknown fields are ignored (`cache_control`, `context_management`,
`service_tier` and others that say nothing to a model on this machine), null means absent. Content blocks and tools are
plain JSON here; `conversation` and `tools` check them, because an error has to name the place of a block.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rest_local.server.bodies import MAX_STOPS, Body, Extension, JsonObject, Many, Stop


class Turn(Body):
    """One message. `system` is allowed after the first message, as in Anthropic's API of 2026."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[JsonObject]


class ToolChoice(Body):
    """Whether the model may or must call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons first. How much (`budget_tokens`) is left to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Body):
    """A JSON schema that the answer keeps."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Effort and format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """Of the request."""

    user_id: str | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[JsonObject] | None = None
    tools: Many[JsonObject] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: JsonObject | None = None


class MessagesBody(CountBody):
    """POST /v1/messages. `datastore` and `rest_local`: as in the other calls of this server."""

    max_tokens: Annotated[int, Field(ge=0)]
    stream: bool | None = None
    stop_sequences: Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    mcp_servers: Many[JsonObject] | None = None
    datastore: str | Many[str] | None = None
    rest_local: Extension | None = None
