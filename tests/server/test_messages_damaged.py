"""Damaged bodies of the Messages API: whatever a value becomes, the outcome is a chat or an error with a place."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.bodies import check
from rest_local.api.errors import ApiError
from rest_local.api.messages import MessagesBody, Translated, translated

TEXT: list[Any] = [{"type": "text", "text": "a"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
CALLED = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": TEXT},
    {"type": "document", "title": "T", "source": {"type": "content", "content": TEXT}},
    {"type": "search_result", "source": "s", "title": "t", "content": TEXT},
]
SAID = {"user": [*TEXT, IMAGE], "system": "b", "assistant": CALLED}
WHOLE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": TEXT,
    "messages": [
        *({"role": role, "content": content} for role, content in SAID.items()),
        {"role": "user", "content": RESULTS},
        {"role": "assistant", "content": "begun"},
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True},
        {"type": "text_editor_20250728", "name": "e"},
        {"type": "web_search_20250305", "name": "w"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "max"},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
VALUES = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 1.5, "", "text", "tool_use", "image", [], {}, [[]], [1], {"type": "text"}, 10**20]
    ),
    st.text(max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


PLACES = places(WHOLE)[1:]


@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES, st.booleans()), min_size=1, max_size=3), st.booleans())
def test_it_is_a_chat_or_an_error_with_a_place(damages: list[tuple[Any, Any, bool]], late: bool) -> None:
    body = json.loads(json.dumps(WHOLE))
    for path, value, removed in damages:
        try:
            inner: Any = body
            for key in path[:-1]:
                inner = inner[key]
            if removed:
                del inner[path[-1]]
            else:
                inner[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # another damage has removed the place
    made = outcome(body, late)
    if isinstance(made, ApiError):
        assert (made.status, bool(made.param)) == (400, True)
        assert made.message.startswith(made.param or "")
        return
    assert len(made.places) == len(made.body.messages)
    assert made.body.messages[0].role in ("system", "user")


def outcome(body: Any, late: bool) -> Translated | ApiError:
    try:
        return translated(check(json.dumps(body).encode(), MessagesBody), late_system=late)
    except ApiError as error:
        return error
