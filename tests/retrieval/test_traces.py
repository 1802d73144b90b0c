"""After a kill at any step, and `forget`, no file of the data directory holds the forgotten text.

Looked for are the text and its tokens, in both directions and all widths, in every byte of every file (`traces`).
"""

import os
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from changes import left_over, opened, set_small
from click.testing import CliRunner
from edited import IDENTITY, Bytes, Folder, merge_all
from failpoints import Killed, kills, put_tree, shape
from test_failpoints import commit_of
from traces import SECRET, traces

from rest_local.cli.main import cli
from rest_local.errors import DatastoreLocked, DatastoreNotFound
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import MANIFEST, file_name
from rest_local.retrieval.history import History, forget_history, history_home, list_histories
from rest_local.retrieval.staging import clear, remove, staging
from rest_local.retrieval.update.forgetting import forget, names_in
from rest_local.retrieval.update.merging import merge
from rest_local.retrieval.update.updating import update
from rest_local.retrieval.update.watching import MODIFIED, Changes, Target, Watcher

KNOWN = Bytes()
SOURCE = "source"  # next to `home`, the folder of datastores
NAME = "secret.py"


def of(home: Path) -> Folder:
    return opened(home.parent / SOURCE, home / "store")


def _build(home: Path, files: Files) -> None:
    build_datastore(home / "store", [home.parent / SOURCE], vocabulary=KNOWN, files=files)


def _update(home: Path, files: Files) -> None:
    of(home).update(files=files, merging=True)


def _merge(home: Path, files: Files) -> None:
    merge_all(home / "store", files=files)


def _forget(home: Path, files: Files) -> None:
    forget(home / "store", {str(home.parent / SOURCE / NAME)}, files=files)


def _watch(home: Path, files: Files) -> None:
    """Watch until one event is seen."""
    stop = threading.Event()

    def events(roots: object, ended: threading.Event) -> Generator[Changes, None, None]:
        yield [(MODIFIED, str(home.parent / SOURCE / NAME))]
        stop.set()

    target = Target("store", home / "store", KNOWN)
    Watcher([target], partial(update, files=files), events=events).run(stop)


def _remove(home: Path, files: Files) -> None:
    remove(home / "store", files=files)


def nothing(home: Path) -> None:
    home.mkdir()


def with_other_text(home: Path) -> None:
    """Make a datastore without the secret, to which it comes."""
    home.mkdir()
    away = home.parent / SOURCE / NAME
    text = away.read_text()
    away.unlink()
    _build(home, Files())
    away.write_text(text)


def with_secret(home: Path) -> None:
    """Make a datastore of several segments that holds the secret."""
    with_other_text(home)
    of(home).update()


