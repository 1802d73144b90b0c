"""OpenAI's Responses API: the body, and its items as messages of a chat.

A turn of the assistant (reasoning, text, calls) is several items here and one message there. `places` records the
source of each message, so that an error about a message can name the item.

Reasoning reaches the template as `reasoning_content`. It is read from the item's `content`, else from what this server
has put into `encrypted_content` (the same text, for clients that send back nothing else), else from `summary`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from rest_local.api.answers import new_id
from rest_local.api.bodies import Body, ChatBody, GenerationBody, JsonObject, Many
from rest_local.api.errors import ApiError, given, text_of, wrong
from rest_local.api.response_tools import MAX_TOOLS, SEARCH, Toolbox, ToolChoice, found_tools, known_name
from rest_local.errors import OptionError
from rest_local.llama.options import Sampling

MAX_ITEMS = 20_000


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


Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class ResponseBody(GenerationBody):
    """The body of POST /v1/responses. Fields of the other generating calls have the same meaning."""

    input: str | Annotated[Many[JsonObject], Field(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
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
        """Return True if the client wants reasoning in a form that it can send back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def includes_logprobs(self) -> bool:
        """Return True if the answer reports log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        """Raise ApiError 400 for what this server does not have."""
        refused = {
            "background": (self.background, "answers are not made in the background here"),
            "conversation": (self.conversation, "conversations are not kept here; send all items"),
            "previous_response_id": (self.previous_response_id, "responses are not kept here; send all items"),
            "prompt": (self.prompt, "prompts are not kept here; send instructions and input"),
        }
        for name, (value, reason) in refused.items():
            if value:
                raise ApiError(400, f"{name}: {reason}", code="unsupported_parameter", param=name)
        if not self.input and self.input != "":
            text = "input: give text or a list of items, at least one"
            raise ApiError(400, text, code="missing_required_parameter", param="input")
        wanted = self.text.format if self.text else None
        if wanted is not None and wanted.type == "json_schema" and wanted.schema_ is None:
            raise ApiError(400, "text.format.schema: give the schema of json_schema", param="text.format.schema")


Item = dict[str, Any]
Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
# A client that changed models may send these items of another server. The model can read none of them.
WITHOUT_MEANING = ("web_search_call", "image_generation_call", "mcp_list_tools", "compaction_trigger")
_SEALED = "rest-local:"
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def seal(reasoning: str) -> str:
    """Encode reasoning as `encrypted_content`, to be sent back. It is not a secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(text: Any) -> str:
    """Return the text that `seal` was given, or nothing if another server made this."""
    if not isinstance(text, str) or not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def typed(item: Any, place: str) -> Item:
    """Return an item with its type, which messages and references may omit. Raises ApiError 400."""
    fields = given(item, place)
    kind = fields.get("type")
    if kind is None:
        kind = "message" if "role" in fields else "item_reference" if "id" in fields else None
    if not isinstance(kind, str):
        raise wrong(f"{place}.type", "give the type of the item")
    return {"type": kind, **fields}


