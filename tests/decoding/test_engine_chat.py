"""`Engine.request` and `Engine.chat`: each field of a request is a keyword argument; a conversation is a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature

import pytest

from rest_local import Engine, Request, Sampling
from rest_local.decoding.request import ChatOptions, RequestOptions
from rest_local.decoding.streaming import Chat
from rest_local.errors import ModelError, OptionError
from rest_local.grammar import gbnf
from rest_local.paths import demo_model

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
SYSTEM = {"role": "system", "content": "You are brief. " * 5}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"enum": [2]}}, "required": ["a"]},
    },
}
NUMBER = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(demo_model(), n_ctx=512, threads=1, policy="off") as engine:
        yield engine


def test_the_options_are_the_fields_of_a_request() -> None:
    assert set(RequestOptions.__annotations__) == {field.name for field in fields(Request)} - {"prompt"}
    chat = {name for name, given in signature(Chat).parameters.items() if given.kind is given.KEYWORD_ONLY}
    assert set(ChatOptions.__annotations__) == {*RequestOptions.__annotations__, *chat}


def test_a_request_is_made_of_text_or_tokens(engine: Engine) -> None:
    made = engine.request("def", max_tokens=3, stop=["a", "b"], prediction="x = 1", min_tokens=2, seconds=1.5)
    assert list(made.prompt) == engine.tokenize("def")
    assert (made.max_tokens, made.stop, made.min_tokens, made.seconds) == (3, ("a", "b"), 2, 1.5)
    assert list(made.prediction) == engine.model.vocabulary.tokenize("x = 1").tolist()
    assert engine.request([1, 2], prediction=[3]).prediction == [3]


@pytest.mark.parametrize(
    "wrong", [{"stop": "abc"}, {"datastores": "code"}, {"max_tokens": -1}, {"logprobs": 1000}, {"seconds": 0}]
)
def test_a_wrong_option_is_an_option_error(engine: Engine, wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        engine.request("def", **wrong)  # type: ignore[arg-type]


def test_an_unknown_option_is_a_type_error(engine: Engine) -> None:
    with pytest.raises(TypeError, match="max_token"):
        engine.generate("def", max_token=3)  # type: ignore[call-arg]


def test_log_probabilities_and_a_least_length_are_taken(engine: Engine) -> None:
    stream = engine.generate("def f(", max_tokens=4, logprobs=2, min_tokens=4)
    assert [len(piece.tokens) for piece in stream] == [1] * 4
    assert [len(entry.top) for entry in stream.result.logprobs] == [2] * 4


def test_a_chat_is_the_continuation_of_its_prompt(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=8)
    text = "".join(piece.text for piece in stream)
    assert stream.message == {"role": "assistant", "content": text}
    plain = engine.generate(engine.chat_prompt(QUESTION), max_tokens=8)
    assert "".join(piece.text for piece in plain) == text


def test_a_schema_binds_the_answer(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=40, json_schema=NUMBER)
    list(stream)
    assert json.loads(stream.message["content"]) == {"n": 4}


def test_a_forced_call_is_in_the_message(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=80, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    list(stream)
    (call,) = stream.message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2}
    assert engine.chat([*QUESTION, stream.message, {"role": "tool", "content": "4"}], max_tokens=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [ADD], "tool_choice": "required", "json_schema": NUMBER},
        {"json_schema": NUMBER, "sampling": Sampling(grammar=gbnf('root ::= "a"'))},
        {"tools": [{}]},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_go_together_is_refused(engine: Engine, wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        engine.chat(QUESTION, **wrong)  # type: ignore[arg-type]


def test_a_context_shift_keeps_the_system_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Request] = []
    prepare = engine.prepare
    monkeypatch.setattr(engine, "prepare", lambda request: made.append(request) or prepare(request))  # type: ignore[func-returns-value]
    for options in ({}, {"context_shift": True}, {"context_shift": True, "keep_tokens": 3}):
        engine.chat([SYSTEM, *QUESTION], max_tokens=1, **options)  # type: ignore[arg-type]
    none, kept, given = (request.keep_tokens for request in made)
    assert (none, given) == (0, 3)
    head = engine.chat_prompt([SYSTEM, *QUESTION]).partition("What is")[0]
    assert kept == len(engine.tokenize(head))


def test_a_model_without_a_template_has_no_chat(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model, "chat_template", None)
    with pytest.raises(ModelError, match="no chat template"):
        engine.chat(QUESTION)


def test_a_message_that_is_none_is_refused(engine: Engine) -> None:
    with pytest.raises(OptionError, match=r"messages\[0\]"):
        engine.chat([{"content": "hi"}])
