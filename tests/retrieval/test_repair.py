"""A repair keeps everything that is intact, and is atomic like any commit."""

import dataclasses
import errno
from pathlib import Path

import numpy as np
import pytest
from failpoints import Named, fail_at, kills, put_tree
from stores import NEW, OLD, OTHER, VOCABULARY, content_of, make
from support.files import overwrite
from test_build import names, orphans
from test_checking import faults

from rest_local.errors import DatastoreError, DatastoreLocked, DatastoreUnwritable
from rest_local.retrieval import Datastore
from rest_local.retrieval.building.build import build, commit
from rest_local.retrieval.documents import Document, FileState, bitmap_of
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import MANIFEST, file_name
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.maintenance.checking import RepairPlan, look, plan, repair

FIRST, SECOND, THIRD = NEW
STATES = {name: FileState(name, len(tokens), 7, bytes([len(tokens)]) * 32) for name, tokens in NEW.items()}


def stored(path: Path) -> Path:
    """Store the documents of NEW, each in a segment with its file's state."""
    documents = [Document(name, np.array(tokens, np.int32), (STATES[name],)) for name, tokens in NEW.items()]
    build(path, documents, vocabulary=VOCABULARY, segment_tokens=4, recipe={"paths": ["src"]})
    return path


def damage(path: Path, number: int, kind: str) -> Path:
    file = path / file_name(read_manifest(path).segments[number].name, kind)
    overwrite(file, b"?" + file.read_bytes()[1:])
    return file


def repaired(path: Path, files: Files | None = None) -> list[RepairPlan]:
    plans = [plan(one) for one in look(path) if one.faults]
    for planned in plans:
        repair(planned, files=files)
    return plans


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "store")


def held(path: Path) -> dict[str, tuple[list[int], tuple[FileState, ...]]]:
    with Datastore.open(path) as store:
        documents = [document for index in range(len(store.segments)) for document in store.documents(index)]
    return {document.name: (document.tokens.tolist(), document.states) for document in documents}


@pytest.mark.parametrize("kind", ["tokens", "documents"])
def test_a_segment_whose_text_is_damaged_is_dropped_with_its_states(store, kind):
    damage(store, 1, kind)
    kept = {read_manifest(store).segments[number].name for number in (0, 2)}
    (planned,) = repaired(store)
    assert planned.lost_names == (SECOND,), "from the states if the documents are damaged"
    assert planned.lost_tokens == len(NEW[SECOND]) + 1
    assert content_of(store) == {FIRST: NEW[FIRST], THIRD: NEW[THIRD]}
    assert {name for name, (_, states) in held(store).items() if states} == {FIRST, THIRD}
    assert {entry.name for entry in read_manifest(store).segments} == kept, "nothing else was written again"
    assert read_manifest(store).recipe == {"paths": ["src"]}
    assert faults(store) == []


@pytest.mark.parametrize("kind", ["order", "states"])
@pytest.mark.parametrize("way", ["damaged", "missing", "cut"])
def test_what_follows_from_the_text_is_written_again(store, kind, way):
    file = damage(store, 1, kind)
    if way == "missing":
        file.unlink()
    elif way == "cut":
        file.write_bytes(b"")
    (planned,) = repaired(store)
    assert not planned.lost
    assert content_of(store) == NEW
    states = held(store)[SECOND][1]
    assert states == (() if kind == "states" else (STATES[SECOND],)), "an update reads a file without a state again"
    assert faults(store) == []
    assert orphans(store) == set()


def test_deleted_documents_stay_deleted(tmp_path):
    path = tmp_path / "store"
    states = {name: (state, state._replace(name=f"copy of {name}")) for name, state in STATES.items()}
    documents = [Document(name, np.array(tokens, np.int32), states[name]) for name, tokens in NEW.items()]
    manifest = build(path, documents, vocabulary=VOCABULARY)
    (entry,) = manifest.segments
    entry = dataclasses.replace(entry, dead=bitmap_of([1], 3), gone=bitmap_of([2, 3, 4], 6))
    with locked(path):
        commit(path, vocabulary=VOCABULARY, keep=(entry,), files=Files())
    before = held(path)
    assert {*before} == {FIRST, f"copy of {THIRD}"}  # the document is shown under the file that still has its content
    damage(path, 0, "order")
    repaired(path)
    assert held(path) == before
    assert [state.name for state in before[f"copy of {THIRD}"][1]] == [f"copy of {THIRD}"]
    damage(path, 0, "tokens")
    (planned,) = [plan(one) for one in look(path) if one.faults]
    assert planned.hopeless