class Messages:
    """The messages of a conversation, made from its items in order. `toolbox` gets their tools, and names calls."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []
        self._toolbox = toolbox
        self._calls: dict[str, str] = {}  # call id -> the model's name of the tool
        self._kinds: dict[str, Callable[[Item, str], object]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._text_call,
            "custom_tool_call": self._text_call,
            "tool_search_call": self._search_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "tool_search_output": self._found,
            "additional_tools": self._more_tools,
        }

    def add(self, item: Item, place: str) -> None:
        """Add an item that has its type (`typed`). Raises ApiError 400, which names the place."""
        kind = item["type"]
        if kind in WITHOUT_MEANING:
            return
        read = self._kinds.get(kind)
        if kind == "item_reference":
            raise wrong(place, "items are not kept here; send the whole item, as clients do with `store` false")
        if read is None:
            raise wrong(f"{place}.type", f"items of type {kind[:40]!r} are not supported", code="unknown_item_type")
        read(item, place)

    def append(self, message: Message, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _turn(self, place: str, *blocking: str) -> Message:
        """Return the assistant's message at the end, or a new one if that has one of the `blocking` fields."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in blocking):
            self.append({"role": "assistant", "content": ""}, place)
        return self.messages[-1]

    def _message(self, item: Item, place: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{place}.role", f"give one of {', '.join(ROLES)}")
        if "content" not in item:
            raise wrong(f"{place}.content", "give text or a list of parts")
        content = _content(item["content"], f"{place}.content")
        if role != "assistant":
            self.append({"role": role, "content": content}, place)
        else:
            self._turn(place, "content", "tool_calls")["content"] = content

    def _reasoning(self, item: Item, place: str) -> None:
        parts = (item.get("content"), item.get("summary"))
        texts = [_joined(part, f"{place}.{name}") for name, part in zip(("content", "summary"), parts, strict=True)]
        text = texts[0] or unseal(item.get("encrypted_content")) or texts[1]
        if text:
            turn = self._turn(place, "content", "tool_calls")
            turn["reasoning_content"] = "\n\n".join(filter(None, (turn.get("reasoning_content"), text)))

    def _text_call(self, item: Item, place: str) -> None:
        """Add the call of a function, whose arguments are JSON text, or of a custom tool, whose input is any text."""
        is_function = item["type"] == "function_call"
        name = "arguments" if is_function else "input"
        text = item.get(name, "")
        if not isinstance(text, str):
            raise wrong(f"{place}.{name}", "give text")
        self._call(item, place, text if is_function else json.dumps({"input": text}, ensure_ascii=False))

    def _search_call(self, item: Item, place: str) -> None:
        if item.get("execution") == "server" or "call_id" not in item:
            return  # another server searched, and its output has what it found
        arguments = item.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._call({**item, "name": SEARCH}, place, text)

    def _call(self, item: Item, place: str, arguments: str) -> None:
        namespace = item.get("namespace")
        known = known_name(text_of(item, "name", place), namespace if isinstance(namespace, str) else None)
        call_id = text_of(item, "call_id", place)
        self._calls[call_id] = known
        call = {"id": call_id, "type": "function", "function": {"name": known, "arguments": arguments}}
        self._turn(place).setdefault("tool_calls", []).append(call)

    def _output(self, item: Item, place: str) -> None:
        if "output" not in item:
            raise wrong(f"{place}.output", "give text or a list of parts")
        self._result(item, place, _content(item["output"], f"{place}.output"))

    def _found(self, item: Item, place: str) -> None:
        tools = self._more_tools({"tools": [], **item}, place)
        if "call_id" in item and item.get("execution") != "server":
            self._result(item, place, found_tools(tools))

    def _result(self, item: Item, place: str, content: Any) -> None:
        call_id = text_of(item, "call_id", place)
        known = self._calls.get(call_id)
        if known is None:
            raise wrong(f"{place}.call_id", f"no earlier call has the id {call_id[:80]!r}", code="call_not_found")
        self.append({"role": "tool", "tool_call_id": call_id, "name": known, "content": content}, place)

    def _more_tools(self, item: Item, place: str) -> list[Any]:
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise wrong(f"{place}.tools", "give a list of tools")
        self._toolbox.add(tools, f"{place}.tools")
        return tools


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Return content in the form of a chat: text, or parts if there is an image. Raises ApiError 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, "give text or a list of parts")
    parts = [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _part(part: Any, place: str) -> dict[str, Any]:
    fields = given(part, place)
    kind = fields.get("type")
    if kind in _TEXTS or kind == "refusal":
        text = fields.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"{place}.text", "give text")
        return {"type": "text", "text": text}
    if kind == "input_image":
        url = fields.get("image_url")
        if not isinstance(url, str):
            raise wrong(f"{place}.image_url", "give the image as a data: URL; files by id are not kept here")
        return {"type": "image_url", "image_url": {"url": url}}
    raise wrong(f"{place}.type", f"parts of type {str(kind)[:40]!r} are not supported", code="unknown_part_type")


