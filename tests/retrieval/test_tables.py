"""The tables of a segment, and deleted documents and file states in the manifest."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from edited import merge_all, store_documents
from hypothesis import given
from hypothesis import strategies as st
from stores import VOCABULARY, array

from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.building.build import build, commit
from rest_local.retrieval.checking import look
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, FileState, StateTable, bitmap_of, pack_states
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import Manifest
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.update.forgetting import forget

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


def deleted(path: Path, dead: set[int], gone: set[int]) -> Manifest:
    """Commit the deletion of these documents and file states of the only segment."""
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


# ---- Format 2 ------------------------------------------------------------------------------------------------------


FROZEN = Path(__file__).parent.parent / "data" / "datastore-format-2"
KEPT = {
    "/src/kept.py": [1, 2, 3, 7], "/src/copy.py": [8] * 5, "/src/other.py": [4, 5, 6, 7, 999], "stored:1": [1, 2, 3, 4],
    "/src/new.py": [7, 7, 1],
}  # fmt: skip


def documents(path: Path) -> list[Document]:
    with Datastore.open(path) as store:
        store.check()
        return [document for index in range(len(store.segments)) for document in store.documents(index)]


def held(path: Path) -> dict[str, list[int]]:
    return {document.name: document.tokens.tolist() for document in documents(path)}


@pytest.fixture
def thawed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN, tmp_path / "store"))


def test_it_opens_and_is_searched_without_what_is_deleted() -> None:
    assert held(FROZEN) == KEPT
    assert [fault for one in look(FROZEN) for fault in one.faults] == []
    with Datastore.open(FROZEN) as store:
        assert store.info()["documents"] == len(KEPT)
        assert store.rows(array([1, 2, 3]), 8, 1).continuations[:2].tolist() in ([[7], [4]], [[4], [7]])
        assert len(store.rows(array([9]), 8, 1)) == 0


def test_the_states_are_those_that_were_written() -> None:
    states = [state for document in documents(FROZEN) for state in document.states]
    assert [(state.name, state.size, state.mtime_ns - 1_600_000_000_000_000_000) for state in states] == [
        ("/src/kept.py", 12, 12),
        ("/src/copy.py", 14, 12),
        ("/src/other.py", 13, 13),
        ("/src/new.py", 11, 11),
    ]
    assert states[0].sha256.hex().startswith("1bc450816c97e7b1")


def test_it_can_be_changed_and_merged(thawed: Path) -> None:
    store_documents(thawed, [("stored:2", array([6]))])
    assert read_manifest(thawed).revision > read_manifest(FROZEN).revision == 2
    forget(thawed, {"/src/copy.py"})
    merge_all(thawed)
    kept = {name: tokens for name, tokens in KEPT.items() if name != "/src/copy.py"}
    assert held(thawed) == {**kept, "stored:2": [6]}
    (entry,) = read_manifest(thawed).segments
    assert (entry.documents, entry.dead, entry.gone) == (5, b"", b"")
