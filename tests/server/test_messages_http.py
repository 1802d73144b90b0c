"""POST /v1/messages over HTTP: events and their order, stop reasons, counts, pings, errors, what other machines see.

Every answer and every event is checked against the types of the `anthropic` package.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import pytest
from live import Live, Scripted, pieces, prompt_of
from pydantic import BaseModel, TypeAdapter

from rest_local.api.messages_answer import SIGNATURE, Blocks
from rest_local.chat.tools import CallArguments, CallStart, Content, Reasoning
from rest_local.chat.tools import answer as answer_formats

Event = tuple[str, dict[str, Any]]
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "demo", "max_tokens": 200, "messages": HI}
TOOL = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
KEY = {"x-api-key": "k"}


@cache
def types() -> tuple[type[BaseModel], TypeAdapter[Any]]:
    """Return the package's types of a message and of an event of its stream. Their import takes 3 s."""
    from anthropic.types import Message, RawMessageStreamEvent

    return Message, TypeAdapter(RawMessageStreamEvent)


def events_of(text: str) -> list[Event]:
    """Return name and data of each event. All but pings and errors have the package's types."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        found.append((name.removeprefix("event: "), event))
        assert found[-1][0] == event["type"]
        if event["type"] not in ("ping", "error"):
            types()[1].validate_python(event)
    return found


def streamed(live: Live, **more: Any) -> list[Event]:
    return events_of(live.post("/v1/messages", BODY | {"stream": True} | more).text)


def whole(live: Live, **more: Any) -> dict[str, Any]:
    answer = live.post("/v1/messages", BODY | more)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    types()[0].model_validate(message)
    return message


def added_up(events: list[Event]) -> dict[str, Any]:
    """Return the message that a client makes of a stream."""
    message: dict[str, Any] = {}
    arguments = ""
    for name, event in events:
        if name == "message_start":
            message = event["message"]
        elif name == "content_block_start":
            message["content"].append(event["content_block"])
            arguments = ""
        elif name == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                block["input"] = {"so far": arguments}
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif name == "content_block_stop" and message["content"][event["index"]]["type"] == "tool_use":
            message["content"][event["index"]]["input"] = json.loads(arguments or "{}")
        elif name == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


ANSWERS = {
    "text": ("Hel", "lo", " you"),
    "a call": ("I look.\n", *pieces(CALL)),
    "two calls": (CALL, "\n", CALL),
    "reasoning": ("<think>\nI th", "ink.\n</think>\n\n", "Hello"),
    "all": ("<think>I think.</think>", "I look.", CALL),
    "nothing": (),
    "not a call": ("<tool_call>", "no"),
}


@pytest.mark.parametrize("said", ANSWERS.values(), ids=list(ANSWERS))
def test_a_stream_adds_up_to_the_whole_answer(hello: Live, said: tuple[str, ...]) -> None:
    hello.service.answer = said
    one, other = whole(hello, tools=[TOOL]), added_up(streamed(hello, tools=[TOOL]))
    for message in (one, other):
        message["id"] = ""
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("call_")
    assert one == other


def test_events_come_in_their_order(hello: Live) -> None:
    hello.service.answer = ANSWERS["all"]
    events = streamed(hello, tools=[TOOL])
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    kinds = [event["content_block"]["type"] for name, event in events if name == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == events[-2][1]["usage"]["input_tokens"] > 0
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ends", "reason", "sequence"),
    [
        ({"reason": "stop"}, "end_turn", None),
        ({"reason": "stop", "word": "END"}, "stop_sequence", "END"),
        ({"reason": "length"}, "max_tokens", None),
    ],
)
def test_stop_reasons(quiet: Live, stream: bool, ends: Any, reason: str, sequence: str | None) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(streamed if stream else whole, quiet, stop_sequences=["END"])
        submitted = quiet.service.stream()
        assert submitted.request.stop == ("END",)
        submitted.give("some text")
        submitted.end(**ends)
        answer = asking.result(60)
    message = added_up(answer) if isinstance(answer, list) else answer
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_full_context_is_told_from_a_limit(scripted: Scripted) -> None:
    live = scripted(n_ctx=64, answer=None)
    asking = live.later("/v1/messages", BODY)
    submitted = live.service.stream()
    submitted.give(" a" * submitted.request.max_tokens)
    submitted.end("length")
    assert asking.result(60).json()["stop_reason"] == "model_context_window_exceeded"


def test_one_call_at_a_time(hello: Live) -> None:
    hello.service.answer = ANSWERS["two calls"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(whole(hello, tools=[TOOL], tool_choice=choice)["content"]) == 1
    assert len(whole(hello, tools=[TOOL])["content"]) == 2


def test_the_answer_goes_on_where_the_client_began_it(hello: Live) -> None:
    hello.service.answer = (" wrong.",)
    begun = [*HI, {"role": "assistant", "content": "The sign is"}]
    assert whole(hello, messages=begun)["content"] == [{"type": "text", "text": " wrong."}]
    assert prompt_of(hello).endswith("The sign is")
    plain = hello.post("/apply-template", {"messages": HI}).json()["prompt"]
    assert prompt_of(hello) == f"{plain}The sign is"


@pytest.mark.parametrize(
    ("signs", "said", "content"),
    [
        ("<think>", "</think> is", "</think> is"),
        ("<|channel|><|message|>", " is<|end|>", " is"),
    ],
)
def test_an_answer_that_is_begun_is_read_in_each_format(signs: str, said: str, content: str) -> None:
    """Reasoning that the prompt opened is closed first; harmony's answer has a header."""
    form = answer_formats.AnswerFormat.of(signs)
    prompt = "...<think>\n" if signs == "<think>" else "...<|start|>assistant"
    parser = form.parser([], prompt)
    assert parser.feed(form.opening(prompt)) == []
    deltas = [*parser.feed(said), *parser.finish()]
    assert "".join(delta.text for delta in deltas) == content
    assert {type(delta).__name__ for delta in deltas} == {"Content"}


