"""A datastore that lacks the model's vocabulary: one question at a terminal, one line elsewhere, never a refusal."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from index_calls import NamedVocabulary

from rest_local.cli import opening, terminal
from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreLocked, DatastoreNotFound
from rest_local.retrieval import Datastore, build_datastore, build_from_texts, datastore_path
from rest_local.retrieval.files import locked
from rest_local.retrieval.home import indexes

MODEL: Any = SimpleNamespace(path=Path("b model.gguf"), vocabulary=NamedVocabulary("b"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build the datastore `default` for vocabulary "a"."""
    for name in ("DATASTORES", "CACHE"):
        monkeypatch.setenv(f"REST_LOCAL_{name}", str(tmp_path / name))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.py").write_text("text\n" * 100)
    return build_datastore("default", [tmp_path / "source"], vocabulary=NamedVocabulary("a")).path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answer the questions of a terminal in this order. No question may come that has no answer."""
    given: list[bool] = []
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(terminal, "ask", lambda question, default: given.pop(0))
    return given


def decide(name: str, build: bool | None = None, is_named: bool = False) -> bool:
    path = datastore_path(name)
    try:
        Datastore.open(path, vocabulary_hash=MODEL.vocabulary.hash, vocabulary_name=MODEL.vocabulary.name).close()
    except DatastoreError as error:
        return opening.unusable(build, is_named)(name, error, MODEL)
    raise AssertionError("it opens")


def test_without_a_terminal_one_line_names_the_command(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not decide("default", is_named=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "`rest-local index rebuild default -m 'b model.gguf'` builds it" in said
    assert not decide("default", is_named=True)
    assert capsys.readouterr().err == said, "it was named, so every run says what it lacks"
    assert len(indexes(store)) == 1


def test_a_default_that_nobody_named_is_told_about_once(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not decide("default")
    assert capsys.readouterr().err.count("\n") == 1
    assert not decide("default")
    assert not decide("default", build=False)
    assert capsys.readouterr().err == ""


def test_yes_builds_it_and_the_first_vocabulary_stays(store: Path, answers: list[bool]) -> None:
    before = (store / "manifest.json").read_bytes()
    answers.append(True)
    assert decide("default")
    with Datastore.open(store, vocabulary_hash=MODEL.vocabulary.hash) as opened:
        assert opened.document_names() == [str(store.parents[1] / "source" / "a.py")]
        assert opened.manifest.recipe["model"].endswith("b model.gguf")
    assert (store / "manifest.json").read_bytes() == before


def test_no_is_remembered(store: Path, answers: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    answers.append(False)
    assert not decide("default")
    assert capsys.readouterr().err == "", "no line after a question"
    assert not decide("default", is_named=True)
    assert "index rebuild" in capsys.readouterr().err, "but where it is named it is said how"
    assert len(indexes(store)) == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_the_option_decides_without_a_question(store: Path, answers: list[bool], is_named: bool) -> None:
    assert not decide("default", build=False, is_named=is_named)
    assert decide("default", build=True, is_named=is_named)
    assert len(indexes(store)) == 2


def test_what_cannot_be_built_costs_a_line_and_no_answer(
    store: Path, answers: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    (store.parents[1] / "source" / "a.py").unlink()
    (store.parents[1] / "source").rmdir()
    assert not decide("default", build=True)
    assert "source: no such file or directory; going on without it" in capsys.readouterr().err
    build_from_texts("texts", [("one", "text")], vocabulary=NamedVocabulary("a"), recipe={"kind": "git history"})
    assert not decide("texts", is_named=True)
    assert "not built from files" in capsys.readouterr().err


def test_a_builder_at_work_is_not_waited_for(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store / f"vocabulary-{MODEL.vocabulary.hash[:16]}"
    folder.mkdir()
    with locked(folder):
        assert not decide("default", build=True)
    assert "locked by process" in capsys.readouterr().err
    assert decide("default", build=True), "its half-made folder does not matter"


def test_other_faults_are_refused_where_it_was_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named, default = opening.unusable(None, True), opening.unusable(None, False)
    for error in (DatastoreNotFound(store), DatastoreLocked(store, "x")):
        with pytest.raises(type(error)):
            named("default", error, MODEL)
        assert not default("default", error, MODEL)
        assert "the default datastore is not used" in capsys.readouterr().err
    assert not named("default", DatastoreCorrupt(store, "cut off"), MODEL)
    assert capsys.readouterr().err.endswith(
        "cut off; build it again with `rest-local index build`; going on without it\n"
    )
