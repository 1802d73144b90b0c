"""`rest-local chat` without a terminal: one question, pipes, sessions, and what cannot chat."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, Call, FakePiece, Install

from rest_local import paths

GIVEN = ("chat", "-m", "model.gguf")


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("question", "piped", "asked"),
    [
        (["what is this?"], b"", "what is this?"),
        ([], b"one\r\n\r\n  two\r\n", "one\n\n  two"),
        (["review this"], b"-old\n+new\n", "review this\n\n```\n-old\n+new\n```"),
    ],
)
def test_a_question_and_a_pipe_are_one_message(
    chat_engine: Install, call: Call, question: list[str], piped: bytes, asked: str
) -> None:
    engine = chat_engine()
    done = call(*GIVEN, *question, stdin=piped)
    assert (done.code, done.out, done.err) == (0, "Hello\n", "")
    assert engine.messages == [[{"role": "user", "content": asked}]]
    assert engine.closed


@pytest.mark.parametrize("question", [(), ("-",), (" ",)])
def test_an_empty_pipe_without_a_question_is_wrong_usage(
    chat_engine: Install, call: Call, question: tuple[str, ...]
) -> None:
    chat_engine()
    done = call(*GIVEN, *question, stdin=b"\n")
    assert done.code == 2
    assert done.err.startswith("rest-local: error: the standard input is empty; give a QUESTION")
    assert len(done.err.splitlines()) == 1


def test_json_is_one_line_with_the_message(chat_engine: Install, call: Call) -> None:
    chat_engine()
    done = call(*GIVEN, "--json", "hi")
    (line,) = map(json.loads, done.out.splitlines())
    assert line["message"] == {"role": "assistant", "content": "Hello"}
    assert (line["text"], line["finish_reason"], done.err) == ("Hello", "stop", "")


def test_reasoning_is_not_printed_into_a_pipe(chat_engine: Install, call: Call) -> None:
    thinking = [FakePiece("<think>\nwell\n</think>\n4", (1, 2), ("target", "target"))]
    chat_engine(thinking)
    assert call(*GIVEN, "2 + 2?").out == "4\n"
    chat_engine(thinking)
    message = json.loads(call(*GIVEN, "--json", "2 + 2?").out)["message"]
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "well"}


def test_an_interrupt_prints_and_keeps_what_came_and_is_130(chat_engine: Install, call: Call, tmp_path: Path) -> None:
    chat_engine([HELLO[0], KeyboardInterrupt()])
    done = call(*GIVEN, "--session", "work", "hi")
    assert (done.code, done.out) == (130, "Hel\n")
    kept = json.loads((tmp_path / "data" / "sessions" / "work.json").read_text())
    assert [message["content"] for message in kept["messages"]] == ["hi", "Hel"]


LOOP = [FakePiece("la ", (5, 6), ("target", "target"))] * 200


def test_an_answer_that_repeats_itself_says_so_once_and_goes_on(chat_engine: Install, call: Call) -> None:
    chat_engine(LOOP)
    done = call("chat", "-m", "m.gguf", "sing")
    assert (done.code, done.out, done.err) == (0, "la " * 200 + "\n", "[the answer repeats itself; Ctrl-C stops it]\n")
    chat_engine(LOOP[:60])
    assert call("chat", "-m", "m.gguf", "sing").err == ""


def test_an_empty_answer_says_so(chat_engine: Install, call: Call) -> None:
    chat_engine([])
    done = call(*GIVEN, "hi")
    assert (done.code, done.out, done.err) == (0, "", "the model gave an empty answer\n")
    assert json.loads(call(*GIVEN, "--json", "hi").out)["text"] == ""
    chat_engine([FakePiece("<think>why</think>", (1,), ("target",))])
    assert "the model reasoned and gave no answer\n" in call(*GIVEN, "-q", "hi").err
    chat_engine([FakePiece("yes", (1,), ("target",))])
    assert call(*GIVEN, "-q", "hi").err == ""


def test_a_model_without_a_template_says_what_to_do(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call(*GIVEN, "hi")
    assert done.code == 1
    assert "has no chat template, so it cannot chat" in done.err
    assert "--chat-template-file" in done.err
    assert len(done.err.splitlines()) == 1
    assert engine.closed


def test_a_session_is_plain_json_and_goes_on(chat_engine: Install, call: Call, tmp_path: Path) -> None:
    chat_engine()
    assert call(*GIVEN, "--session", "work", "--system", "be short", "one").code == 0
    path = tmp_path / "data" / "sessions" / "work.json"
    assert json.loads(path.read_text()) == {
        "format": 1,
        "model": "fake",
        "system": "be short",
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello"}],
    }
    assert path.stat().st_mode & 0o777 == 0o600
    engine = chat_engine()
    assert call(*GIVEN, "--session", "work", "two").out == "Hello\n"
    said = [message["content"] for message in engine.messages[0]]
    assert said == ["be short", "one", "Hello", "two"]
    assert len(json.loads(path.read_text())["messages"]) == 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a session"),
        (b'{"format": 9, "messages": []}', "format 9, this version reads 1"),
        (b'{"format": 1, "messages": [{"role": "king"}]}', "message 1 has no role"),
        (b'{"format": 1, "messages": [{"role": "user", "content": 3}]}', "the content of message 1 is not a text"),
    ],
)
def test_a_damaged_session_is_refused_and_not_overwritten(
    chat_engine: Install, call: Call, tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "data" / "sessions" / "work.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    engine = chat_engine()
    done = call(*GIVEN, "--session", "work", "one")
    assert done.code == 1
    assert told in done.err
    assert path.read_bytes() == content
    assert engine.messages == []


def test_a_session_that_cannot_be_written_costs_a_warning(
    chat_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    chat_engine()
    monkeypatch.setattr(paths, "write_atomically", full)
    done = call(*GIVEN, "--session", "work", "two")
    assert (done.code, done.out) == (0, "Hello\n")
    assert done.err.startswith("rest-local: warning: session work is not saved")
    assert done.err.rstrip().endswith("No space left on device")
