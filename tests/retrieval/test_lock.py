"""The lock of writers."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stores import NEW, OLD, content_of, make

from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.retrieval import files
from rest_local.retrieval.files import LOCK, locked

ROOT = Path(__file__).resolve().parents[2]

# Takes the lock `times` times and adds one to a number each time: an unguarded reader in between would lose some.
COUNT = """
import sys
from pathlib import Path
from rest_local.retrieval import files
folder, number = Path({folder!r}), Path({folder!r} + ".number")
for _ in range({times}):
    with files.locked(folder, 60.0):
        number.write_text(str(int(number.read_text()) + 1))
"""
HOLD = """
import sys, time
from pathlib import Path
from rest_local.retrieval import files
with files.locked(Path({folder!r})):
    print("locked", flush=True)
    time.sleep(600)
"""


def start(program: str, **values: Any) -> subprocess.Popen[bytes]:
    code = program.format(**values)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)


def test_two_writers_never_hold_it_together(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    number = Path(f"{folder}.number")
    number.write_text("0")
    writers = [start(COUNT, folder=str(folder), times=100) for _ in range(2)]
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert number.read_text() == "200"


def test_a_killed_owner_releases_it(tmp_path: Path) -> None:
    path = make(tmp_path / "store", OLD)
    owner = start(HOLD, folder=str(path))
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


def test_a_file_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DatastoreUnwritable), locked(file / "store"):
        raise AssertionError("locked below a file")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    """Another user of a shared folder could otherwise have a file of ours truncated."""
    folder, other = tmp_path / "store", tmp_path / "other"
    folder.mkdir()
    other.write_text("precious")
    (folder / LOCK).symlink_to(other)
    with pytest.raises(DatastoreUnwritable), locked(folder):
        raise AssertionError("locked through a link")
    assert other.read_text() == "precious"


def test_a_system_without_locks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(descriptor: int, **options: object) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files, "lock_descriptor", missing)
    with pytest.raises(DatastoreUnwritable, match="not implemented"), locked(tmp_path):
        raise AssertionError("locked without a lock")


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_folder_is_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    for place in (folder, tmp_path):
        place.chmod(0o500)
    try:
        with pytest.raises(DatastoreUnwritable, match="EACCES"), locked(folder):
            raise AssertionError("locked without the right to write")
    finally:
        tmp_path.chmod(0o700)
