"""Adding and removing documents: the content afterwards, and that each edit is atomic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from rest_local.errors import (
    CorpusEmpty,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreVocabulary,
    OptionError,
)
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import locked
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.update import updating
from rest_local.retrieval.update.forgetting import forget
from rest_local.retrieval.update.updating import add

VOCABULARY = VocabularyId("ab" * 32, 300, "bytes of 300 tokens")


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def contents(path: Path) -> dict[str, str]:
    """Every document, read from the files."""
    with Datastore.open(path) as store:
        store.check()
        found = [document for index in range(len(store.segments)) for document in store.documents(index)]
        assert [name for name, *_ in found] == store.document_names()
    assert len({name for name, *_ in found}) == len(found)
    return {name: bytes(ids.astype(np.uint8)).decode() for name, ids, _ in found}


def put(path: Path, **documents: str) -> None:
    add(path, [(name, tokens(text)) for name, text in documents.items()], vocabulary=VOCABULARY)


def test_the_last_document_stays(tmp_path: Path) -> None:
    path = tmp_path / "store"
    put(path, a="only")
    with pytest.raises(OptionError, match="index remove"):
        forget(path, {"a"})
    assert contents(path) == {"a": "only"}
    with pytest.raises(DatastoreNotFound):
        forget(tmp_path / "nothing", {"a"})


@few(15)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.text("xyz", min_size=1, max_size=30))), max_size=8
    )
)
def test_any_sequence_of_edits_equals_that_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, str | None]]
) -> None:
    path = tmp_path_factory.mktemp("edits") / "store"
    put(path, keep="kept")
    expected = {"keep": "kept"}
    for name, text in edits:
        if text is None:
            assert forget(path, {name}) == (name in expected)
            expected.pop(name, None)
        else:
            put(path, **{name: text})
            expected[name] = text
    assert contents(path) == expected


def test_refusals_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "WAIT_S", 0)
    path = tmp_path / "store"
    put(path, a="text")
    other = VocabularyId("cd" * 32, 300, "other")
    with pytest.raises(DatastoreVocabulary):
        add(path, [("b", tokens("x"))], vocabulary=other)
    with locked(path), pytest.raises(DatastoreLocked):
        add(path, [("b", tokens("x"))], vocabulary=VOCABULARY)
    with pytest.raises(CorpusEmpty):
        add(tmp_path / "empty", [("b", tokens(""))], vocabulary=VOCABULARY)
    assert contents(path) == {"a": "text"}
