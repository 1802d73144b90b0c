"""The lock of writers, on this system and with the branches for Windows (faked: the file system stays this one)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores import NEW, OLD, content_of, make

from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.retrieval import files
from rest_local.retrieval.files import LOCK, Files, locked

ROOT = Path(__file__).resolve().parents[2]

# Takes the lock `times` times and adds one to a number each time: an unguarded reader in between would lose some.
COUNT = """
import sys
from pathlib import Path
from rest_local.retrieval import files
files.WINDOWS = {windows}
folder, number = Path({folder!r}), Path({folder!r} + ".number")
for _ in range({times}):
    with files.locked(folder, 60.0):
        number.write_text(str(int(number.read_text()) + 1))
"""
HOLD = """
import sys, time
from pathlib import Path
from rest_local.retrieval import files
files.WINDOWS = {windows}
with files.locked(Path({folder!r})):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=[False, True], ids=["here", "windows"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(files, "WINDOWS", request.param)
    return bool(request.param)


def start(program: str, **values: Any) -> subprocess.Popen[bytes]:
    code = program.format(**values)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)


def test_two_writers_never_hold_it_together(tmp_path: Path, windows: bool) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    number = Path(f"{folder}.number")
    number.write_text("0")
    writers = [start(COUNT, windows=windows, folder=str(folder), times=100) for _ in range(2)]
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert number.read_text() == "200"


def test_a_killed_owner_releases_it(tmp_path: Path, windows: bool) -> None:
    path = make(tmp_path / "store", OLD)
    owner = start(HOLD, windows=windows, folder=str(path))
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"locked\n"
        with pytest.raises(DatastoreLocked, match=f"process {owner.pid} on "):
            make(path, NEW)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    make(path, NEW)
    assert content_of(path) == NEW


def test_the_lock_is_free_again_afterwards(tmp_path: Path, windows: bool) -> None:
    for _ in range(2):
        with locked(tmp_path, make=Files()), pytest.raises(DatastoreLocked), locked(tmp_path, wait_s=0.02):
            raise AssertionError("two owners")


def test_a_file_that_cannot_be_made_is_one_error(tmp_path: Path, windows: bool) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DatastoreUnwritable), locked(file / "store"):
        raise AssertionError("locked below a file")


def test_a_link_in_its_place_is_refused(tmp_path: Path, windows: bool) -> None:
    """Another user of a shared folder could otherwise have a file of ours truncated."""
    folder, other = tmp_path / "store", tmp_path / "other"
    folder.mkdir()
    other.write_text("precious")
    (tmp_path / f".store.{LOCK}" if windows else folder / LOCK).symlink_to(other)
    with pytest.raises(DatastoreUnwritable), locked(folder):
        raise AssertionError("locked through a link")
    assert other.read_text() == "precious"


def test_a_system_without_locks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(descriptor: int, **options: object) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files, "lock_descriptor", missing)
    with pytest.raises(DatastoreUnwritable, match="not implemented"), locked(tmp_path):
        raise AssertionError("locked without a lock")


def test_on_windows_a_lock_of_a_directory_that_is_gone_guards_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOWS", True)
    with pytest.raises(DatastoreLocked, match="removes"), locked(tmp_path / "gone"):
        raise AssertionError("locked what is not there")


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Return a function that lets the first n renames fail as Windows does while a reader has the file open."""
    replace = os.replace

    def install(failures: int) -> list[int]:
        attempts: list[int] = []

        def replace_later(old: Path, new: Path) -> None:
            attempts.append(1)
            if len(attempts) <= failures:
                raise PermissionError(13, "Access is denied", str(new))
            replace(old, new)

        monkeypatch.setattr(os, "replace", replace_later)
        return attempts

    return install


def test_on_windows_a_rename_waits_for_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: Callable[[int], list[int]]
) -> None:
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "_RENAME_S", 60.0)
    attempts = busy(3)
    assert content_of(make(tmp_path / "store", OLD)) == OLD
    assert len(attempts) == 4


def test_on_windows_a_rename_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: Callable[[int], list[int]]
) -> None:
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "_RENAME_S", 0.0)
    busy(1000)
    with pytest.raises(DatastoreUnwritable, match="denied"):
        make(tmp_path / "store", OLD)


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_folder_is_one_error(tmp_path: Path, windows: bool) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    for place in (folder, tmp_path):
        place.chmod(0o500)
    try:
        with pytest.raises(DatastoreUnwritable, match="EACCES"), locked(folder):
            raise AssertionError("locked without the right to write")
    finally:
        tmp_path.chmod(0o700)
