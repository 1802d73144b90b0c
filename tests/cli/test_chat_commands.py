"""The commands of a chat, with a fake engine."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, FakeEngine
from support.images import picture

from rest_local.chat.images import part_of
from rest_local.cli.chat import commands
from rest_local.cli.chat.commands import perform
from rest_local.cli.chat.conversation import NamedSession
from rest_local.cli.chat.talk import Talk, TalkOptions
from rest_local.errors import OptionError, PromptTooLong
from rest_local.llama.sampling_defaults import SamplingDefaults

Said = Callable[[], str]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "stores"))
    return tmp_path / "data"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine([list(HELLO)])


@pytest.fixture
def talk(engine: Any) -> Iterator[Talk]:
    with Talk(engine, TalkOptions({}, 100), interactive=True) as talk:
        yield talk


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that returns what was noted since its last call."""
    return lambda: capsys.readouterr().err


def contents(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.conversation.messages]


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("temperature", "0.5", 0.5), ("temp", "1", 1.0), ("top-k", "3", 3), ("seed", "7", 7), ("min_p", "0", 0.0),
        ("repeat_last_n", "-1", -1),
    ],
)  # fmt: skip
def test_set_changes_the_sampling(talk: Talk, engine: FakeEngine, name: str, value: str, field: Any) -> None:
    perform(talk, f"/set {name} {value}")
    perform(talk, "one")
    key = {"temp": "temperature", "top-k": "top_k"}.get(name, name)
    assert getattr(engine.arguments[-1]["sampling"], key) == field


def test_set_shows_where_each_value_comes_from(talk: Talk, engine: FakeEngine, said: Said) -> None:
    engine.sampling = SamplingDefaults({"top_k": 5}, {"temperature": 0.25, "top_p": 0.5, "min_p": 0.125})
    perform(talk, "/set top-p 0.75")
    perform(talk, "/set min_p 0.5")
    perform(talk, "/set min_p default")
    perform(talk, "/set mirostat 2")
    perform(talk, "/set mirostat 0")
    perform(talk, "/set")
    rows = dict(line.split(maxsplit=1) for line in said().splitlines())
    assert (
        rows
        | {
            "temperature": "0.25 (model file)",
            "top_k": "5 (option)",
            "top_p": "0.75 (set)",
            "min_p": "0.125 (model file)",
            "seed": "random (default)",
            "mirostat": "0 (set)",
            "tokens": "100",
        }
        == rows
    )
    assert "dry_base" not in rows


