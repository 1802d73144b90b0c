"""`Engine.request` and `Engine.chat`: each field of a request is a keyword argument; a conversation is a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rest_local import Engine, Request, Sampling
from rest_local.errors import OptionError
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


def test_a_request_is_made_of_text_or_tokens(engine: Engine) -> None:
    made = engine.request("def", max_tokens=3, stop=["a", "b"], prediction="x = 1", min_tokens=2, seconds=1.5)
    assert list(made.prompt) == engine.tokenize("def")
    assert (made.max_tokens, made.stop, made.min_tokens, made.seconds) == (3, ("a", "b"), 2, 1.5)
    assert list(made.prediction) == engine.model.vocabulary.tokenize("x = 1").tolist()
    assert engine.request([1, 2], prediction=[3]).prediction == [3]


def test_a_chat_is_the_continuation_of_its_prompt(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=8)
    text = "".join(piece.text for piece in stream)
    assert stream.message == {"role": "assistant", "content": text}
    plain = engine.generate(engine.chat_prompt(QUESTION), max_tokens=8)
    assert "".join(piece.text for piece in plain) == text


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
