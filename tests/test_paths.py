"""Where files go, and that they are replaced whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rest_local import paths


@pytest.mark.parametrize(("function", "name"), [(paths.cache_dir, "CACHE"), (paths.data_dir, "DATA")])
def test_the_environment_decides_and_directories_are_private(
    function: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(function)
    monkeypatch.setenv(f"REST_LOCAL_{name}", str(tmp_path / "a" / "b"))
    assert function() == function() == tmp_path / "a" / "b"
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    monkeypatch.delenv(f"REST_LOCAL_{name}")
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert "rest-local" in str(function())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    paths.write_atomically(path, b"old")
    paths.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def failing(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space"):
        paths.write_atomically(path, b"newest")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
