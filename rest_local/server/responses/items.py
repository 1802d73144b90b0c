"""Items of a request to messages of a chat.

What the assistant did in one turn (reasoning, text, calls) are several items here and one message there. `places` says
where each message came from, so that an error about a message can name the item.

Reasoning reaches the template as `reasoning_content`. It is read from the item's `content`, else from what this server
has put into `encrypted_content` (the same text, for clients that send back nothing else), else from `summary`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from rest_local.server.responses.fields import bad, given, text_of
from rest_local.server.responses.tools import SEARCH, Toolbox, found_tools, known_name

Item = dict[str, Any]
Message = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
WITHOUT_MEANING = ("web_search_call", "image_generation_call", "mcp_list_tools", "compaction_trigger")
"""Types that another server answered with, before a client changed models: the model can read none of them."""

_SEALED = "rest-local:"
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: a form to send back, not a secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(text: Any) -> str:
    """What `seal` was given; empty for what another server has made."""
    if not isinstance(text, str) or not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def typed(item: Any, place: str) -> Item:
    """An item with its type: a message needs none, nor does a reference. Raises ApiError 400."""
    fields = given(item, place)
    kind = fields.get("type")
    if kind is None:
        kind = "message" if "role" in fields else "item_reference" if "id" in fields else None
    if not isinstance(kind, str):
        raise bad(f"{place}.type", "give the type of the item")
    return {"type": kind, **fields}


class Messages:
    """The messages of a conversation, made of its items in order.

    toolbox   takes the tools that items bring; its names are those of calls
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []
        self._toolbox = toolbox
        self._calls: dict[str, str] = {}  # the model's name of each call's tool
        self._kinds: dict[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
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
        if read is None:
            raise bad(f"{place}.type", f"items of type {kind[:40]!r} are not supported", code="unknown_item_type")
        read(item, place)

    def system(self, text: str, place: str) -> None:
        """Add a message of the system."""
        self._append({"role": "system", "content": text}, place)

    def _append(self, message: Message, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _turn(self, place: str, *blocking: str) -> Message:
        """The assistant's message at the end, or a new one if that has one of these fields."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in blocking):
            self._append({"role": "assistant", "content": ""}, place)
        return self.messages[-1]

    def _message(self, item: Item, place: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise bad(f"{place}.role", f"give one of {', '.join(ROLES)}")
        if "content" not in item:
            raise bad(f"{place}.content", "give text or a list of parts")
        content = _content(item["content"], f"{place}.content")
        if role != "assistant":
            self._append({"role": role, "content": content}, place)
        else:
            self._turn(place, "content", "tool_calls")["content"] = content

    def _reasoning(self, item: Item, place: str) -> None:
        parts = (item.get("content"), item.get("summary"))
        texts = [_joined(part, f"{place}.{name}") for name, part in zip(("content", "summary"), parts, strict=True)]
        text = texts[0] or unseal(item.get("encrypted_content")) or texts[1]
        if text:
            turn = self._turn(place, "content", "tool_calls")
            turn["reasoning_content"] = "\n\n".join(filter(None, (turn.get("reasoning_content"), text)))

    def _function_call(self, item: Item, place: str) -> None:
        arguments = item.get("arguments", "")
        if not isinstance(arguments, str):
            raise bad(f"{place}.arguments", "give the arguments as JSON text")
        self._call(item, place, arguments)

    def _custom_call(self, item: Item, place: str) -> None:
        text = item.get("input", "")
        if not isinstance(text, str):
            raise bad(f"{place}.input", "give text")
        self._call(item, place, json.dumps({"input": text}, ensure_ascii=False))

    def _search_call(self, item: Item, place: str) -> None:
        if item.get("execution") == "server" or "call_id" not in item:
            return  # the search of another server; what it found comes with its output
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
            raise bad(f"{place}.output", "give text or a list of parts")
        self._result(item, place, _content(item["output"], f"{place}.output"))

    def _found(self, item: Item, place: str) -> None:
        tools = item.get("tools", [])
        if not isinstance(tools, list):
            raise bad(f"{place}.tools", "give a list of tools")
        self._toolbox.add(tools, f"{place}.tools")
        if "call_id" in item and item.get("execution") != "server":
            self._result(item, place, found_tools(tools))

    def _result(self, item: Item, place: str, content: Any) -> None:
        call_id = text_of(item, "call_id", place)
        known = self._calls.get(call_id)
        if known is None:
            raise bad(f"{place}.call_id", f"no call before it has the id {call_id[:80]!r}", code="call_not_found")
        self._append({"role": "tool", "tool_call_id": call_id, "name": known, "content": content}, place)

    def _more_tools(self, item: Item, place: str) -> None:
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise bad(f"{place}.tools", "give a list of tools")
        self._toolbox.add(tools, f"{place}.tools")


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Content in the form of a chat: text, or parts where there is an image. Raises ApiError 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(place, "give text or a list of parts")
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
            raise bad(f"{place}.text", "give text")
        return {"type": "text", "text": text}
    if kind == "input_image":
        url = fields.get("image_url")
        if not isinstance(url, str):
            raise bad(f"{place}.image_url", "give the image as a data: URL; files by id are not kept here")
        return {"type": "image_url", "image_url": {"url": url}}
    raise bad(f"{place}.type", f"parts of type {str(kind)[:40]!r} are not supported", code="unknown_part_type")


def _joined(parts: Any, place: str) -> str:
    """The text of reasoning's parts. Raises ApiError 400."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    if not isinstance(parts, list):
        raise bad(place, "give a list of parts")
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise bad(f"{place}[{number}].text", "give text")
        texts.append(text)
    return "\n\n".join(texts)
