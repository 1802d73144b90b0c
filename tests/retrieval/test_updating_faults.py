"""Updates, additions, removals and merges are atomic: killed at every step, on a disk that fails at every step, with
several writers, and under the eyes of readers.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edited import Bytes, Folder, text_on_disk, texts_in
from stores import kill_at_every_step
from test_build import Counting

from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.retrieval.building.staged import stagings
from rest_local.retrieval.changing import merging, updating
from rest_local.retrieval.changing.forgetting import forget
from rest_local.retrieval.changing.merging import merge
from rest_local.retrieval.changing.updating import add
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import VocabularyId, file_name, owns
from rest_local.retrieval.home import read_manifest

pytestmark = pytest.mark.usefixtures("unsynced")

SMALL = 30
MUCH = "much\n" * 20


def prepared(directory: Path) -> Folder:
    """A folder whose datastore has three segments and deleted text, and in which files changed since."""
    folder = Folder(directory)
    folder.write("a.py", "alpha")
    folder.write("kept.py", "kept " * 10)
    folder.build()
    folder.write("s.py", "secret " * 10)
    folder.write("t.py", "text " * 10)
    folder.update()
    folder.write("s.py", "another secret " * 5)
    folder.write("u.py", "more " * 10)
    folder.update()
    folder.write("a.py", "changed")
    folder.write("much.py", MUCH)
    folder.delete("t.py")
    return folder


def change(folder: Folder, how: str, files: Files) -> None:
    """Make a change in the way of `how`."""
    if how == "update":
        folder.update(files=files)
    elif how == "small update":
        folder.update(files=files, only=[str(folder.source / "a.py")])
    elif how == "add":
        known = Bytes()
        identity = VocabularyId(known.hash, known.size, known.name)
        add(folder.path, [("stored:x", known.tokenize("x"))], vocabulary=identity, files=files)
    elif how == "forget":
        forget(folder.path, {str(folder.source / "s.py")}, files=files)
    elif how == "merge":
        merge(folder.path, everything=True, files=files)


HOW = ["update", "small update", "add", "forget", "merge"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "SMALL_SEGMENT", SMALL)
    monkeypatch.setattr(merging, "SMALL_SEGMENT", SMALL)


def in_child() -> None:
    """What the fixtures do, for the processes that are killed."""
    updating.SMALL_SEGMENT = merging.SMALL_SEGMENT = SMALL
    os.fsync = lambda descriptor: None


def copied(folder: Folder, path: Path) -> Folder:
    """The same folder with a copy of its datastore at `path`."""
    shutil.copytree(folder.path, path)
    return opened(folder.source, path)


def opened(source: Path, path: Path) -> Folder:
    """A folder and its datastore, which another process made."""
    folder = Folder.__new__(Folder)
    folder.source, folder.path = source, path
    return folder


def left_over(path: Path) -> set[str]:
    """Files that no manifest names, and staging directories."""
    kept = {file_name(entry.name, kind) for entry in read_manifest(path).segments for kind in entry.files}
    files = {name for name in os.listdir(path) if owns(name) and name not in kept}
    return files | {place.name for place in stagings(path)}


def clean_by_the_next_commit(folder: Folder) -> None:
    change(folder, "add", Files())
    assert left_over(folder.path) == set()


def before_and_after(folder: Folder, how: str) -> tuple[dict[str, str], dict[str, str], int]:
    """What the datastore holds before and after a change, and the file operations of the change."""
    counting = Counting(lambda step, name: None)
    changed = copied(folder, folder.path.parent / "counted")
    change(changed, how, counting)
    return texts_in(folder.path), texts_in(changed.path), counting.steps


@pytest.mark.parametrize("how", HOW)
def test_killed_at_every_step(tmp_path: Path, how: str) -> None:
    folder = prepared(tmp_path)
    before, after, steps = before_and_after(folder, how)
    assert steps > 8
    for step in range(1, steps + 1):
        copied(folder, tmp_path / str(step))
    line = f"import test_updating_faults as t; t.in_child(); t.change(t.opened(Path({str(folder.source)!r}), path), "
    kill_at_every_step(tmp_path, steps, f"{line}{how!r}, files)")
    seen = []
    for step in range(1, steps + 1):
        again = opened(folder.source, tmp_path / str(step))
        seen.append(texts_in(again.path))
        assert seen[-1] in (before, after)
        change(again, how, Files())  # the lock of a killed process does not block
        assert texts_in(again.path) == after
        if how == "forget":
            assert not any("secret" in text for text in text_on_disk(again.path))
        clean_by_the_next_commit(again)
    assert before in seen
    assert after in seen or how == "merge"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("how", HOW)
def test_a_disk_that_fails_at_every_step(tmp_path: Path, how: str, code: int) -> None:
    folder = prepared(tmp_path)
    before, after, steps = before_and_after(folder, how)
    failed = []
    for failing in range(1, steps + 1):

        def fail(step: int, name: str, failing: int = failing) -> None:
            if step == failing:
                raise OSError(code, os.strerror(code))

        again = copied(folder, tmp_path / str(failing))
        try:
            change(again, how, Counting(fail))
        except DatastoreUnwritable as error:
            failed.append(str(error))
        assert texts_in(again.path) in (before, after)
        change(again, how, Files())
        assert texts_in(again.path) == after
        clean_by_the_next_commit(again)
        shutil.rmtree(again.path)
    assert len(failed) > 4
    assert all(os.strerror(code) in error for error in failed)


def test_writers_of_all_kinds_at_once(tmp_path: Path) -> None:
    """Two updaters, a merger and one that adds, while the files change: nothing is lost in the end."""
    folder = prepared(tmp_path)
    done = threading.Event()
    errors: list[BaseException] = []

    def again(work: Callable[[], object]) -> None:
        try:
            while not done.is_set():
                try:
                    work()
                except DatastoreLocked:
                    continue
        except BaseException as error:
            errors.append(error)

    known = Bytes()
    identity = VocabularyId(known.hash, known.size, known.name)
    kinds: list[Callable[[], object]] = [
        folder.update,
        folder.update,
        lambda: merge(folder.path),
        lambda: add(folder.path, [("stored:x", known.tokenize("x"))], vocabulary=identity),
    ]
    threads = [threading.Thread(target=again, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        for number in range(40):
            folder.write(f"{number % 7}.py", f"number {number} " * (number % 5 + 1))
            if number % 3 == 0:
                folder.delete(f"{number % 7}.py")
            folder.update()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    folder.update()
    assert texts_in(folder.path) == {**folder.texts(), "stored:x": "x"}


def texts_of(store: Datastore) -> tuple[int, set[str]]:
    """The number of files, and the texts of all but `z.py`."""
    documents = [document for index in range(len(store.segments)) for document in store.documents(index)]
    found = {state.name: document.tokens for document in documents for state in document.states}
    return len(found), {bytes(ids.astype(np.uint8)).decode() for name, ids in found.items() if "z.py" not in name}


def test_readers_see_the_old_or_the_new_commit(tmp_path: Path) -> None:
    """One file is `x n` in every commit with the file `y n` beside it; a reader never sees two different n."""
    folder = Folder(tmp_path)
    for name in ("x.py", "y.py"):
        folder.write(name, "number 0")
    folder.write("z.py", "z" * 200)
    folder.build()
    done = threading.Event()
    mixed: list[set[str]] = []
    looks: list[int] = []

    def look() -> None:
        while not done.is_set():
            try:
                with Datastore.open(folder.path) as store:
                    count, texts = texts_of(store)
                    rows = store.rows(np.frombuffer(b"number ", np.uint8).astype(np.int32), 8, 2)
            except FileNotFoundError:  # a newer commit deleted the states, which are read when they are asked for
                continue
            looks.append(1)
            numbers = {int(row[0]) for row, match in zip(rows.continuations, rows.match, strict=True) if match == 7}
            if len(texts) != 1 or count != 3 or len(numbers) != 1:
                mixed.append(texts)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 40):
        for name in ("x.py", "y.py"):
            folder.write(name, f"number {number}")
        folder.update(merging=True)
    done.set()
    for reader in readers:
        reader.join()
    assert mixed == []
    assert len(looks) > 3
