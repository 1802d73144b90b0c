"""A datastore of format 2 that never changes: with file states, deleted documents and files, and three segments. Every
later version opens it, searches it and writes it again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stores import VOCABULARY, array

from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.maintenance.checking import look
from rest_local.retrieval.update.forgetting import forget
from rest_local.retrieval.update.merging import merge
from rest_local.retrieval.update.updating import add

pytestmark = pytest.mark.usefixtures("unsynced")

FROZEN = Path(__file__).parent.parent / "data" / "datastore-format-2"
KEPT = {
    "/src/kept.py": [1, 2, 3, 7],
    "/src/copy.py": [8] * 5,
    "/src/other.py": [4, 5, 6, 7, 999],
    "stored:1": [1, 2, 3, 4],
    "/src/new.py": [7, 7, 1],
}


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
    add(thawed, [("stored:2", array([6]))], vocabulary=VOCABULARY)
    assert read_manifest(thawed).revision > read_manifest(FROZEN).revision == 2
    forget(thawed, {"/src/copy.py"})
    merge(thawed, everything=True)
    kept = {name: tokens for name, tokens in KEPT.items() if name != "/src/copy.py"}
    assert held(thawed) == {**kept, "stored:2": [6]}
    (entry,) = read_manifest(thawed).segments
    assert (entry.documents, entry.dead, entry.gone) == (5, b"", b"")
