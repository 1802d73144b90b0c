"""A walk says how the files are that it read, leaves out unchanged ones, and can look at given paths only."""

import datetime
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from edited import Folder, texts_in
from stores import NEW, OLD, OTHER, make, walk_files
from support.repository import Repository

from rest_local.retrieval import Skipped
from rest_local.retrieval.building import build as building
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.home import newest_manifest, read_manifest
from rest_local.retrieval.sources import listing as reading

LONG_AGO = 1_600_000_000_000_000_000


def files(root: Path, content: dict[str, bytes], mtime_ns: int = LONG_AGO) -> Path:
    for name, data in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return root.resolve()


def names(texts: Iterator[Text], root: Path) -> list[str]:
    return [os.path.relpath(text.name, root) for text in texts]


def test_a_state_is_of_the_bytes_that_were_read(tmp_path: Path) -> None:
    root = files(tmp_path, {"a.py": b"\xef\xbb\xbfcaf\xe9\n"})
    (text,) = walk_files([root])
    digest = hashlib.sha256(b"\xef\xbb\xbfcaf\xe9\n").digest()
    assert text == Text(f"{root}/a.py", "caf\ufffd\n", FileState(f"{root}/a.py", 8, LONG_AGO, digest))


def test_the_time_of_a_file_that_was_just_written_is_not_certain(tmp_path: Path) -> None:
    root = files(tmp_path, {"old.py": b"a"})
    files(tmp_path, {"epoch.py": b"a"}, 0)
    files(tmp_path, {"future.py": b"a"}, 1 << 62)  # or the clock went back
    (tmp_path / "new.py").write_bytes(b"a")
    found = {Path(text.name).name: text.state.mtime_ns for text in walk_files([root]) if text.state}
    assert found == {"epoch.py": 0, "future.py": 0, "new.py": 0, "old.py": LONG_AGO}


@pytest.mark.parametrize("change", ["grow", "touch", "shrink"])
def test_the_time_of_a_file_that_changes_while_it_is_read_is_not_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    root = files(tmp_path, {"a.py": b"before\n"})
    fstat, calls = os.fstat, 0

    def changing(descriptor: int) -> os.stat_result:
        nonlocal calls
        calls += 1
        if calls == 2:  # after the content was read
            if change == "touch":
                os.utime(root / "a.py", ns=(LONG_AGO + 1, LONG_AGO + 1))
            else:
                os.truncate(root / "a.py", 100 if change == "grow" else 2)
                os.utime(root / "a.py", ns=(LONG_AGO, LONG_AGO))
        return fstat(descriptor)

    monkeypatch.setattr(reading.os, "fstat", changing)
    (text,) = walk_files([root])
    assert calls == 2
    assert text.state == FileState(f"{root}/a.py", 7, 0, hashlib.sha256(b"before\n").digest())


def test_a_file_that_grows_without_end_is_read_up_to_the_cap(tmp_path: Path) -> None:
    root = files(tmp_path, {"a.py": b"x\n" * 5000})
    skipped = Skipped()
    assert list(walk_files([root], skipped, filters={"max_file_size": 1000})) == []
    assert skipped.counts == {"too large": 1}


def test_unchanged_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = files(tmp_path, {"a.py": b"a\n", "b.py": b"b\n", "c.txt": b"c\n"})
    os.link(root / "a.py", root / "d.py")
    known = {text.name: text.state for text in walk_files([root]) if text.state}
    assert len(known) == 3  # d.py is a.py
    (root / "b.py").write_bytes(b"B\n")
    opened = []
    read = reading.read_regular
    monkeypatch.setattr(
        "rest_local.retrieval.sources.walk.read_regular", lambda path, n: opened.append(path) or read(path, n)
    )

    def unchanged(name: str, size: int, mtime_ns: int) -> bool:
        return name in known and (known[name].size, known[name].mtime_ns) == (size, mtime_ns)

    sizes: list[int] = []
    texts = {Path(text.name).name: text for text in walk_files([root], unchanged=unchanged, looked_at=sizes.append)}
    assert [Path(path).name for path in opened] == ["b.py", "d.py"]
    assert texts["a.py"] == Text(f"{root}/a.py", None, FileState(f"{root}/a.py", 2, LONG_AGO, b""))
    assert texts["b.py"].text == "B\n"
    assert list(texts) == ["a.py", "b.py", "c.txt"]
    assert sum(sizes) == 8


def test_nothing_without_a_certain_time_is_taken_as_unchanged(tmp_path: Path) -> None:
    root = files(tmp_path, {"a.py": b"a\n"}, 0)
    os.mkfifo(root / "b.py")
    (root / "c.py").symlink_to(root / "a.py")
    skipped = Skipped()
    (text,) = walk_files([root], skipped=skipped, unchanged=lambda *known: True)
    assert text.text == "a\n"
    assert skipped.counts == {"not a regular file": 1, "link": 1}


TREE = {
    ".gitignore": b"ignored/\n*.log.py\n", "a.py": b"a", "sub/b.py": b"b", "sub/.gitignore": b"!kept.log.py\n",
    "sub/kept.log.py": b"k", "sub/x.bin": b"x", "x.log.py": b"x", "ignored/c.py": b"c", ".hidden/d.py": b"d",
    "sub/.e.py": b"e", "sub/id_rsa": b"f", "node_modules/g.py": b"g", "no:t*.py": b"h", "-o.py": b"i",
}  # fmt: skip