def test_nothing_intact_is_left_as_it_is(store):
    for number in range(3):
        damage(store, number, "tokens")
    before = {name: (store / name).read_bytes() for name in names(store)}
    (planned,) = repaired(store)
    assert "no segment" in planned.hopeless
    assert {name: (store / name).read_bytes() for name in names(store)} == before


def killed_after_its_copy(path: Path) -> None:
    """Kill a build just before its rename, which leaves the new manifest and a copy of the old one."""

    class Killed(BaseException):
        pass

    class Dying(Files):
        def rename(self, old: Path, new: Path) -> None:
            raise Killed

        def unlink(self, path: Path) -> None:
            pass

    with pytest.raises(Killed):
        make(path, OLD, files=Dying())


def test_a_damaged_manifest_is_replaced_by_the_newest_complete_copy(store):
    killed_after_its_copy(store)
    overwrite(store / MANIFEST, b"?")
    (planned,) = repaired(store)
    assert planned.copy is not None
    assert content_of(store) == OLD
    repaired(store)
    assert faults(store) == []
    assert orphans(store) == set()


def test_a_copy_that_is_not_complete_is_not_taken(store):
    killed_after_its_copy(store)
    new = {name for name in orphans(store) if name.endswith("order.bin")}
    (store / new.pop()).unlink()
    overwrite(store / MANIFEST, b"?")
    repaired(store)
    assert content_of(store) == NEW, "the copy of the old manifest"
    repaired(store)
    overwrite(store / MANIFEST, b"?")
    before = names(store)
    (planned,) = repaired(store)
    assert "no copy" in planned.hopeless
    assert names(store) == before, "no segment is deleted"


def test_what_killed_processes_left_is_deleted(store):
    killed_after_its_copy(store)
    left = [
        store / f"staging-{'1' * 16}",
        store.parent / f".removed-{'3' * 16}",
    ]
    for directory in left:
        directory.mkdir()
        (directory / "lock").touch()
    (left[0] / "inside").mkdir()
    (left[0] / "inside" / "plan.json").touch()
    before = read_manifest(store)
    plans = repaired(store)
    assert sum(len(planned.left) for planned in plans) == len(orphans(store)) + len(left) + 5
    assert faults(store) == []
    assert names(store.parent) == {"store"}
    assert read_manifest(store) == before, "without a commit"


def test_files_of_other_origin_stay(store):
    (store / "notes.txt").write_text("mine")
    trash = store.parent / f".removed-{'3' * 16}"
    trash.mkdir()
    (trash / "mine.txt").touch()
    with pytest.raises(DatastoreUnwritable):
        repaired(store)
    assert (trash / "mine.txt").exists()
    assert (store / "notes.txt").exists()


def test_other_vocabularies_are_not_touched(store):
    make(store, OLD, vocabulary=OTHER)
    (folder,) = store.glob("vocabulary-*")
    before = {name: (folder / name).stat().st_mtime_ns for name in names(folder)}
    damage(store, 0, "tokens")
    repaired(store)
    assert {name: (folder / name).stat().st_mtime_ns for name in names(folder)} == before
    assert content_of(folder) == OLD


def test_a_commit_or_a_writer_since_the_look_is_refused(store):
    damage(store, 0, "tokens")
    plans = [plan(one) for one in look(store) if one.faults]
    with locked(store), pytest.raises(DatastoreLocked):
        repair(plans[0])
    make(store, OLD)
    with pytest.raises(DatastoreError, match="check it again"):
        repair(plans[0])
    assert content_of(store) == OLD


def broken(path: Path) -> Path:
    stored(path)
    damage(path, 0, "order")
    damage(path, 1, "tokens")
    return path


REPAIRED = {FIRST: NEW[FIRST], THIRD: NEW[THIRD]}


def test_killed_before_any_step_of_a_repair(tmp_path):
    path, done = broken(tmp_path / "store"), []
    for state in kills(path, lambda files: repaired(path, files)):
        put_tree(path, state.tree)
        done.append(not any(fault.segment for fault in faults(path)))
        repaired(path)
        assert content_of(path) == REPAIRED
        assert orphans(path) == set()
    assert done[0] < done[-1]


def test_a_disk_that_fails_at_every_step_of_a_repair(tmp_path):
    counted, failed = Named(), 0
    repaired(broken(tmp_path / "counted"), counted)
    for failing in range(1, counted.steps + 1):
        path = broken(tmp_path / str(failing))
        before = {name: (path / name).read_bytes() for name in names(path)}
        try:
            repaired(path, Named(fail_at(failing, errno.EIO)))
        except DatastoreUnwritable:
            failed += 1
            assert {name: (path / name).read_bytes() for name in before} == before
        repaired(path)
        assert content_of(path) == REPAIRED
    assert failed
