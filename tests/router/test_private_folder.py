"""The private folder of a server, and what killed servers leave."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rest_local.router.app import PREFIX, PrivateFolder, sweep


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    os.utime(folder, (1, 1))


def left_behind(temporary: Path, name: str = "old") -> Path:
    folder = temporary / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / "kept.json").write_text("{}")
    age(folder)
    return folder


def test_it_is_private_and_goes_with_its_server(temporary: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not list(temporary.iterdir())


def test_what_a_killed_server_left_is_removed_by_the_next(temporary: Path) -> None:
    old = left_behind(temporary)
    folder = PrivateFolder()
    assert not old.exists()
    folder.close()


def test_the_folder_of_a_server_that_runs_stays(temporary: Path) -> None:
    first = PrivateFolder()
    age(first.path)
    second = PrivateFolder()
    assert first.path.exists()
    first.close()
    second.close()


def test_young_folders_links_and_files_stay(temporary: Path) -> None:
    young, target = left_behind(temporary, "young"), temporary / "mine"
    os.utime(young)
    target.mkdir()
    link, file = temporary / f"{PREFIX}link", temporary / f"{PREFIX}file"
    file.write_text("x")
    age(file)
    try:
        link.symlink_to(target)
    except OSError:
        pytest.skip("this user may not make links")
    age(target)
    sweep()
    assert [each.exists() for each in (young, target, file)] == [True] * 3


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no user ids")
def test_folders_of_other_users_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = left_behind(temporary)
    monkeypatch.setattr(os, "getuid", lambda: old.stat().st_uid + 1)
    sweep()
    assert old.exists()
