"""`rest-local edit` with llama.cpp, a tiny model and a grammar that allows one answer: in pipes and in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD = "\ufeffdef area(width, height):\r\n    return width * height\r\n\r\n\r\nprint(area(2, 3))"
NEW = "\ufeffdef area(w, height):\r\n    return w * height\r\n\r\n\r\nprint(area(2, 3))"
ANSWER = (
    "Sure, here it is:\n\n```py\n"
    + NEW.removeprefix("\ufeff").replace("\r\n", "\n")
    + "\n```\n\nI renamed `width` to `w`.\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of DOS line ends, a byte order mark and no last line end, and a grammar for its edit."""
    text = ANSWER.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    (tmp_path / "g.gbnf").write_text(f'root ::= "{text}"')
    (tmp_path / "a.py").write_bytes(OLD.encode())
    (tmp_path / "a.py").chmod(0o750)
    return tmp_path


@pytest.fixture
def command(tiny_model: Callable[..., Path], folder: Path) -> list[str]:
    """The command of an edit, without files and instruction."""
    model = str(tiny_model("llama"))
    given = ["-m", model, "--grammar-file", str(folder / "g.gbnf"), "--threads", "1", "--no-history"]
    return [sys.executable, "-m", "rest_local", "edit", *given]


def run(command: list[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder.parent)}  # a refused answer is kept there
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=env, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )


def test_a_patch_for_a_pipe_and_then_the_edit(command: list[str], folder: Path) -> None:
    done = run(command, folder, "a.py", "rename width to w")
    assert done.returncode == 1, done.stderr
    assert (folder / "a.py").read_bytes() == OLD.encode()
    subprocess.run(["git", "apply", "--check", "-"], input=done.stdout, cwd=folder, check=True)
    done = run(command, folder, "a.py", "rename width to w", "--yes")
    assert done.returncode == 0, done.stderr
    assert (folder / "a.py").read_bytes() == NEW.encode()
    assert (folder / "a.py").stat().st_mode & 0o777 == 0o750
    assert b"a.py: +2 -2, " in done.stderr
    assert b"% from " in done.stderr


def test_a_closed_pipe_writes_nothing(command: list[str], folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*command, "a.py", "rename width to w", "--yes"],
        cwd=folder, env=env, stdout=writing, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (process.returncode, process.stderr) == (1, b"")
    assert (folder / "a.py").read_bytes() == OLD.encode()
    assert sorted(os.listdir(folder)) == ["a.py", "g.gbnf"]
