"""A body that lacks something is 400, and the error names the place: `messages[2].content`."""

from __future__ import annotations

from typing import Any

from live import Live

SAID = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 2}


WITHOUT = [
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": None}, "messages"),
    ("/v1/chat/completions", chat(), "messages"),
    ("/v1/chat/completions", chat({"role": "user"}), "messages[0].content"),
    ("/v1/chat/completions", chat({"role": "user", "content": None}), "messages[0].content"),
    ("/v1/chat/completions", chat({"role": "system"}, SAID), "messages[0].content"),
    ("/v1/chat/completions", chat(SAID, SAID, {"role": "assistant"}), "messages[2].content"),
    ("/v1/chat/completions", chat(SAID, {"role": "assistant", "tool_calls": []}), "messages[1].content"),
    ("/v1/chat/completions", chat(SAID, {"role": "user", "tool_calls": [CALL]}), "messages[1].content"),
    ("/v1/chat/completions", chat(SAID, {"role": "tool", "tool_call_id": "call_1"}), "messages[1].content"),
    ("/v1/chat/completions", chat({"content": "hi"}), "messages[0].role"),
    ("/apply-template", chat(SAID, {"role": "assistant"}), "messages[1].content"),
    ("/v1/completions", {"max_tokens": 2}, "prompt"),
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/completion", {"n_predict": 2}, "prompt"),
    ("/infill", {"input_extra": [{"filename": "a.py"}]}, "input_extra[0].text"),
    ("/v1/embeddings", {}, "input"),
    ("/tokenize", {}, "content"),
    ("/detokenize", {}, "tokens"),
]


def test_the_error_names_the_field(hello: Live) -> None:
    for path, body, field in WITHOUT:
        answer = hello.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field.partition("[")[0]), (path, body)
        assert error["message"].startswith(f"{field}: ")


def test_a_message_that_says_something_else_or_nothing_is_taken(hello: Live) -> None:
    for message in (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "reasoning_content": "cut off"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ):
        assert hello.post("/v1/chat/completions", chat(SAID, message)).status_code == 200, message