@pytest.mark.parametrize("with_git", [True, False])
def test_given_paths_are_filtered_as_in_a_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_git: bool) -> None:
    """The same files as in a walk, for all paths at once and for each alone, without listing a folder."""
    root = files(tmp_path / "root", TREE)
    outside = files(tmp_path / "outside", {"o.py": b"o"})
    (root / "linked").symlink_to(outside)
    (root / "link.py").symlink_to(outside / "o.py")
    os.mkfifo(root / "fifo.py")
    if with_git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    else:
        monkeypatch.setenv("PATH", "")
    given = [str(path) for path in root.rglob("*")] + [f"{root}/linked/o.py", f"{root}/gone.py", f"{outside}/o.py"]
    walked = names(walk_files([root]), root)
    assert {"a.py", "sub/b.py", "sub/kept.log.py", "no:t*.py", "-o.py"} <= set(walked)
    assert set(walked) <= {"a.py", "sub/b.py", "sub/kept.log.py", "no:t*.py", "-o.py", "node_modules/g.py"}

    def no_listing(path: str) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(os, "scandir", no_listing)
    assert names(walk_files([root], only=given), root) == walked
    alone = {path for path in given if names(walk_files([root], only={path}), root)}
    assert sorted(os.path.relpath(path, root) for path in alone) == sorted(walked)
    assert list(walk_files([root], only=())) == []


def test_given_paths_in_another_repository_do_not_slip_in(tmp_path: Path) -> None:
    outer = Repository(tmp_path / "outer")
    outer.commit("one", {"a.py": "a"})
    Repository(outer.path / "inner").commit("one", {"b.py": "b"})
    root = outer.path.resolve()
    given = [f"{root}/a.py", f"{root}/inner/b.py"]
    assert names(walk_files([root]), root) == names(walk_files([root], only=given), root) == ["a.py"]


LONGEST = 4096  # bytes of a path
PART = 200  # bytes of the name of a folder


@pytest.mark.parametrize("left_over", [0, 1, 2])
def test_a_path_of_4096_bytes(tmp_path: Path, left_over: int) -> None:
    """It is read where the system allows it, else counted, and the other files are read in any case.

    `left_over`: bytes that folders of PART bytes leave of it, so that the length of `tmp_path` does not matter.
    """
    to_fill = LONGEST - len("/b.py") - len(f"{tmp_path.resolve()}/")
    root = files(tmp_path / ("r" * ((to_fill - left_over) % (PART + 1) or PART + 1)), {"a.py": b"a\n"})
    folder, here = str(root), os.open(root, os.O_RDONLY)
    while left := LONGEST - len("/b.py") - len(folder):
        part = "d" * (min(PART, left - 1) - (left == PART + 2))  # Else a name of 0 bytes would be left for the last.
        os.mkdir(part, dir_fd=here)
        below = os.open(part, os.O_RDONLY, dir_fd=here)
        os.close(here)
        folder, here = f"{folder}/{part}", below
    with open(os.open("b.py", os.O_CREAT | os.O_WRONLY, dir_fd=here), "w") as file:
        file.write("b\n")
    os.close(here)
    assert len(f"{folder}/b.py") == LONGEST
    for only in (None, [f"{folder}/b.py", f"{root}/a.py"]):
        skipped = Skipped()
        found = names(walk_files([root], skipped=skipped, only=only), root)
        assert found[0] == "a.py"
        assert len(found) + skipped.counts["unreadable"] + skipped.counts["vanished"] == 2
    subprocess.run(["rm", "-rf", str(root)], check=True)


# ---- Clocks that go wrong ------------------------------------------------------------------------------------------


NOW = 1_800_000_000
BEFORE = 1_500_000_000  # before the times of change that `Folder` gives


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the clock to a time in seconds."""

    def to(seconds: int) -> None:
        fixed = SimpleNamespace(now=lambda zone: datetime.datetime.fromtimestamp(seconds, zone))
        monkeypatch.setattr(building, "datetime", SimpleNamespace(datetime=fixed, timezone=datetime.timezone))
        monkeypatch.setattr(time, "time_ns", lambda: seconds * 10**9)

    to(NOW)
    return to


def test_a_file_that_changed_after_the_clock_went_back_is_noticed(tmp_path: Path, clock: Callable[[int], None]) -> None:
    folder = Folder(tmp_path)
    folder.write("a.py", "one")
    folder.write("b.py", "same")
    folder.build()
    clock(BEFORE)
    folder.clock = BEFORE
    folder.write("a.py", "two")  # an older time of change
    assert folder.update().changed == 1
    assert texts_in(folder.path) == folder.texts()


def test_a_time_in_the_future_is_not_believed(tmp_path: Path, clock: Callable[[int], None]) -> None:
    """The file is written again at the same time of change, of the same size."""
    folder = Folder(tmp_path)
    path = folder.write("a.py", "one")
    clock(BEFORE)
    folder.build()
    status = os.stat(path)
    Path(path).write_text("two")
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert folder.update().changed == 1
    assert texts_in(folder.path) == folder.texts()


def test_the_newest_commit_is_that_of_the_highest_revision(tmp_path: Path, clock: Callable[[int], None]) -> None:
    path = make(tmp_path / "store", OLD)
    clock(BEFORE)
    make(path, NEW, vocabulary=OTHER)
    assert newest_manifest(path).vocabulary == OTHER
    assert newest_manifest(path).created < read_manifest(path).created
    make(path, NEW)
    assert newest_manifest(path) == read_manifest(path)
