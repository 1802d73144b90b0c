"""The tables of a segment, and deleted documents and file states in the manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import VOCABULARY

from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.building.build import build, commit
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, FileState, StateTable, bitmap_of, pack_states
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import Manifest
from rest_local.retrieval.home import read_manifest

NAMES = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["caf\udce9.py", "a/b.c", ""])
STATES = st.builds(
    FileState, NAMES, st.integers(0, 2**63), st.integers(-(2**62), 2**62), st.binary(min_size=32, max_size=32)
)


def state(name: str, mtime: int = 7) -> FileState:
    return FileState(name, 10, mtime, name[:1].encode() * 32)


def stored(path: Path) -> Path:
    documents = [
        Document("a.py", np.array([1, 2, 3], np.int32), (state("a.py"), state("copy of a.py"))),
        Document("b.py", np.array([1, 2, 4], np.int32), (state("b.py"),)),
        Document("plain", np.array([5], np.int32)),
    ]
    build(path, documents, vocabulary=VOCABULARY)
    return path


@given(st.lists(st.tuples(st.integers(0, 4), STATES), min_size=1, max_size=6))
def test_states_come_back(states: list[tuple[int, FileState]]) -> None:
    table = StateTable(pack_states(states), Path("x"), len(states), 5)
    assert [(int(document), table[i]) for i, document in enumerate(table.documents)] == states


@given(st.lists(st.tuples(st.integers(0, 4), STATES), min_size=1, max_size=3), st.data())
def test_damaged_states_are_corrupt_or_other_states(states: list[tuple[int, FileState]], data: st.DataObject) -> None:
    packed = bytearray(pack_states(states))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        table = StateTable(bytes(packed), Path("x"), len(states), 5)
    except DatastoreCorrupt:
        return
    assert all(table.documents < 5)
    assert len([table[index] for index in range(len(table))]) == len(states)


def test_documents_have_the_states_of_their_files(tmp_path: Path) -> None:
    with Datastore.open(stored(tmp_path / "store")) as store:
        found = store.documents(0)
        store.check()
    assert [document.states for document in found] == [(state("a.py"), state("copy of a.py")), (state("b.py"),), ()]


def deleted(path: Path, dead: set[int], gone: set[int]) -> Manifest:
    """A commit in which these documents and file states of the only segment are deleted."""
    manifest = read_manifest(path)
    (entry,) = manifest.segments
    entry = dataclasses.replace(entry, dead=bitmap_of(dead, 3), gone=bitmap_of(gone, 3))
    return commit(path, vocabulary=VOCABULARY, keep=(entry,), files=Files())


def test_deleted_documents_and_states_are_not_listed(tmp_path: Path) -> None:
    path = stored(tmp_path / "store")
    assert deleted(path, {1}, {0, 2}) == read_manifest(path)
    with Datastore.open(path) as store:
        assert store.document_names() == ["copy of a.py", "plain"], "the name of a file that still has the content"
        assert store.locate(1) == ("copy of a.py", 1)
        assert store.names(0) == ["a.py", "b.py", "plain"]
        assert [(document.name, document.states) for document in store.documents(0)] == [
            ("copy of a.py", (state("copy of a.py"),)),
            ("plain", ()),
        ]
        assert store.info()["documents"] == 2
        assert store.segments[0].has_dead


@pytest.mark.parametrize("bitmap", [b"\0", b"\7", b"\17", b"\1\0"], ids=["none", "all", "too many", "too long"])
def test_a_bitmap_that_no_commit_writes_is_corrupt(tmp_path: Path, bitmap: bytes) -> None:
    path = stored(tmp_path / "store")
    manifest = read_manifest(path)
    (entry,) = manifest.segments
    bad = dataclasses.replace(manifest, segments=(dataclasses.replace(entry, dead=bitmap),)).to_bytes()
    with pytest.raises(DatastoreCorrupt, match="dead"):
        Manifest.parse(bad, path)


def test_the_revision_counts_the_commits_of_all_indexes(tmp_path: Path) -> None:
    path = stored(tmp_path / "store")
    assert read_manifest(path).revision == 1
    other = dataclasses.replace(VOCABULARY, hash="ef" * 32)
    documents = [("x", np.array([1], np.int32))]
    assert build(path, documents, vocabulary=other).revision == 2
    assert build(path, documents, vocabulary=VOCABULARY).revision == 3
    assert read_manifest(path).revision > read_manifest(path / "vocabulary-efefefefefefefef").revision
