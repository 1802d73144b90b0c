"""What a watcher makes of events and of paths that vanish, with an update that only notes what it was asked for."""

import os
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import VOCABULARY, make, walked

from rest_local.errors import DatastoreError, DatastoreLocked, DatastoreNotFound, DatastoreUnwritable
from rest_local.retrieval.home import find, read_manifest
from rest_local.retrieval.staging import remove
from rest_local.retrieval.update import watching as watched
from rest_local.retrieval.update.watching import ADDED, DELETED, MODIFIED, Changes, Commit, Target, Watcher

TOY = SimpleNamespace(hash=VOCABULARY.hash, size=VOCABULARY.size, name=VOCABULARY.name)


class Noted:
    """An update that notes its files, None for a full one. errors: raised by the next calls."""

    def __init__(self) -> None:
        self.calls: list[set[str] | None] = []
        self.errors: list[Exception] = []
        self.called = threading.Event()
        self.changes = 1

    def __call__(self, path: Path, *, vocabulary: Any, only: Collection[str] | None = None) -> Any:
        self.calls.append(None if only is None else set(only))
        self.called.set()
        if self.errors:
            raise self.errors.pop(0)
        manifest = read_manifest(find(path, vocabulary.hash))
        return SimpleNamespace(added=0, changed=self.changes, deleted=0, tokens=5, manifest=manifest)

    @property
    def full(self) -> int:
        return self.calls.count(None)


class Clock:
    """Stands still unless a script moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float) -> Callable[[], None]:
        def move() -> None:
            self.now += seconds

        return move


class Project:
    """Files, their index, and a watcher of it that gets the events of a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = (folder / "src").resolve()
        self.store = folder / "store"
        self.folder.mkdir()
        self.write("a.py")
        recipe = walked(self.folder)
        make(self.store, {str(self.folder / "a.py"): [1, 2]}, recipe=recipe)
        self.update, self.clock = Noted(), Clock()
        self.commits: list[Commit] = []
        self.watched: list[list[Path]] = []
        self.target = Target("mine", self.store, TOY)

    def write(self, name: str, text: str = "x = 1\n") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, *script: Changes | Callable[[], object], **options: Any) -> Watcher:
        """Run a watcher through the script: its batches, and calls before the next one."""
        steps, stop = list(script), threading.Event()

        def events(roots: Sequence[Path], ended: threading.Event) -> Generator[Changes, None, None]:
            self.watched.append(list(roots))
            yield ()
            while steps:
                step = steps.pop(0)
                yield step() or () if callable(step) else step  # type: ignore[misc]
            stop.set()

        def ticks(seconds: float) -> bool:  # Without a directory to watch there are no events, but time goes on.
            while steps:
                step = steps.pop(0)
                if callable(step):
                    step()
                return False
            stop.set()
            return True

        stop.wait = ticks  # type: ignore[assignment, method-assign]
        options = {"events": events, "clock": self.clock, **options}
        watcher = Watcher([self.target], self.update, self.commits.append, **options)
        watcher.run(stop)
        return watcher


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_full_update_at_the_start_then_the_changed_files_only(project: Project) -> None:
    a, b = project.path("a.py"), project.path("b.py")
    project.run([(MODIFIED, a)], [(ADDED, b), (MODIFIED, a)], [])
    assert project.update.calls == [None, {a}, {a, b}]
    assert [commit.counts.changed for commit in project.commits] == [1, 1, 1]


def test_files_of_a_new_directory_need_no_events(project: Project) -> None:
    wanted = project.write("new/deep/b.py")
    project.write("new/deep/.secret.py")
    project.write("new/node_modules/c.js")
    project.write("new/photo.jpeg")
    project.run([(ADDED, project.path("new"))])
    assert project.update.calls == [None, {wanted}]


def test_a_directory_with_a_dot_is_noticed_later(project: Project) -> None:
    project.run([(DELETED, project.path("v1.2"))], [], project.clock.later(60), [])
    assert project.update.calls == [None, None]


def test_full_updates_take_a_small_share_of_the_time(project: Project) -> None:
    """Something that writes rules of git all the time, on a tree whose walk takes two seconds."""
    real = project.update.__call__

    def slow(path: Path, *, vocabulary: Any, only: Collection[str] | None = None) -> Any:
        project.clock.now += 2
        return real(path, vocabulary=vocabulary, only=only)

    project.update = slow  # type: ignore[assignment]
    noted = real.__self__  # type: ignore[attr-defined]
    project.run(*([[(MODIFIED, project.path("out/.gitignore"))], project.clock.later(0.5)] * 80))
    assert 1 <= noted.full - 1 <= 2