def test_pings_come_while_nothing_else_does(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the prompt is evaluated, and while a thought that is not shown is generated; none after the end."""
    monkeypatch.setattr("rest_local.server.answering.QUIET_SECONDS", 0.02)
    live = scripted(answer=None)
    body = BODY | {"stream": True, "thinking": {"type": "adaptive", "display": "omitted"}}
    names: list[str] = []
    with live.client() as client, client.stream("POST", "/v1/messages", json=body) as answer:
        lines = named(answer)
        assert next(lines) == "message_start"
        assert [next(lines) for _ in range(3)] == 3 * ["ping"]
        stream = live.service.stream()
        stream.give("<think>\nI th")
        assert "content_block_start" in [next(lines) for _ in range(20)]
        stream.give("ink of it")
        assert next(lines) == "ping"
        stream.give("\n</think>\n\nHello")
        stream.end()
        names += lines
    while names[0] == "ping":
        names.pop(0)
    assert names == [
        *("content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def named(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: "))


def test_errors_have_anthropic_s_shape_and_an_id(scripted: Scripted) -> None:
    live = scripted(keys=(b"k",))
    ids = set()
    for status, kind, body, headers in [
        (401, "authentication_error", BODY, {}),
        (404, "not_found_error", BODY | {"model": "gone"}, KEY),
        (400, "invalid_request_error", BODY | {"messages": []}, KEY),
        (403, "permission_error", BODY, KEY | {"host": "elsewhere.example"}),
    ]:
        answer = live.post("/v1/messages", body, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind
        ids.add(answer.headers["request-id"])
    ids.add(live.post("/v1/messages", BODY, headers=KEY).headers["request-id"])
    assert len(ids) == 5
    assert live.get("/v1/messages", headers=KEY).status_code == 405


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_both_calls_refuse_the_same(hello: Live, path: str) -> None:
    wrong = BODY | {"messages": [*HI, {"role": "assistant", "content": [{"type": "hologram"}]}]}
    answer = hello.post(path, wrong)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].content[0].type: ")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    answer = hello.post(path, BODY | {"system": "S", "messages": [*HI, {"role": "user", "content": [image]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"].startswith("messages[1].content[0]: "), "not where the chat has it"


def test_a_prompt_that_is_too_long_has_the_words_that_agents_look_for(scripted: Scripted) -> None:
    live = scripted(n_ctx=64)
    answer = live.post("/v1/messages", BODY | {"messages": [{"role": "user", "content": "word " * 100}]})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    said = f"prompt is too long: {error['n_prompt_tokens']} tokens > 64 maximum; "
    assert error["message"] == f"{said}shorten it, or start the server with a larger --ctx"
    assert error["n_prompt_tokens"] > 64


def test_the_count_is_that_of_the_prompt(scripted: Scripted) -> None:
    live = scripted(n_ctx=64)
    asked: dict[str, Any] = {"model": "demo", "messages": HI, "system": "Be brief."}
    counted = live.post("/v1/messages/count_tokens", asked).json()
    assert counted == {"input_tokens": whole(live, **asked)["usage"]["input_tokens"]}
    assert counted["input_tokens"] == len(live.service.stream().request.prompt)
    more = live.post("/v1/messages/count_tokens", asked | {"tools": [TOOL]}).json()["input_tokens"]
    assert more > counted["input_tokens"]
    long = asked | {"messages": [{"role": "user", "content": "word " * 1000}]}
    assert live.post("/v1/messages/count_tokens", long).json()["input_tokens"] > 1000, "beyond the context too"


def test_an_omitted_thought_is_empty_and_signed() -> None:
    blocks = Blocks(shows_thinking=False)
    events = blocks.feed([Reasoning("I think."), Content("I look.")]) + blocks.finish()
    assert blocks.content[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert "I think." not in str(events)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1]}),
        ('{"a": 1, "n": 12', {"a": 1}),
        ('{"a": 1, "n": -1.5e', {"a": 1}),
        ('{"a": 1, "n": 12 ', {"a": 1}),
        ('{"a": 1, "n": 12, "m', {"a": 1, "n": 12}),
        ('{"n": 12}', {"n": 12}),
        ('{"a": "1", "b": "12', {"a": "1"}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
        ('{"a": tru, "b": 2}', {}),
        ("[1]", {}),
    ],
)
def test_arguments_that_are_cut_off_or_broken(arguments: str, expected: dict[str, Any]) -> None:
    blocks = Blocks()
    blocks.feed([CallStart(0, "a", "f"), CallArguments(0, arguments[:5]), CallArguments(0, arguments[5:])])
    blocks.finish()
    assert blocks.content[0]["input"] == expected
