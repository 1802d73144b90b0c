"""Hostile bodies (RELIABILITY 28): each is 400 in OpenAI's shape, and the next request is answered."""

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import Live

from rest_local.api.bodies import MAX_CONTAINERS, ChatBody, CompletionBody, InfillBody, NativeBody, check
from rest_local.api.errors import ApiError
from rest_local.grammar import compiler

GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def with_field(name: str, raw: str) -> bytes:
    return json.dumps(GOOD)[:-1].encode() + f', "{name}": {raw}}}'.encode()


CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9000)} | {"9000": {}},
}
HOSTILE = {
    "empty": b"",
    "cut off": b'{"messages": [',
    "not json": b"messages=hi",
    "a list": b"[]",
    "a string": b'"text"',
    "null": b"null",
    "not utf-8": b'{"messages": "\xff"}',
    "utf-16": json.dumps(GOOD).encode("utf-16"),
    "trailing": json.dumps(GOOD).encode() + b"{}",
    "nan": with_field("unknown", "NaN"),
    "infinity": with_field("unknown", "-Infinity"),
    "1e400": with_field("unknown", "1e400"),
    "100 000 levels": b"[" * 100_000,
    "100 000 levels inside": with_field("unknown", "[" * 100_000 + "]" * 100_000),
    "5 000 digits": with_field("unknown", "1" * 5_000),
    "lone surrogate": with_field("unknown", r'"\ud800"'),
    "lone surrogate in the prompt": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "a million objects": with_field("unknown", "[" + "{}," * MAX_CONTAINERS + "{}]"),
    "no messages": b"{}",
    "empty messages": b'{"messages": []}',
    "messages a string": b'{"messages": "hi"}',
    "role a number": b'{"messages": [{"role": 1, "content": "hi"}]}',
    "content a number": b'{"messages": [{"role": "user", "content": 1}]}',
    "temperature a string": with_field("temperature", '"0.5"'),
    "temperature too large": with_field("temperature", "1e300"),
    "top_p negative": with_field("top_p", "-0.1"),
    "max_tokens too low": with_field("max_completion_tokens", "-5"),
    "max_tokens a fraction": with_field("max_completion_tokens", "1.5"),
    "n is none": with_field("n", "0"),
    "n is huge": with_field("n", "1000000"),
    "stop a number": with_field("stop", "1"),
    "stop of numbers": with_field("stop", "[1]"),
    "bias beyond": with_field("logit_bias", '{"99999999": 1}'),
    "bias of 5 000 digits": with_field("logit_bias", '{"' + "1" * 5000 + '": 1}'),
    "bias of a negative id": with_field("logit_bias", '{"-1": 1}'),
    "grammar broken": with_field("grammar", '"root ::= ("'),
    "grammar that names a token": with_field("grammar", '"root ::= <think> \\"a\\""'),
    "Lark broken": with_field("grammar", '{"type": "lark", "value": "start: ("}'),
    "Lark of no such token": with_field("grammar", '{"type": "lark", "value": "start: <|no_such_token|>"}'),
    "Lark without a value": with_field("grammar", '{"type": "lark"}'),
    "grammar of another kind": with_field("grammar", '{"type": "ebnf", "value": "x"}'),
    "keyword that is not kept": with_field("json_schema", '{"type": "array", "uniqueItems": true}'),
    "pattern that looks ahead": with_field("json_schema", '{"type": "string", "pattern": "^(?=a)b$"}'),
    "schema that takes too long": with_field(
        "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(200)]})
    ),
    "schema that exhausts the stack": with_field("json_schema", json.dumps(CHAIN)),
    "schema of nothing": with_field("response_format", '{"type": "json_schema"}'),
    "schema broken": with_field("json_schema", '{"type": "nonsense"}'),
    "policy unknown": with_field("rest_local", '{"policy": "magic"}'),
    "datastore unknown": with_field("datastore", '"../../etc"'),
    "top_logprobs alone": with_field("top_logprobs", "3"),
}


@pytest.mark.parametrize("grammar", [{"type": "lark", "value": 'start: "yes" | "no"'}, 'root ::= "yes" | "no"'])
def test_a_grammar_in_either_notation_constrains_the_answer(demo: Live, grammar: Any) -> None:
    answer = demo.post("/v1/chat/completions", GOOD | {"grammar": grammar, "max_tokens": 9})
    assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")


def test_hostile_bodies_are_400_and_the_next_works(demo: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    with demo.client(headers={"content-type": "application/json"}) as client:
        for name, content in HOSTILE.items():
            answer = client.post("/v1/chat/completions", content=content)
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"].keys() >= {"message", "type", "param", "code"}, name
            assert answer.json()["error"]["type"] == "invalid_request_error", name
            assert len(answer.content) < 2000, name
            assert client.post("/v1/chat/completions", json=GOOD).status_code == 200, name


ODD: list[dict[str, Any]] = [
    {"max_tokens": 10**30, "stop": ["x"], "n_predict": 2},
    {"seed": -(10**25)},
    {"seed": -1},
    {"top_k": -1},
    {"top_k": 10**12},
    {"logit_bias": {"15": -100}},
    {"logit_bias": [[15, False], ["Hello", -0.5]]},
    {"logit_bias": {"Hello": -0.5, "\u00b2": 1}},
    {"user": None, "store": True, "metadata": {}, "cache_control": {"type": "x"}, "draft_model": "y"},
    {"temperature": None, "stop": None, "tools": None, "response_format": {"type": "text"}},
    {"n_predict": 0, "samplers": []},
    {"id_slot": 10**18},
    {"stop": ["one"] * 14},
    {"min_tokens": 10**9},
]


def test_odd_values_that_are_answered(hello: Live) -> None:
    for more in ODD:
        answer = hello.post("/v1/chat/completions", GOOD | more)
        assert answer.status_code == 200, (more, answer.text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, NativeBody, InfillBody])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_json_is_a_body_or_refused(kind: type[Any], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.model_fields))
    body = data.draw(st.dictionaries(names, json_values, max_size=4))
    refused = None
    try:
        made = check(json.dumps(body).encode(), kind)
    except ApiError as error:
        refused = error
    if refused is None:
        assert all(math.isfinite(value) for _, value in made if isinstance(value, float))
    else:
        assert refused.status == 400
        assert len(refused.message) < 500


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        check(data, ChatBody)
    assert caught.value.status == 400


def test_a_byte_order_mark_in_front_is_ignored() -> None:
    """PowerShell and .NET write one."""
    body = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "hi"}]}'
    assert check(body, ChatBody).messages[0].content == "hi"


def test_an_error_names_the_field_and_not_its_value() -> None:
    with pytest.raises(ApiError) as caught:
        check(b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "my secret"}', ChatBody)
    assert caught.value.param == "temperature"
    assert "my secret" not in json.dumps(caught.value.body)


# ---- What is missing is named --------------------------------------------------------------------------------------


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
