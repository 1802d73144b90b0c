"""A llama-cpp-python that does not fit is refused in one line, and what llama.cpp logs becomes records."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rest_local.errors import LibraryUnfit
from rest_local.llama.library import LogLines
from rest_local.llama.loaded import TESTED, set_fields

REPOSITORY = Path(__file__).parents[2]
# The code of a module `llama_cpp` that stands before the real one in the path of the child.
BROKEN = {
    "raise ImportError('libgomp.so.1: cannot open shared object file')": "cannot be loaded (libgomp.so.1",
    "raise RuntimeError('Failed to load shared library')": "cannot be loaded (Failed to load shared library",
    "__version__, llama_cpp = '0.2.90', None\n": "0.2.90 is too old",
}


@pytest.mark.parametrize("code", BROKEN, ids=["import", "library", "version"])
def test_a_library_that_cannot_be_used_is_one_line(code: str, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(code, "utf-8")
    run = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPOSITORY)!r}]\n"
    run += "from rest_local.cli.main import run; sys.exit(run(['generate', '-n', '1', 'x']))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert BROKEN[code] in done.stderr
    assert f"pip install 'llama-cpp-python=={TESTED}'" in done.stderr


def test_a_field_that_a_structure_lacks_is_named() -> None:
    class OldParameters(ctypes.Structure):
        _fields_ = (("use_mmap", ctypes.c_bool),)

    old = OldParameters()
    set_fields(old, use_mmap=True)
    assert old.use_mmap
    with pytest.raises(LibraryUnfit, match=r"lacks OldParameters\.load_mode; install one"):
        set_fields(old, load_mode=1)


DEBUG, INFO, WARN, ERROR, CONT = 1, 2, 3, 4, 5


@pytest.fixture
def lines() -> LogLines:
    return LogLines(logging.getLogger("rest_local.llama.test"))


def test_a_message_of_several_lines_becomes_several_records(lines: LogLines, caplog: pytest.LogCaptureFixture) -> None:
    lines.feed(WARN, b"one\ntwo\n")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "one"),
        (logging.WARNING, "two"),
    ]


def test_a_continued_message_is_one_record_with_the_level_of_its_start(
    lines: LogLines, caplog: pytest.LogCaptureFixture
) -> None:
    for level, text in ((ERROR, b"tensor "), (CONT, b"'x' "), (CONT, b"missing"), (CONT, b"\n")):
        lines.feed(level, text)
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, "tensor 'x' missing")]


def test_only_errors_are_collected_and_only_inside_the_block(lines: LogLines) -> None:
    with lines.collected_errors() as outer:
        lines.feed(ERROR, b"a\n")
        with lines.collected_errors() as inner:
            lines.feed(WARN, b"b\n")
            lines.feed(ERROR, b"c\n")
    lines.feed(ERROR, b"d\n")
    assert (outer, inner) == (["a", "c"], ["c"])