def test_many_files_at_once_make_a_full_update(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MANY", 3)
    project.run([(MODIFIED, project.path(f"{number}.py")) for number in range(4)])
    assert project.update.calls == [None, None]


def test_other_rules_of_git_make_a_full_update(project: Project) -> None:
    project.run([(MODIFIED, project.path("sub/.gitignore"))])
    assert project.update.calls == [None, None]


def test_everything_is_looked_at_again_after_a_while(project: Project) -> None:
    """An event may be lost without a trace."""
    a = project.path("a.py")
    project.run([(MODIFIED, a)], project.clock.later(5), project.clock.later(6), [], project.clock.later(100), [])
    assert project.update.calls == [None, {a}, None]


def test_a_folder_that_vanishes_keeps_its_text(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is updated until there is something again. Then all of it is, and it is watched anew."""
    away = project.folder.with_name("away")
    events = [(DELETED, project.path("a.py")), (DELETED, str(project.folder))]

    def vanish() -> Changes:
        project.folder.rename(away)
        return events

    project.run(vanish, lambda: None, project.clock.later(1000), lambda: away.rename(project.folder), lambda: None, [])
    assert project.update.calls == [None, None]
    assert [len(roots) for roots in project.watched] == [1, 1]
    assert sum("vanished or is empty" in record.message for record in caplog.records) == 1


def test_an_empty_folder_may_be_a_drive_that_is_not_mounted(project: Project) -> None:
    os.unlink(project.path("a.py"))
    project.run([(DELETED, project.path("a.py"))], project.clock.later(1000), [])
    assert project.update.calls == []
    project.write("a.py")
    project.run([])
    assert project.update.calls == [None]


def test_a_folder_that_was_replaced_is_watched_anew(project: Project) -> None:
    def replace() -> None:
        project.folder.rename(project.folder.with_name("old"))
        project.write("b.py")

    b = project.path("b.py")
    project.run(replace, [(MODIFIED, b)])
    assert project.update.calls == [None, None, {b}]
    assert len(project.watched) == 2


def test_another_writer_goes_first(project: Project) -> None:
    a = project.path("a.py")
    project.run(lambda: project.update.errors.append(DatastoreLocked(project.store, "another")), [(MODIFIED, a)], [],
                project.clock.later(2), [])  # fmt: skip
    assert project.update.calls == [None, {a}, {a}]


def test_a_full_disk_is_told_once_and_tried_again(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    full = [DatastoreUnwritable(project.store, "No space left on device") for _ in range(3)]
    project.run(lambda: project.update.errors.extend(full), [(MODIFIED, project.path("a.py"))],
                *([project.clock.later(2), []] * 4))  # fmt: skip
    assert len(project.update.calls) == 5
    assert sum("No space left" in record.message for record in caplog.records) == 1
    assert len(project.commits) == 2


def test_a_removed_datastore_ends_the_watch(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> None:
        remove(project.store)
        project.update.errors.append(DatastoreNotFound(project.store))

    watcher = project.run(gone, [(MODIFIED, project.path("a.py"))], lambda: pytest.fail("it goes on"))
    assert watcher.indexes == []
    assert "no longer watched" in caplog.text


def test_an_index_that_comes_later_is_watched_then(project: Project) -> None:
    a, batches = project.path("a.py"), [[], [project.target], None]
    project.run([], [], [(MODIFIED, a)], more=lambda: batches.pop(0) if len(batches) > 1 else None)
    assert project.update.calls[-1] == {a}


def test_where_the_system_cannot_watch_all_files_are_looked_at(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    def none(roots: Sequence[Path], stop: threading.Event) -> Generator[Changes, None, None]:
        raise OSError(28, "OS file watch limit reached")
        yield ()

    project.run(*([project.clock.later(2)] * 7), events=none)
    assert project.update.full == 3
    assert "watch limit reached" in caplog.text


def test_a_datastore_of_other_origin_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "x", {"a": [1]}, recipe={})
    with pytest.raises(DatastoreError, match="not built from files"):
        Watcher([Target("x", path, TOY)], Noted())


def test_the_system_tells_of_a_file_that_was_saved_by_rename(project: Project) -> None:
    """The whole way, with real events."""
    stop = threading.Event()
    watcher = Watcher([project.target], project.update, project.commits.append)
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        assert project.update.called.wait(60), "the update at the start, when the folder is watched already"
        project.update.called.clear()
        project.write("a.py~tmp", "x = 2\n")
        os.replace(project.path("a.py~tmp"), project.path("a.py"))
        assert project.update.called.wait(60)
    finally:
        stop.set()
        thread.join(60)
    assert project.update.calls[:2] == [None, {project.path("a.py")}]
