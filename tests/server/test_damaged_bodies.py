"""Damaged bodies of the conversations that are translated: each is a chat, or an error that names a place."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.bodies import check
from rest_local.api.errors import ApiError
from rest_local.api.messages import MessagesBody, translated
from rest_local.api.responses import ResponseBody, TranslatedRequest
from rest_local.llama.options import Sampling

TEXT = [{"type": "text", "text": "a"}]
CALLED = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
]
SEARCHED = [
    {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "2", "content": [{"type": "web_search_result", "title": "t"}]},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": TEXT},
    {"type": "document", "title": "T", "source": {"type": "content", "content": TEXT}},
    {"type": "search_result", "source": "s", "title": "t", "content": TEXT},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}},
]
MESSAGES = {
    "model": "m", "max_tokens": 9, "system": TEXT, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    "messages": [
        {"role": "user", "content": TEXT}, {"role": "system", "content": "b"},
        {"role": "assistant", "content": [*SEARCHED, *CALLED]}, {"role": "user", "content": RESULTS},
        {"role": "assistant", "content": "begun"},
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True},
        {"type": "text_editor_20250728", "name": "e"}, {"type": "web_search_20250305", "name": "w"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "max"},
}  # fmt: skip
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "description": "d", "strict": True}
RESPONSES = {
    "instructions": "i", "tool_choice": {"type": "function", "name": "read"}, "reasoning": {"effort": "low"},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "p"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "x"},
        {"type": "tool_search_call", "call_id": "3", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "3", "execution": "client", "tools": [READ]},
        {"type": "additional_tools", "tools": [READ]}, {"type": "web_search_call", "id": "w"},
    ],
    "tools": [
        READ, {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "n", "tools": [READ]}, {"type": "tool_search", "execution": "client"},
        {"type": "web_search"},
    ],
}  # fmt: skip


def chat_of_messages(body: bytes) -> None:
    made = translated(check(body, MessagesBody), late_system=True)
    assert len(made.places) == len(made.body.messages)
    assert made.body.messages[0].role in ("system", "user")


def chat_of_responses(body: bytes) -> None:
    made = TranslatedRequest.of(check(body, ResponseBody))
    assert made.chat.messages
    assert len(made.places) == len(made.chat.messages)
    json.dumps(made.response("demo", Sampling(), "completed"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


VALUES = st.sampled_from(
    [None, True, 0, -1, 1.5, "", "text", "tool_use", "image", [], {}, [[]], [1], {"type": "text"}, 10**20]
) | st.text(max_size=3)


@pytest.mark.parametrize(("whole", "read"), [(MESSAGES, chat_of_messages), (RESPONSES, chat_of_responses)])
@given(data=st.data())
def test_a_damaged_body_is_a_chat_or_an_error_with_a_place(
    data: st.DataObject, whole: dict[str, Any], read: Callable[[bytes], None]
) -> None:
    read(json.dumps(whole).encode())
    body = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(body)[1:]))
        inner: Any = body
        for key in path:
            inner = inner[key]
        if data.draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(data.draw(VALUES))
        if not body:
            break
    refused = None
    try:
        read(json.dumps(body).encode())
    except ApiError as error:
        refused = error
    if refused is not None:
        assert (refused.status, bool(refused.param)) == (400, True), refused.message
        assert refused.message.startswith((refused.param or "").partition("[")[0])
