"""A datastore with an index for each of several vocabularies: whatever happens to one, the others stay."""

from pathlib import Path
from typing import Any

import pytest
from edited import Bytes
from failpoints import Named, kills, put_tree
from stores import NEW, OLD, OTHER, VOCABULARY, Durable, content_of, make
from test_build import names, orphans

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreExists,
    DatastoreLocked,
    DatastoreUnwritable,
    DatastoreVocabulary,
)
from rest_local.retrieval import Datastore, VocabularyId, remove
from rest_local.retrieval.files import locked
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.home import folder, indexes
from rest_local.retrieval.staging import remove_index
from rest_local.retrieval.update.forgetting import forget

THIRD = VocabularyId("ef" * 32, 1000, "third")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Build a datastore of OLD for VOCABULARY and of NEW for OTHER."""
    return make(make(tmp_path / "store", OLD), NEW, vocabulary=OTHER)


def held(path: Path, vocabulary: VocabularyId) -> dict[str, list[int]]:
    """Return what a datastore holds for a vocabulary, undamaged."""
    with Datastore.open(path, vocabulary_hash=vocabulary.hash) as store:
        return content_of(store.directory)


def test_each_vocabulary_opens_its_own_index(both: Path) -> None:
    assert held(both, VOCABULARY) == OLD
    assert held(both, OTHER) == NEW
    with Datastore.open(both, vocabulary_hash=OTHER.hash) as store:
        assert store.path == both
        assert store.directory == both / "vocabulary-cdcdcdcdcdcdcdcd"
    assert both.joinpath("vocabulary-cdcdcdcdcdcdcdcd").stat().st_mode & 0o777 == 0o700
    with Datastore.open(both) as store:
        assert store.manifest.vocabulary == VOCABULARY, "the first one, where no vocabulary is named"
    with pytest.raises(DatastoreVocabulary, match=r"toy \(abababababab\), other \(cdcdcdcdcdcd\), the model has third"):
        Datastore.open(both, vocabulary_hash=THIRD.hash, vocabulary_name="third")


def test_a_commit_for_one_vocabulary_touches_no_file_of_another(both: Path) -> None:
    def files(directory: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file() and file.name != "lock"}

    own, others = files(both), files(folder(both, OTHER.hash))
    make(both, {"x": [1]}, vocabulary=OTHER)
    assert files(both) == own
    make(both, {"y": [1]})
    make(both, NEW, vocabulary=OTHER)
    assert {name.partition(".")[2] for name in others} == {"json", *(f"{kind}.bin" for kind in KINDS)}
    assert (held(both, VOCABULARY), held(both, OTHER)) == ({"y": [1]}, NEW)


KINDS = ("tokens", "order", "documents")


def test_an_index_is_not_replaced_where_that_is_not_wanted(both: Path) -> None:
    for vocabulary, content in ((VOCABULARY, OLD), (OTHER, NEW)):
        with pytest.raises(DatastoreExists, match=vocabulary.name):
            make(both, {"x": [1]}, vocabulary=vocabulary, replace=False)
        assert held(both, vocabulary) == content
    make(both, {"x": [1]}, vocabulary=THIRD, replace=False)
    assert held(both, THIRD) == {"x": [1]}


def test_killed_before_any_step_of_a_second_vocabulary(tmp_path: Path) -> None:
    """The first one is whole at every moment, a half-made folder opens nothing, and the next build completes it."""
    path, complete = make(tmp_path / "store", OLD), []
    for state in kills(path, lambda files: make(path, NEW, segment_tokens=12, files=files, vocabulary=OTHER)):
        put_tree(path, state.tree)
        assert held(path, VOCABULARY) == OLD
        complete.append(len(indexes(path)) == 2)
        if complete[-1]:
            assert held(path, OTHER) == NEW
        else:
            with pytest.raises(DatastoreVocabulary):
                Datastore.open(path, vocabulary_hash=OTHER.hash)
        make(path, NEW, vocabulary=OTHER)
        assert held(path, OTHER) == NEW
        assert orphans(folder(path, OTHER.hash)) == set()
        assert held(path, VOCABULARY) == OLD
    assert complete[0] < complete[-1]


@pytest.mark.parametrize("first", [True, False], ids=["the first", "another"])
def test_killed_before_any_step_of_removing_one(both: Path, first: bool) -> None:
    gone, kept, left = (VOCABULARY, OTHER, NEW) if first else (OTHER, VOCABULARY, OLD)
    index, opened = both if first else folder(both, OTHER.hash), []
    for state in kills(both.parent, lambda files: remove_index(both, index, files=files)):
        put_tree(both.parent, state.tree)
        assert held(both, kept) == left
        try:
            opened.append(held(both, gone))
        except DatastoreVocabulary:
            opened.append({})
        make(both, {"new": [1]}, vocabulary=gone)
        assert held(both, gone) == {"new": [1]}
        assert held(both, kept) == left
        remove(both)
        assert names(both.parent) == set(), "the next remove deletes what a killed one left"
    assert opened[0] == (OLD if first else NEW)
    assert opened[-1] == {}


def test_killed_before_any_step_of_removing_all(both: Path) -> None:
    """Both indexes are there or none."""
    there = []
    for state in kills(both.parent, lambda files: remove(both, files=files)):
        put_tree(both.parent, state.tree)
        there.append(both.exists())
        if there[-1]:
            assert (held(both, VOCABULARY), held(both, OTHER)) == (OLD, NEW)
            remove(both)
        else:
            remove(make(both.with_name("last"), OLD))
        assert names(both.parent) == set()
    assert there[0]
    assert not there[-1]


def test_what_was_removed_stays_removed_after_a_power_cut(both: Path) -> None:
    files = Durable()
    remove_index(both, folder(both, OTHER.hash), files=files)
    assert not any(name.startswith("vocabulary-") for name in files.names[both])
    assert held(both, VOCABULARY) == OLD


def test_a_removed_first_vocabulary_leaves_no_byte_and_its_place_is_free(both: Path) -> None:
    remove_index(both, both)
    assert names(both) == {"lock", "vocabulary-cdcdcdcdcdcdcdcd"}
    assert held(both, OTHER) == NEW
    with Datastore.open(both) as store:
        assert store.manifest.vocabulary == OTHER
    with pytest.raises(DatastoreVocabulary, match="other"):
        Datastore.open(both, vocabulary_hash=VOCABULARY.hash)
    make(both, OLD, vocabulary=THIRD)
    assert (both / MANIFEST).exists()
    make(both, {"x": [1]}, vocabulary=OTHER)
    assert (held(both, THIRD), held(both, OTHER)) == (OLD, {"x": [1]})


def test_two_writers_of_different_vocabularies_take_no_place_from_each_other(tmp_path: Path) -> None:
    """Another builder commits after this one has chosen the datastore's directory, and before it has its lock."""
    path = tmp_path / "store"

    def overtake(step: int, name: str) -> None:
        if step == 1:
            make(path, OLD)

    make(path, NEW, vocabulary=OTHER, files=Named(overtake))
    assert (held(path, VOCABULARY), held(path, OTHER)) == (OLD, NEW)


