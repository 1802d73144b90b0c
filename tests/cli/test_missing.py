"""A datastore that lacks the model's vocabulary: one line, never a refusal."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from index_calls import NamedVocabulary

from rest_local.cli import opening
from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreLocked, DatastoreNotFound
from rest_local.retrieval import Datastore, build_datastore, datastore_path
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


def decide(name: str, is_named: bool = False) -> None:
    path = datastore_path(name)
    try:
        Datastore.open(path, vocabulary_hash=MODEL.vocabulary.hash, vocabulary_name=MODEL.vocabulary.name).close()
    except DatastoreError as error:
        opening.unusable(is_named)(name, error, MODEL)
    else:
        raise AssertionError("it opens")


def test_without_a_terminal_one_line_names_the_command(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decide("default", is_named=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "`rest-local index rebuild default -m 'b model.gguf'` builds it" in said
    decide("default", is_named=True)
    assert capsys.readouterr().err == said, "it was named, so every run says what it lacks"
    assert len(indexes(store)) == 1


def test_a_default_that_nobody_named_is_told_about_once(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decide("default")
    assert capsys.readouterr().err.count("\n") == 1
    decide("default")
    assert capsys.readouterr().err == ""


def test_other_faults_are_refused_where_it_was_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named, default = opening.unusable(True), opening.unusable(False)
    for error in (DatastoreNotFound(store), DatastoreLocked(store, "x")):
        with pytest.raises(type(error)):
            named("default", error, MODEL)
        default("default", error, MODEL)
        assert "the default datastore is not used" in capsys.readouterr().err
    named("default", DatastoreCorrupt(store, "cut off"), MODEL)
    assert capsys.readouterr().err.endswith(
        "cut off; build it again with `rest-local index build`; going on without it\n"
    )
