"""Deltas of an answer as content blocks: the events add up to the content, however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.messages_answer import SIGNATURE, Blocks
from rest_local.chat.tools import CallArguments, CallStart, Content, Reasoning

WHOLE = [
    Reasoning("I think."),
    Content("I look."),
    CallStart(0, "a", "read"),
    CallArguments(0, '{"path": "a.py"}'),
    CallStart(1, "b", "list"),
    CallArguments(1, "{}"),
]


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of the events; checks their order."""
    content: list[dict[str, Any]] = []
    open_ = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not open_
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
            open_ = True
            continue
        assert open_
        assert event["index"] == len(content) - 1
        if event["type"] == "content_block_stop":
            open_ = False
            continue
        delta = event["delta"]
        name = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
        if name == "partial_json":
            content[-1]["json"] += delta[name]
        else:
            content[-1][name] += delta[name]
    assert not open_
    return content


@given(st.lists(st.integers(1, 5), min_size=1))
def test_the_cut_of_the_text_does_not_matter(sizes: list[int]) -> None:
    blocks, events, turn = Blocks(), [], 0
    for delta in WHOLE:
        if isinstance(delta, CallStart):
            events += blocks.feed([delta])
            continue
        text = delta.text
        while text:
            size = sizes[turn % len(sizes)]
            turn += 1
            part, text = text[:size], text[size:]
            made = CallArguments(delta.index, part) if isinstance(delta, CallArguments) else type(delta)(part)
            events += blocks.feed([made])
    events += blocks.finish()
    whole = Blocks()
    assert added_up(events) == added_up(whole.feed(WHOLE) + whole.finish())
    assert blocks.content == whole.content


def test_an_omitted_thought_is_empty_and_signed() -> None:
    blocks = Blocks(shows_thinking=False)
    events = blocks.feed(WHOLE[:2]) + blocks.finish()
    assert blocks.content[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert "I think." not in str(events)


def test_with_one_call_at_a_time_what_follows_the_first_is_left_out() -> None:
    blocks = Blocks(serial=True)
    blocks.feed([*WHOLE, Content("more")])
    blocks.finish()
    assert [block["type"] for block in blocks.content] == ["thinking", "text", "tool_use"]
    assert blocks.content[-1]["input"] == {"path": "a.py"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
        ('{"a": tru, "b": 2}', {}),
        ("[1]", {}),
    ],
)
def test_arguments_that_are_cut_off_or_broken(arguments: str, expected: dict[str, Any]) -> None:
    blocks = Blocks()
    blocks.feed([CallStart(0, "a", "f"), CallArguments(0, arguments)])
    blocks.finish()
    assert blocks.content[0]["input"] == expected