Work = Callable[[Path, Files], None]
WAYS: dict[str, tuple[Callable[[Path], None], Work]] = {
    "first build": (nothing, _build),
    "build": (with_other_text, _build),
    "update and merge": (with_other_text, _update),
    "merge": (with_secret, _merge),
    "rebuild": (with_secret, _build),
    "forget": (with_secret, _forget),
    "removal": (with_secret, _remove),
    "watch": (with_other_text, _watch),
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return secret_files(tmp_path, monkeypatch)


def secret_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make files, one of them secret."""
    set_small(monkeypatch.setattr)
    source = tmp_path / SOURCE
    source.mkdir()
    for name, text in (("a.py", "alpha " * 20), (NAME, SECRET), ("z.py", "omega " * 20)):
        (source / name).write_text(text)
        os.utime(source / name, (1e9, 1e9))
    return tmp_path


def killed(base: Path, way: str) -> Iterator[Killed]:
    """Yield what kills before each step leave, with each state in the folder of datastores `home`."""
    prepare, work = WAYS[way]
    home = base / "home"
    prepare(home)
    for state in kills(home, lambda files: work(home, files), halves=True):
        put_tree(home, state.tree)
        yield state


def run(home: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(home))
    return CliRunner().invoke(cli, ["index", *arguments]).output


@pytest.mark.parametrize("way", WAYS)
def test_killed_before_any_step_and_forgotten(base: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, home = 0, base / "home"
    for state in killed(base, way):
        held += bool(traces(home))
        said = run(home, "forget", "store", str(base / SOURCE / NAME), NAME, "--yes", monkeypatch=monkeypatch)
        assert traces(home) == [], (state.before, said)
        if (home / "store" / MANIFEST).exists():
            with Datastore.open(home / "store") as store:
                store.check()
                assert not any(NAME in name for name in names_in(store))
    assert held, "the text was on the disk after some of the kills"


def test_a_watch_that_was_killed_at_any_step_goes_on(base: Path) -> None:
    """The commit before or after it is whole, and the next watch makes what is missing and deletes what was left."""
    found, home = [], base / "home"
    for _ in killed(base, "watch"):
        found.append(commit_of(home / "store")[0])
        _watch(home, Files())
        assert commit_of(home / "store")[0] == of(home).texts()
        assert left_over(home / "store") == set()
        assert [path.name for path in home.iterdir()] == ["store"]
    assert {len(texts) for texts in found} == {2, 3}, "without and with the new file"


@pytest.mark.parametrize(
    ("command", "way"),
    [("list", "removal"), ("list", "update and merge"), ("update", "update and merge")],
)
def test_other_commands_clear_as_well(base: Path, way: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead writer left is gone after `list` or an update: what there is, a commit names."""
    home, seen = base / "home", []
    for state in killed(base, way):
        if (names := shape(state.tree)) in seen:  # names alone say what is deleted
            continue
        seen.append(names)
        if command == "list":
            run(home, "list", monkeypatch=monkeypatch)
        else:
            try:
                of(home).update(only=[])
            except DatastoreNotFound:
                continue
        assert [path.name for path in home.iterdir() if path.name != "store"] == []
        if (home / "store" / MANIFEST).exists():
            assert left_over(home / "store") == set()


def test_what_a_living_writer_uses_stays(base: Path) -> None:
    """An update that is staged, and segments that are about to be committed."""
    home = base / "home"
    with_secret(home)
    store = home / "store"
    segment = file_name("2" * 16, "tokens")
    with staging(store, Files()) as staged:
        (staged / segment).write_bytes(b"in use")
        with locked(store):
            (store / segment).write_bytes(b"in use")
            clear(store, everything=True)
            assert (store / segment).exists()
        clear(store, everything=True)
        assert not (store / segment).exists()
        assert (staged / segment).exists()
        assert (staged / segment).exists()
    clear(store)
    assert not staged.exists()


def left_by_dead_writers(store: Path) -> list[Path]:
    """Leave one leftover of each kind, with the secret in it."""
    tokens = file_name("2" * 16, "tokens")
    left = [
        store / tokens,
        store / f"staging-{'1' * 16}" / tokens,
        store / f"staging-{'2' * 16}" / "plan.json",
        store.parent / f".removed-{'1' * 16}" / tokens,
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text(SECRET)
    return left


@pytest.mark.parametrize("way", ["forget", "merge", "build"])
def test_every_writer_clears_before_it_writes(base: Path, way: str) -> None:
    """So a full disk has room again: the first new file comes when everything old is gone."""
    home = base / "home"
    with_other_text(home)
    left = left_by_dead_writers(home / "store")

    class First(Files):
        def create(self, path: Path) -> int:
            assert not any(path.exists() for path in left)
            return super().create(path)

    work: dict[str, Callable[[], object]] = {
        "forget": lambda: forget(home / "store", {str(base / SOURCE / "a.py")}, files=First()),
        "merge": lambda: merge(home / "store", files=First()),
        "build": lambda: _build(home, First()),
    }
    work[way]()
    assert not any(path.exists() for path in left)


def test_a_datastore_that_is_copied_here_is_not_taken_for_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments are there before its manifest."""
    home = base / "home"
    with_secret(home)
    manifest = (home / "store" / MANIFEST).read_bytes()
    (home / "store" / MANIFEST).unlink()
    assert "has not ended" in run(home, "list", monkeypatch=monkeypatch)
    (home / "store" / MANIFEST).write_bytes(manifest)
    assert commit_of(home / "store")[0] == of(home).texts()


def test_a_first_build_that_was_killed_is_listed_and_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a datastore that is being copied, so only `forget`, `remove` and another build delete its files."""
    home = base / "home"
    (home / "store").mkdir(parents=True)
    (home / "store" / file_name("2" * 16, "tokens")).write_text(SECRET)
    for _ in range(2):
        said = run(home, "list", monkeypatch=monkeypatch)
        assert "\nstore  its build has not ended; `rest-local index remove store`" in said
    with locked(home / "store"), pytest.raises(DatastoreLocked):
        remove(home / "store")
    assert "unfinished build" in run(home, "forget", "store", NAME, monkeypatch=monkeypatch)
    assert list(home.iterdir()) == []


# Histories


def history_work(path: Path, what: str, files: Files) -> None:
    if what == "removal":
        remove(path, files=files)
        return
    history = History.open(path, IDENTITY, files=files)
    history.add(np.frombuffer(SECRET.encode(), np.uint8).astype(np.int32))
    history.close()


@pytest.mark.parametrize("what", ["first", "removal"])
def test_histories_killed_before_any_step_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path))
    home, held = history_home(), 0
    if what == "removal":
        history_work(home / "toy", "first", Files())
    for state in kills(home, lambda files: history_work(home / "toy", what, files), halves=True):
        put_tree(home, state.tree)
        held += bool(traces(tmp_path))
        for entry in list_histories():
            forget_history(entry.name)
        assert traces(tmp_path) == [], state.before
    assert held