def test_a_builder_blocks_its_own_vocabulary_and_the_removal_of_all(both: Path) -> None:
    with locked(folder(both, OTHER.hash)):
        make(both, {"x": [1]})
        for blocked in (
            lambda: make(both, OLD, vocabulary=OTHER),
            lambda: remove_index(both, folder(both, OTHER.hash)),
            lambda: remove(both),
        ):
            with pytest.raises(DatastoreLocked):
                blocked()
    assert (held(both, VOCABULARY), held(both, OTHER)) == ({"x": [1]}, NEW)


def test_damage_to_one_index_leaves_the_other(both: Path) -> None:
    (folder(both, OTHER.hash) / MANIFEST).write_bytes(b"{")
    assert held(both, VOCABULARY) == OLD
    with pytest.raises(DatastoreCorrupt):
        Datastore.open(both, vocabulary_hash=OTHER.hash)
    make(both, NEW, vocabulary=OTHER)
    (both / MANIFEST).write_bytes(b"{")
    assert held(both, OTHER) == NEW
    make(both, OLD)
    assert (held(both, VOCABULARY), held(both, OTHER)) == (OLD, NEW)


def test_files_of_other_origin_and_links_are_left_alone(both: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", OLD)
    note = folder(both, OTHER.hash) / "notes.txt"
    note.write_text("mine")
    for removal in (lambda: remove(both), lambda: remove_index(both, note.parent)):
        with pytest.raises(DatastoreUnwritable, match=r"notes\.txt"):
            removal()
    note.unlink()
    (both / f"vocabulary-{'e' * 16}").symlink_to(outside)
    assert len(indexes(both)) == 2
    with pytest.raises(DatastoreUnwritable, match="vocabulary-eeee"):
        remove(both)
    assert content_of(outside) == OLD


def test_documents_are_forgotten_from_one_vocabulary(both: Path) -> None:
    kept, *others = NEW
    assert forget(both, set(others), vocabulary_hash=OTHER.hash) == len(others)
    assert (held(both, VOCABULARY), held(both, OTHER)) == (OLD, {kept: NEW[kept]})
    with pytest.raises(DatastoreVocabulary):
        forget(both, set(OLD), vocabulary_hash=THIRD.hash)
    assert forget(both, {kept}, vocabulary_hash=OTHER.hash, whole=True) == 1
    assert indexes(both) == [both]
    assert held(both, VOCABULARY) == OLD


class Tokenizer(Bytes):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.hash = name, name * 64


def test_an_index_is_built_from_the_newest_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rest_local.retrieval import build_datastore
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.sources import Walk

    source, path = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    for name in ("a.py", "b.py", "c.md"):
        (source / name).write_text(name * 10)
    given: dict[str, Any] = {"include": ["*.py"], "exclude": ["b.py"], "max_file_size": 1000, "allow_secrets": True}
    build_datastore(path, [source], vocabulary=Tokenizer("a"), **given)
    walk = Walk((str(source),), include=("*.py",), exclude=("b.py",), allow_secrets=True, max_file_size=1000)
    assert recorded_sources(path) == [walk]