def _joined(parts: Any, place: str) -> str:
    """Return the text of reasoning's parts. Raises ApiError 400."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    if not isinstance(parts, list):
        raise wrong(place, "give a list of parts")
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise wrong(f"{place}[{number}].text", "give text")
        texts.append(text)
    return "\n\n".join(texts)


EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high"}


@dataclass(frozen=True)
class TranslatedRequest:
    """One request, translated for the model."""

    id: str
    created: int
    body: ResponseBody
    chat: ChatBody
    toolbox: Toolbox
    places: list[str]  # the source of each message of the chat

    @staticmethod
    def of(body: ResponseBody) -> TranslatedRequest:
        """Translate a request. Raises ApiError 400 for what this server cannot do."""
        body.check()
        toolbox = Toolbox()
        toolbox.add(body.tools or (), "tools", shown=True)
        messages = Messages(toolbox)
        if body.instructions:
            messages.append({"role": "system", "content": body.instructions}, "instructions")
        items = [] if body.input is None else body.input
        if isinstance(items, str):
            items = [{"type": "message", "role": "user", "content": items}]
        for number, item in enumerate(items):
            place = f"input[{number}]"
            messages.add(typed(item, place), place)
        if not messages.messages:
            raise ApiError(400, "input: give a message", code="invalid_value", param="input")
        choice = toolbox.choose(body.tool_choice)
        chat = ChatBody(
            **_shared(body),
            messages=messages.messages,  # type: ignore[arg-type]
            tools=toolbox.functions or None,
            tool_choice=choice,
        )
        return TranslatedRequest(new_id("resp_"), int(time.time()), body, chat, toolbox, messages.places)

    def error(self, error: OptionError) -> OptionError:
        """Translate an error of the chat, so that it names the client's place."""
        match error.place:
            case "messages", int(number), *rest:
                where = tuple(each for each in rest if each != "url")  # here `image_url` is the URL itself
                return OptionError(error.message, (self.places[number], *where))
        return OptionError(re.sub(r"^response_format\b", "text.format", str(error)))

    def response(
        self, model: str, usual: Sampling, status: str, output: Sequence[Item] = (), **fields: Any
    ) -> dict[str, Any]:
        """Return the response object, with every field that clients read without a check.

        `usual` is the sampling of requests that set none.
        """
        body = self.body
        text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
        reasoning: dict[str, Any] = {"effort": None, "summary": None}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": reasoning | _json(body.reasoning),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": usual.temperature if body.temperature is None else body.temperature,
            "text": text | _json(body.text),
            "tool_choice": _json(body.tool_choice) if hasattr(body.tool_choice, "type") else body.tool_choice or "auto",
            "tools": self.toolbox.shown,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": usual.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        } | fields


def _shared(body: ResponseBody) -> dict[str, Any]:
    """Return the fields of the chat that do not depend on its items."""
    fields = {name: getattr(body, name) for name in GenerationBody.model_fields if name != "stream_options"}
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    wanted = body.text.format if body.text else None
    if wanted is not None and wanted.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif wanted is not None and wanted.type == "json_schema":
        schema = {"name": wanted.name, "schema": wanted.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.includes_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields["prompt_cache_key"] = body.prompt_cache_key
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["chat_template_kwargs"] = _variables(body)
    return {name: value for name, value in fields.items() if value is not None}


def _variables(body: ResponseBody) -> dict[str, Any] | None:
    """Return template variables, with `reasoning.effort` under the names that templates read."""
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None:
        return body.chat_template_kwargs
    known: dict[str, Any] = {"reasoning_effort": EFFORTS.get(effort, "high")}
    if effort == "none":
        known |= {"enable_thinking": False, "thinking": False}
    return known | (body.chat_template_kwargs or {})


def _json(value: Any) -> dict[str, Any]:
    """Return the fields of a part of the body, as it was sent."""
    fields: dict[str, Any] = value.model_dump(exclude_none=True, by_alias=True) if value is not None else {}
    return fields
