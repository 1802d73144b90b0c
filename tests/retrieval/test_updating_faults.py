"""Updates and merges at once, and under the eyes of readers. `test_failpoints` kills them at every step."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from changes import prepared, set_small
from edited import Folder, texts_in

from rest_local.errors import DatastoreLocked
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.update.merging import merge


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small(monkeypatch.setattr)


def test_writers_of_all_kinds_at_once(tmp_path: Path) -> None:
    """Two updaters and a merger, while the files change: nothing is lost in the end."""
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

    kinds: list[Callable[[], object]] = [
        folder.update,
        folder.update,
        lambda: merge(folder.path),
    ]
    threads = [threading.Thread(target=again, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
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
    assert texts_in(folder.path) == folder.texts()


def texts_of(store: Datastore) -> tuple[int, set[str]]:
    """Return the number of files, and the texts of all but `z.py`."""
    documents = [document for index in range(len(store.segments)) for document in store.documents(index)]
    found = {state.name: document.tokens for document in documents for state in document.states}
    return len(found), {bytes(ids.astype(np.uint8)).decode() for name, ids in found.items() if "z.py" not in name}


def test_readers_see_the_old_or_the_new_commit(tmp_path: Path) -> None:
    """One file is `x n` in every commit together with the file `y n`; a reader never sees two different n."""
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
    for number in range(1, 13):
        for name in ("x.py", "y.py"):
            folder.write(name, f"number {number}")
        folder.update(merging=True)
    done.set()
    for reader in readers:
        reader.join()
    assert mixed == []
    assert len(looks) > 3
