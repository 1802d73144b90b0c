"""One request, translated: the chat that the model answers, and the response that is told about it.

Reads and writes of the store are files, so `Turn.of` belongs in a worker thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.options import Sampling
from rest_local.server.bodies import ChatBody, Extension, GenerationBody
from rest_local.server.errors import ApiError
from rest_local.server.requests import TEMPERATURE
from rest_local.server.responses.bodies import ResponseBody, TextFormat
from rest_local.server.responses.items import Item, Messages, typed
from rest_local.server.responses.store import Kept, Store, item_id, items_of, new_response_id
from rest_local.server.responses.tools import Toolbox

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high"}
_PLACE = re.compile(r"^messages\[(\d+)\]")


@dataclass(frozen=True)
class Turn:
    """What one request asks for.

    chat      what the model is asked
    places    where each message of the chat came from
    added     items that the request brought, with ids
    owner     of the response, see `owner_of`
    """

    id: str
    created: int
    body: ResponseBody
    chat: ChatBody
    toolbox: Toolbox
    places: list[str]
    added: list[Item]
    owner: str

    @staticmethod
    def of(body: ResponseBody, store: Store, owner: str) -> Turn:
        """Raises ApiError 400 for what this server cannot do, 404 for an item that is not kept."""
        body.check()
        toolbox = Toolbox()
        toolbox.add(body.tools or (), "tools", shown=True)
        messages = Messages(toolbox)
        if body.instructions:
            messages.system(body.instructions, "instructions")
        for item in _before(body.previous_response_id, store, owner):
            messages.add(item, "previous_response_id")
        new_id = new_response_id(body.previous_response_id)
        added = []
        for number, item in enumerate(_given_items(body.input)):
            place = f"input[{number}]"
            read = _referred(typed(item, place), place, store, owner)
            messages.add(read, place)
            added.append({"id": item_id(PREFIXES.get(read["type"], "item"), new_id, "i", number)} | read)
        if not messages.messages:
            raise ApiError(400, "input: give a message", code="invalid_value", param="input")
        choice = toolbox.choose(body.tool_choice)
        chat = ChatBody(
            **_shared(body),
            messages=messages.messages,  # type: ignore[arg-type]
            tools=toolbox.functions or None,
            tool_choice=choice,
        )
        return Turn(new_id, int(time.time()), body, chat, toolbox, messages.places, added, owner)

    def told(self, error: OptionError) -> OptionError:
        """An error of the chat, with the place as the client knows it."""
        text = str(error)
        if found := _PLACE.match(text):
            text = self.places[int(found[1])] + text[found.end() :]
        text = text.replace(".image_url.url:", ".image_url:", 1)
        return OptionError(re.sub(r"^response_format\b", "text.format", text))

    def response(
        self, model: str, status: str, output: Sequence[Item] = (), *, stored: bool | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The response object, with every field that clients read without a check."""
        body = self.body
        usual = Sampling()
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
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": reasoning | _json(body.reasoning),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.stores if stored is None else stored,
            "temperature": TEMPERATURE if body.temperature is None else body.temperature,
            "text": text | _json(body.text),
            "tool_choice": _json(body.tool_choice) if hasattr(body.tool_choice, "type") else body.tool_choice or "auto",
            "tools": self.toolbox.shown,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": usual.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        } | fields

    @property
    def stores(self) -> bool:
        """Whether the response is kept."""
        return self.body.store is not False

    def kept(self, response: dict[str, Any]) -> Kept:
        """What is kept of the turn."""
        return Kept(self.id, self.body.previous_response_id, self.owner, self.added, response)


def _before(previous: str | None, store: Store, owner: str) -> list[Item]:
    if not previous:
        return []
    conversation = store.conversation(previous, owner)
    if conversation is None:
        text = f"previous_response_id: no response {previous[:80]!r} is kept; it was forgotten, or never stored"
        raise ApiError(400, text, code="previous_response_not_found", param="previous_response_id")
    return items_of(conversation)


def _given_items(given: str | list[Item] | None) -> list[Item]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given or []


def _referred(item: Item, place: str, store: Store, owner: str) -> Item:
    """The item, or the kept one that it refers to."""
    if item["type"] != "item_reference":
        return item
    reference = item.get("id")
    found = store.item(reference, owner) if isinstance(reference, str) else None
    if found is None:
        text = f"{place}.id: no item {str(reference)[:80]!r} is kept; it was forgotten, or never stored"
        raise ApiError(404, text, code="item_not_found", param=f"{place}.id")
    return found


def _shared(body: ResponseBody) -> dict[str, Any]:
    """The fields of the chat that do not depend on its items."""
    fields = {name: getattr(body, name) for name in GenerationBody.model_fields if name != "stream_options"}
    extension = body.rest_local or Extension()
    if body.truncation == "auto":
        fields["rest_local"] = extension.model_copy(update={"context_shift": True})
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if body.text and body.text.format:
        fields["response_format"] = _format(body.text.format)
    if body.includes_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields["prompt_cache_key"] = body.prompt_cache_key
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["chat_template_kwargs"] = _variables(body)
    return {name: value for name, value in fields.items() if value is not None}


def _format(wanted: TextFormat) -> dict[str, Any] | None:
    """`text.format` as a chat's `response_format`."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def _variables(body: ResponseBody) -> dict[str, Any] | None:
    """Names for the template: `reasoning.effort` under the names that templates read."""
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None:
        return body.chat_template_kwargs
    known: dict[str, Any] = {"reasoning_effort": EFFORTS.get(effort, "high")}
    if effort == "none":
        known |= {"enable_thinking": False, "thinking": False}
    return known | (body.chat_template_kwargs or {})


def _json(value: Any) -> dict[str, Any]:
    """The fields that a part of the body has, as it was sent."""
    fields: dict[str, Any] = value.model_dump(exclude_none=True, by_alias=True) if value is not None else {}
    return fields
