"""A clock that goes backwards: nothing that changed is missed, and the newest commit stays the newest."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from edited import Folder, texts_in
from stores import NEW, OLD, OTHER, make

from rest_local.retrieval.building import build as building
from rest_local.retrieval.home import newest_manifest, read_manifest

pytestmark = pytest.mark.usefixtures("unsynced")

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
