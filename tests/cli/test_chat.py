"""`rest-local chat` with a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_cli_engine import HELLO, FakeEngine

from rest_local.cli import chat as chat_module
from rest_local.cli.chat import Conversation, converse, messages_of_user
from rest_local.cli.messages import in_options
from rest_local.errors import PromptTooLong
from rest_local.llama.sampling import Sampling

Install = Callable[..., FakeEngine]
Call = Callable[..., Any]


def test_lines_of_a_pipe_are_answered_and_each_prompt_begins_with_the_one_before(
    fake_engine: Install, call: Call
) -> None:
    engine = fake_engine()
    done = call("chat", stdin=b"one\n\ntwo\n")
    assert (done.code, done.out) == (0, "Hello\nHello\n")
    assert engine.prompts == ["<user>one<assistant>", "<user>one<assistant>Hello<user>two<assistant>"]


def test_statistics_line_after_each_answer(fake_engine: Install, call: Call) -> None:
    fake_engine()
    err = call("chat", stdin=b"one\n").err
    assert err == "[5 tokens, 500.0 tokens/s, MAT 2.50, accepted: context 1, datastore 2]\n"


def test_stats_sums_over_the_session(fake_engine: Install, call: Call) -> None:
    fake_engine()
    err = call("chat", stdin=b"one\ntwo\n/stats\n").err
    expected = "2 answers, 10 tokens, 500.0 tokens/s, MAT 2.50, accepted: context 2, datastore 4"
    assert err.splitlines()[-1] == expected


def test_system_message_survives_clear(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    call("chat", "--system", "be short", stdin=b"one\n/clear\ntwo\n")
    assert engine.prompts[-1] == "<system>be short<user>two<assistant>"
    assert engine.arguments[-1]["keep_tokens"] == len("<system>be short<user>"), "what a context shift keeps"


def test_bye_ends_and_help_explains(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("chat", stdin=b"/help\n/bye\nnever said\n")
    assert done.code == 0
    assert "/clear" in done.err
    assert engine.prompts == []


def test_unknown_command_is_not_sent_to_the_model(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    assert "/quit: no such command" in call("chat", stdin=b"/quit\n").err
    assert engine.prompts == []


def test_json_prints_one_line_an_answer(fake_engine: Install, call: Call) -> None:
    fake_engine()
    lines = call("chat", "--json", stdin=b"one\ntwo\n").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Hello", "Hello"]


def test_interrupt_stops_the_answer_and_keeps_what_was_said(fake_engine: Install, call: Call) -> None:
    engine = fake_engine([HELLO[0], KeyboardInterrupt()], HELLO)
    done = call("chat", stdin=b"one\ntwo\n")
    assert (done.code, done.out) == (0, "Hel\nHello\n")
    assert engine.prompts[1] == "<user>one<assistant>Hel<user>two<assistant>"


def test_interrupt_while_the_message_is_read_leaves_the_conversation_as_it_was(
    fake_engine: Install, call: Call
) -> None:
    engine = fake_engine([KeyboardInterrupt()], HELLO)
    done = call("chat", stdin=b"one\ntwo\n")
    assert (done.code, done.out) == (0, "Hello\n")
    assert engine.prompts[1] == "<user>two<assistant>"


def test_invalid_utf8_of_a_line_is_replaced(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("chat", stdin=b"a\xff\n")
    assert engine.prompts == ["<user>a�<assistant>"]
    assert "warning: stdin: not UTF-8" in done.err


def test_refused_message_in_a_pipe_ends_the_run(fake_engine: Install, call: Call) -> None:
    fake_engine([PromptTooLong(900, 64)])
    done = call("chat", stdin=b"one\ntwo\n")
    assert done.code == 1
    assert done.err == f"rest-local: error: {in_options(str(PromptTooLong(900, 64)))}\n"


def test_refused_message_at_a_terminal_leaves_the_conversation_as_it_was(
    fake_engine: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["too long", "two", None])
    monkeypatch.setattr(chat_module, "_ask", lambda: next(lines))
    engine: Any = fake_engine([PromptTooLong(900, 64)], HELLO)
    converse(Conversation(engine, Sampling(), 10, (), None, False), interactive=True)
    assert engine.prompts[-1] == "<user>two<assistant>"
    assert "rest-local: error: the prompt has 900 tokens" in capsys.readouterr().err


def test_first_interrupt_at_the_prompt_explains_and_asks_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = iter([KeyboardInterrupt(), "hello", None])

    def ask() -> Any:
        item = next(script)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr(chat_module, "_ask", ask)
    assert list(messages_of_user(interactive=True)) == ["hello"]
    assert "/bye" in capsys.readouterr().err
