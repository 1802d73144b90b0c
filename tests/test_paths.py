"""Where files go, and that they are replaced whole."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.files import write_with

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


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def failing(*_: object) -> int:
        raise error

    path = tmp_path / "x"
    paths.write_atomically(path, b"older")
    paths.write_atomically(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if step == "write":  # also when the file is closed, for what is not written yet
        write_with(monkeypatch, failing)
    else:
        monkeypatch.setattr(os, step, failing)
    with pytest.raises(type(error)):
        paths.write_atomically(path, b"new", durable=True)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["x"])


_KILLED = """
import os, sys
from pathlib import Path
from rest_local.paths import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"secret" * 100_000)
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        (unfinished,) = tmp_path.iterdir()
        paths.delete_unfinished(tmp_path)
        assert b"secret" in unfinished.read_bytes(), "its process lives"
        child.kill()
    assert b"secret" in unfinished.read_bytes()
    paths.write_atomically(path, b"new")
    assert os.listdir(tmp_path) == ["x"], "the first write of a process deletes it"


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / f".rest-local-new-{'1' * 16}").symlink_to("target")
    names = ["target", ".x.123", ".rest-local-new-1", f".rest-local-new-{'1' * 16}", f".rest-local-new-{'1' * 16}.x"]
    for name in names[1:3] + names[4:]:
        (tmp_path / name).write_bytes(b"mine")
    paths.delete_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    paths.delete_unfinished(tmp_path / "missing")


def test_a_file_that_another_process_takes_for_a_left_one_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock."""
    opened, times = paths._private, []

    def taken(name: str, flags: int) -> int:
        descriptor = opened(name, flags)
        times.append(name)
        if len(times) < 3:
            paths.delete_unfinished(tmp_path)
        return descriptor

    monkeypatch.setattr(paths, "_private", taken)
    paths.write_atomically(tmp_path / "x", b"new")
    assert len(times) == 3
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]
