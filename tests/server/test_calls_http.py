"""Calls and reasoning in a chat: streamed and whole, cut anywhere."""

import json
from typing import Any

import pytest
from live import Live, data_of, prompt_of
from support.toy import demo_model

from rest_local.chat.tools import AnswerFormat
from rest_local.grammar.constraint import Constraint
from rest_local.llama.model import Model

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def streamed(live: Live, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the message that the deltas make, as OpenAI's libraries put it together, and the chunks."""
    text = live.post(PATH, body | {"stream": True}).text
    chunks = data_of(text)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                message["tool_calls"].append({"id": part["id"], "type": part["type"], "function": part["function"]})
            else:
                assert part["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
    return message, chunks


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_is_recognized_however_the_text_is_cut(hello: Live, size: int) -> None:
    said = "I shall add." + CALL + CALL
    hello.service.answer = [said[at : at + size] for at in range(0, len(said), size)]
    whole = hello.post(PATH, BODY).json()["choices"][0]
    message, chunks = streamed(hello, BODY)
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == message["content"] == "I shall add."
    for calls in (whole["message"]["tool_calls"], message["tool_calls"]):
        assert [call["function"]["name"] for call in calls] == ["add", "add"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {"a": 1}]
        assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("more", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_markers_are_text(hello: Live, more: dict[str, Any]) -> None:
    hello.service.answer = [CALL]
    choice = hello.post(PATH, BODY | more).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


def test_each_choice_has_a_parser_of_its_own(hello: Live) -> None:
    hello.service.answer = [CALL[:10], CALL[10:]]
    choices = hello.post(PATH, BODY | {"n": 3}).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1, 1]


ASKED = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "The sum"}
OPENED = "<|im_start|>assistant\n"


@pytest.mark.parametrize("path", [PATH, "/api/chat"])
def test_a_last_message_of_the_assistant_begins_the_answer(hello: Live, path: str) -> None:
    hello.service.answer = [" is 3."]
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "sum"}]
    for begun, end in (("The sum", "The sum"), ("", ""), *([(parts, "The\nsum")] if path == PATH else [])):
        hello.service.streams.clear()
        body = {"model": "demo", "messages": [ASKED, {"role": "assistant", "content": begun}], "stream": False}
        answer = hello.post(path, body).json()
        message = answer["choices"][0]["message"] if path == PATH else answer["message"]
        assert message["content"] == " is 3."
        assert prompt_of(hello) == f"<|im_start|>user\nhi<|im_end|>\n{OPENED}{end}"
    shown = hello.post("/apply-template", {"messages": [ASKED, BEGUN]}).json()["prompt"]
    assert shown.endswith(OPENED + "The sum")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [ASKED, BEGUN], "continue_final_message": False},
        {"messages": [ASKED, BEGUN], "response_format": {"type": "json_object"}},
        {"messages": [ASKED, BEGUN], "tools": TOOLS, "tool_choice": "required"},
        {"messages": [BEGUN]},
        {"messages": [ASKED, BEGUN | {"reasoning_content": "I add."}]},
        {"messages": [ASKED, BEGUN | {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}]},
    ],
)
def test_where_the_answer_cannot_go_on_the_message_stays_one(hello: Live, body: dict[str, Any]) -> None:
    hello.post(PATH, body)
    assert prompt_of(hello).endswith("<|im_end|>\n" + OPENED)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(hello: Live, mode: str) -> None:
    other = {"type": "function", "function": {"name": "subtract", "parameters": PARAMETERS}}
    function = {"type": "function", "function": {"name": "add"}}
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function]}}
    hello.service.answer = [CALL]
    body = BODY | {"tools": [*TOOLS, other], "tool_choice": chosen}
    assert hello.post(PATH, body).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert "add" in prompt_of(hello)
    assert "subtract" not in prompt_of(hello)
    assert (hello.service.stream().request.sampling.grammar is not None) == (mode == "required")
    refused = hello.post(PATH, BODY | {"tools": [other], "tool_choice": chosen})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "'add'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools"),
        ({"tool_choice": "required", "grammar": 'root ::= "x"'}, "grammar"),
        ({"grammar": 'root ::= "x"', "json_schema": {"type": "object"}}, "grammar"),
    ],
)
def test_contradictory_requests_are_400(hello: Live, more: dict[str, Any], said: str) -> None:
    answer = hello.post(PATH, BODY | more)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_model_that_reasons_may_do_so_before_a_response_format(hello: Live) -> None:
    """The engine's grammar accepts reasoning, and after it only values of the schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    form = AnswerFormat.of("<think> </think> <tool_call>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerFormat, "of", lambda source, special: form)
        hello.service.answer = ['<think>I add.</think>{"a": 1}']
        message = hello.post(PATH, {"messages": BODY["messages"], "response_format": wanted}).json()["choices"][0][
            "message"
        ]
    assert (message["reasoning_content"], message["content"]) == ("I add.", '{"a": 1}')
    (stream,) = hello.service.streams
    with Model.open(demo_model(), vocab_only=True) as model:
        for said, taken in {'<think>I {add}.</think>{"a": 1}': True, '{"a": 1}': True, "I add.": False}.items():
            constraint = Constraint(model.vocabulary, stream.request.sampling.grammar)
            tokens = model.vocabulary.tokenize(said, special=False).tolist()
            assert all(constraint.follow(token) for token in tokens) == taken, said


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_half_a_call_at_a_limit_is_not_text(quiet: Live, reason: str) -> None:
    asked = quiet.later(PATH, BODY)
    stream = quiet.service.stream()
    stream.give(CALL + '\n<tool_call>\n{"name": "ad')
    stream.end(reason)
    (choice,) = asked.result(30).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == (None if reason == "length" else '\n<tool_call>\n{"name": "ad')
    assert choice["finish_reason"] == ("length" if reason == "length" else "tool_calls")


STOPPED = CALL.partition("1}")[0]
"""A call that a stop string has ended in its arguments."""


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_is_cut_off_in_its_arguments_is_not_to_be_run(quiet: Live, reason: str) -> None:
    """In no protocol can its arguments be trusted: they cannot be read, or the model would have written others."""
    functions = [{"type": "function", **TOOLS[0]["function"]}]
    anthropic = [{"name": "add", "input_schema": PARAMETERS}]
    more: dict[str, dict[str, Any]] = {
        PATH: BODY,
        "/v1/messages": {"messages": BODY["messages"], "max_tokens": 99, "tools": anthropic},
        "/v1/responses": {"input": "hi", "tools": functions},
        "/api/chat": BODY | {"model": "demo", "stream": False},
    }
    answers = {}
    for path, body in more.items():
        quiet.service.streams.clear()
        asked = quiet.later(path, body)
        stream = quiet.service.stream()
        stream.give(STOPPED)
        stream.end(reason, word="1" if reason == "stop" else "")
        answers[path] = asked.result(30).json()
    assert answers[PATH]["choices"][0]["finish_reason"] == reason
    assert answers["/v1/messages"]["stop_reason"] == ("max_tokens" if reason == "length" else "stop_sequence")
    assert answers["/v1/messages"]["content"][0]["input"] == {}
    assert answers["/v1/responses"]["output"][0]["status"] == "incomplete"
    assert "tool_calls" not in answers["/api/chat"]["message"]


@pytest.mark.parametrize("end", range(1, len('<tool_call>\n{"name": "add", "arguments": '), 4))
def test_a_forced_call_that_is_cut_off_before_its_arguments_is_nothing(quiet: Live, end: int) -> None:
    asked = quiet.later(PATH, BODY | {"tool_choice": "required"})
    stream = quiet.service.stream()
    stream.give(CALL[:end])
    stream.end("length")
    (choice,) = asked.result(30).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert "tool_calls" not in choice["message"]
