"""The commands of a chat, with a fake engine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from fake_cli_engine import HELLO, FakeEngine

from rest_local.cli.chat import commands
from rest_local.cli.chat.commands import perform
from rest_local.cli.chat.conversation import NamedSession
from rest_local.cli.chat.talk import Talk, TalkOptions
from rest_local.errors import DatastoreNotFound, ModelNotFound, PromptTooLong
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
    with Talk(engine, TalkOptions({}, 100), interactive=True, reopen=lambda config: engine) as talk:
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
     "/set top_p 3", "/set markdown maybe", "/file", "/file /no/such/file", "/undo", "/regen", "/retry",
     "/load nothing", "/save", "/save a/b", "/datastore remove x", "/datastore drop x", "/drafts perhaps"],
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


def test_regen_draws_another_answer_and_retry_the_same(talk: Talk, engine: FakeEngine) -> None:
    perform(talk, "/set seed 5")
    perform(talk, "/set temp 0")
    perform(talk, "one")
    perform(talk, "/retry")
    perform(talk, "/regen")
    first, same, other = (arguments["sampling"] for arguments in engine.arguments)
    assert first == same
    assert (other.temperature, other.seed) == (0.8, 8)
    assert [len(messages) for messages in engine.messages] == [1, 1, 1]
    assert contents(talk) == ["one", "Hello"]


def test_an_answer_stays_where_no_other_comes(talk: Talk, engine: FakeEngine) -> None:
    perform(talk, "one")
    engine.scripts = [[PromptTooLong(900, 64)]]
    perform(talk, "/regen")
    assert contents(talk) == ["one", "Hello"]
    engine.scripts = [[KeyboardInterrupt()]]
    perform(talk, "/regen")
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


def test_edit_replaces_the_newest_question(talk: Talk, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    perform(talk, "one")
    seen: list[str] = []
    monkeypatch.setattr(click, "edit", lambda text, **_: seen.append(text) or "changed\r\n")
    perform(talk, "/edit")
    assert (seen, contents(talk)) == (["one"], ["changed", "Hello"])
    said()
    monkeypatch.setattr(click, "edit", lambda text, **_: None)
    perform(talk, "/edit")
    assert said() == "nothing was changed\n"

    def broken(text: str, **_: Any) -> None:
        raise click.ClickException("Editing failed")

    monkeypatch.setattr(click, "edit", broken)
    perform(talk, "/edit")
    assert said() == "rest-local: error: /edit: Editing failed\n"
    assert contents(talk) == ["changed", "Hello"]


def test_save_load_and_list(talk: Talk, data: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    perform(talk, "/load")
    assert said() == "there are no sessions; /save NAME keeps this one\n"
    perform(talk, "one")
    perform(talk, "/save first")
    perform(talk, "two")
    perform(talk, "/save second")
    perform(talk, "/undo")
    said()
    perform(talk, "/load")
    assert said() == "first\nsecond\n"
    stored = {path.stem: len(json.loads(path.read_text())["messages"]) for path in (data / "sessions").glob("*.json")}
    assert stored == {"first": 4, "second": 2}
    perform(talk, "/load first")
    assert "session first: 4 messages, 7 tokens of it in the KV cache" in said()
    assert contents(talk) == ["one", "Hello", "two", "Hello"]
    monkeypatch.setattr(commands, "_confirmed", lambda question: False)
    perform(talk, "/clear")
    assert "session first keeps what it holds" in said()
    assert len(json.loads((data / "sessions" / "first.json").read_text())["messages"]) == 4
    perform(talk, "new")
    perform(talk, "/load first")
    assert contents(talk) == ["new", "Hello"], "not left without a yes"
    perform(talk, "/save second")
    assert len(json.loads((data / "sessions" / "second.json").read_text())["messages"]) == 2, "nor replaced"
    monkeypatch.setattr(commands, "_confirmed", lambda question: True)
    perform(talk, "/save second")
    assert json.loads((data / "sessions" / "second.json").read_text())["messages"][0]["content"] == "new"
    NamedSession("first").close()  # is free again


def test_datastores_are_added_removed_and_listed(
    talk: Talk, engine: FakeEngine, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rest_local.decoding import opening

    closed: list[str] = []

    def opened(config: Any, model: Any, undo: Any, unusable: Any) -> list[Any]:
        (name,) = config.datastores
        if name == "missing":
            raise DatastoreNotFound(name)
        return [SimpleNamespace(path=tmp_path / "stores" / name, close=lambda: closed.append(name))]

    monkeypatch.setattr(opening, "open_datastores", opened)
    perform(talk, "/datastore")
    assert said() == "drafts come from: none\n"
    perform(talk, "/datastore add mycode")
    perform(talk, "/datastore add other")
    assert said().splitlines()[-1] == "drafts come from: mycode, other"
    perform(talk, "/datastore add mycode")
    assert "is in use already" in said()
    perform(talk, "/datastore add missing")
    assert "not found" in said()
    perform(talk, "/datastore remove mycode")
    assert said() == "drafts come from: other\n"
    assert (closed, [store.path.name for store in engine.datastores.in_use]) == (["mycode"], ["other"])
    seen: list[Any] = []
    talk._reopen = lambda config: seen.append(config) or engine  # type: ignore[assignment,func-returns-value]
    perform(talk, "/model next.gguf")
    assert (str(seen[0].model), seen[0].datastores) == ("next.gguf", (str(tmp_path / "stores" / "other"),))


def test_another_model_goes_on_and_the_old_one_where_it_cannot_be_opened(engine: Any, said: Said) -> None:
    other: Any = FakeEngine([list(HELLO)])
    other.model.path = Path("other.gguf")

    def reopen(config: Any) -> Any:
        if str(config.model) == "missing.gguf":
            raise ModelNotFound("missing.gguf")
        return other if str(config.model) == "other.gguf" else engine

    with Talk(engine, TalkOptions({}, 100), interactive=True, reopen=reopen) as talk:
        perform(talk, "one")
        said()
        perform(talk, "/model missing.gguf")
        assert "no such file" in said()
        assert talk.engine is engine
        perform(talk, "/model other.gguf")
        assert said() == "other goes on with the conversation\n"
        perform(talk, "two")
        assert [message["content"] for message in other.messages[0]] == ["one", "Hello", "two"]
        said()
        perform(talk, "/model")
        assert said().startswith("other: fake 1M Q8_0, context 1024 tokens")
    assert other.closed
