"""A full disk: what fails gives its room back, says what to delete, and `forget` works then."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from edited import Bytes, Folder
from support.files import mounted
from traces import SECRET, traces

from rest_local.errors import DatastoreUnwritable
from rest_local.retrieval.building.indexing import build_datastore, build_from_texts
from rest_local.retrieval.files import Files
from rest_local.retrieval.update.forgetting import forget

Work = Callable[[Folder, Files], object]
WAY_OUT = "`rest-local index remove NAME` deletes one"


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


class Full(Files):
    """The files below `folder` may have so many bytes."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity = folder, capacity

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        left = max(self.capacity - size_of(self.folder), 0)
        super().write(descriptor, view[:left])
        if left < len(view):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a datastore with a secret below `disk`, and much new text next to it."""
    return prepared(Folder(tmp_path), tmp_path / "disk" / "store")


def prepared(folder: Folder, path: Path) -> Folder:
    folder.path = path
    folder.write("s.py", SECRET)
    folder.write("a.py", "alpha " * 50)
    folder.build()
    draw = random.Random(1)
    for number in range(8):
        folder.write(f"{number}.py", "".join(f"{draw.randrange(1000)}\n" for _ in range(2000)))
    return folder


def other_build(folder: Folder, files: Files) -> None:
    build_datastore(folder.path.with_name("other"), [folder.source], vocabulary=Bytes(), files=files)


def rebuild(folder: Folder, files: Files) -> None:
    build_datastore(folder.path, [folder.source], vocabulary=Bytes(), files=files)


def update(folder: Folder, files: Files) -> None:
    folder.update(files=files)


WAYS: list[Work] = [other_build, rebuild, update]


@pytest.mark.parametrize("work", WAYS)
def test_what_fails_gives_its_room_back_and_forget_works(folder: Folder, work: Work) -> None:
    disk = folder.path.parent
    before = size_of(disk)
    copy = shutil.copytree(disk, disk.with_name("copy"))
    work(folder, Files())
    most = size_of(disk)
    for share in (0.0, 0.2, 0.5, 0.9):
        shutil.rmtree(disk)
        shutil.copytree(copy, disk)
        files = Full(disk, int(before + share * (most - before) * 0.7))
        with pytest.raises(DatastoreUnwritable, match="ENOSPC") as caught:
            work(folder, files)
        assert str(caught.value).endswith(WAY_OUT)
        assert size_of(disk) <= before + 200, "the names of processes in locks"
        if share:  # forgetting itself needs room for a moment
            assert forget(folder.path, {str(folder.source / "s.py")}, files=files) == 1
            assert traces(disk) == []


def test_a_build_that_was_killed_on_a_full_disk_does_not_stop_forget(folder: Folder) -> None:
    """What it has written is deleted before anything is written."""
    disk = folder.path.parent
    before = size_of(disk)

    class Killed(BaseException):
        pass

    class Dying(Full):
        def write(self, descriptor: int, data: bytes | memoryview) -> None:
            try:
                super().write(descriptor, data)
            except OSError as error:
                raise Killed from error

        def unlink(self, path: Path) -> None:
            raise Killed

    with pytest.raises(Killed):
        rebuild(folder, Dying(disk, before + 20_000))
    assert size_of(disk) == before + 20_000
    assert forget(folder.path, {str(folder.source / "s.py")}, files=Full(disk, before + 20_000)) == 1
    assert traces(disk) == []


def test_a_real_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        folder = prepared(Folder(tmp_path / "on another disk"), disk / "store")
        for number in range(10):
            folder.write(f"large{number}.py", "x = 1\n" * 20_000 + str(number))
        free = os.statvfs(disk).f_bavail
        for work in (rebuild, update, other_build):
            with pytest.raises(DatastoreUnwritable, match="ENOSPC"):
                work(folder, Files())
            assert free - os.statvfs(disk).f_bavail <= 4, "pages"
        texts = ((str(number), "y" * 100_000) for number in range(20))
        with pytest.raises(DatastoreUnwritable, match="ENOSPC"):
            build_from_texts(folder.path.with_name("texts"), texts, vocabulary=Bytes())
        assert free - os.statvfs(disk).f_bavail <= 8, "pages"
        assert forget(folder.path, {str(folder.source / "s.py")}) == 1
        assert traces(disk) == []