@pytest.mark.parametrize(
    "line",
    ["/quit now", "/set nothing 3", "/set temperature hot", "/set temperature -1", "/set tokens -2", "/set tokens x",
     "/set top_p 3", "/file", "/file /no/such/file", "/undo", "/retry",
     "/load first", "/save", "/save a/b", "/drafts perhaps"],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_changes_nothing(talk: Talk, engine: FakeEngine, said: Said, line: str) -> None:
    before = talk.settings
    perform(talk, line)
    told = said()
    assert told.startswith("rest-local: error: ")
    assert len(told.splitlines()) == 1
    assert talk.settings == before
    assert (contents(talk), engine.messages) == ([], [])


def test_undo_takes_back_a_question_and_its_answer(talk: Talk, said: Said) -> None:
    perform(talk, "one")
    perform(talk, "two")
    said()
    perform(talk, "/undo")
    assert contents(talk) == ["one", "Hello"]
    assert said() == "taken back; the newest question is now: one\n"
    perform(talk, "/undo")
    assert said() == "taken back; nothing is left\n"


def test_retry_gives_another_answer(talk: Talk, engine: FakeEngine) -> None:
    perform(talk, "one")
    engine.scripts = [[HELLO[0]]]
    perform(talk, "/retry")
    assert [len(messages) for messages in engine.messages] == [1, 1]
    assert contents(talk) == ["one", "Hel"]


def test_an_answer_stays_where_no_other_comes(talk: Talk, engine: FakeEngine) -> None:
    perform(talk, "one")
    engine.scripts = [[PromptTooLong(900, 64)]]
    perform(talk, "/retry")
    assert contents(talk) == ["one", "Hello"]
    engine.scripts = [[KeyboardInterrupt()]]
    perform(talk, "/retry")
    assert contents(talk) == ["one", "Hello"]


def test_a_refused_question_waits_for_retry_and_is_replaced_by_the_next(
    talk: Talk, engine: FakeEngine, said: Said
) -> None:
    perform(talk, "first")
    engine.scripts = [[PromptTooLong(900, 64)], list(HELLO)]
    said()
    perform(talk, "too long")
    told = said().splitlines()
    assert told[0].startswith("rest-local: error: the prompt has 900 tokens")
    assert told[1] == "the conversation fills the context; /clear forgets it"
    perform(talk, "/retry")
    assert contents(talk) == ["first", "Hello", "too long", "Hello"]
    engine.scripts = [[PromptTooLong(900, 64)], list(HELLO)]
    perform(talk, "long again")
    perform(talk, "short")
    assert contents(talk)[4:] == ["short", "Hello"]


def test_a_stopped_answer_is_kept_unless_nothing_came(talk: Talk, engine: FakeEngine, said: Said) -> None:
    engine.scripts = [[HELLO[0], KeyboardInterrupt()]]
    perform(talk, "one")
    assert contents(talk) == ["one", "Hel"]
    engine.scripts = [[KeyboardInterrupt()]]
    said()
    perform(talk, "two")
    assert said() == "stopped\n"
    engine.scripts = [list(HELLO)]
    perform(talk, "three")
    assert contents(talk)[2:] == ["three", "Hello"]


def test_a_file_goes_with_the_next_message(talk: Talk, tmp_path: Path, said: Said) -> None:
    (tmp_path / "my code.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    perform(talk, f"/file '{tmp_path}/my code.py'")
    assert said() == "my code.py: 2 lines go with the next message\n"
    perform(talk, "explain")
    assert contents(talk)[0] == "explain\n\nmy code.py:\n```py\nx = 1\ny = 2\n```"
    perform(talk, "next")
    assert contents(talk)[2] == "next"


def test_save_keeps_a_copy_and_replaces_another_after_a_yes(
    talk: Talk, data: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored() -> dict[str, int]:
        return {path.stem: len(json.loads(path.read_text())["messages"]) for path in (data / "sessions").glob("*.json")}

    for line in ("one", "/save first", "two", "/save second", "/undo"):
        perform(talk, line)
    assert stored() == {"first": 4, "second": 2}
    said()
    perform(talk, "/clear")
    assert "session second keeps what it holds" in said()
    for line in ("new", "more", "even more"):
        perform(talk, line)
    monkeypatch.setattr(commands, "_confirmed", lambda question: False)
    perform(talk, "/save second")
    assert stored() == {"first": 4, "second": 2}
    monkeypatch.setattr(commands, "_confirmed", lambda question: True)
    perform(talk, "/save second")
    assert stored() == {"first": 4, "second": 6}
    NamedSession("first").close()  # is free again


class FakeProjector:
    """A projector that takes what begins as a PNG does."""

    def image(self, data: bytes) -> None:
        if not data.startswith(b"\x89PNG"):
            raise OptionError("the data is no image")


def test_an_image_goes_with_the_next_message_alone(talk: Talk, engine: FakeEngine, tmp_path: Path, said: Said) -> None:
    image = tmp_path / "my image.png"
    image.write_bytes(picture(1))
    perform(talk, f"/image '{image}'")
    assert "the model has no projector here, so it takes no images; give its --mmproj" in said()
    engine.projector = FakeProjector()
    perform(talk, f"/image '{image}'")
    assert said() == "my image.png goes with the next message\n"
    perform(talk, "What is this?")
    parts: Any = talk.conversation.messages[0]["content"]
    assert parts == [{"type": "text", "text": "What is this?"}, part_of(image.read_bytes())]
    assert base64.b64decode(parts[1]["image_url"]["url"].partition(",")[2]) == image.read_bytes()
    perform(talk, "And now?")
    assert talk.conversation.messages[2]["content"] == "And now?"
    assert len(engine.messages[-1]) == 3
