"""llama.cpp's log becomes lines of `logging`, and the library describes its build."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rest_local.llama import library
from rest_local.llama.library import LogLines
from rest_local.llama.model import Model

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


def test_numa_is_set_once_per_process() -> None:
    """In a child process, because it cannot be undone."""
    code = """
from rest_local.errors import OptionError
from rest_local.llama import library
library.use_numa("distribute")
library.use_numa("distribute")
try:
    library.use_numa("isolate")
except OptionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "numa isolate: this process already runs with distribute; start another process\n"


def test_a_muted_log_is_silent_until_unmuted(caplog: pytest.LogCaptureFixture, tiny_model: Callable[..., Path]) -> None:
    with caplog.at_level(logging.DEBUG, library.logger.name):
        library.mute()
        try:
            Model.open(tiny_model("llama")).close()
        finally:
            library.unmute()
        assert not caplog.records
        Model.open(tiny_model("llama")).close()
        assert caplog.records


@pytest.mark.parametrize(
    ("flags", "built", "units"),
    [
        ({"amx_int8", "avx512f"}, "CPU : AVX512 = 1 | ", {"AMX": False, "AVX-512": True}),
        ({"amx_int8"}, "CPU : AMX_INT8 = 1 | REPACK = 1 | ", {"AMX": True}),
        (
            {"asimddp", "i8mm", "sme"},
            "CPU : MATMUL_INT8 = 1 | SME = 1 |",
            {"SME": True, "I8MM": True, "DotProd": False},
        ),
        ({"hw.optional.arm.FEAT_SME"}, "CPU : NEON = 1 |", {"SME": False}),
        ({"sse2"}, "CPU : AVX512 = 1 |", {}),
    ],
)
def test_units_of_the_cpu_show_whether_they_are_used(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], built: str, units: dict[str, bool]
) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    monkeypatch.setattr(library, "system_info", lambda: built)
    assert library.matrix_units() == units


def test_cpuinfo_of_an_arm_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(
        library.Path, "read_text", lambda *_: "processor\t: 0\nFeatures\t: fp asimd i8mm\n\nprocessor\t: 1\n"
    )
    assert library.cpu_flags() == {"fp", "asimd", "i8mm"}


def test_the_compiler_is_read_from_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(re.search(r"\d+\.\d+", name) for name in library.compilers())
    monkeypatch.setattr(library.bindings, "_lib", SimpleNamespace(_name=str(tmp_path / "libllama.so")))
    assert library.compilers() == []
    (tmp_path / "libggml-cpu.so").write_bytes(b"\x7fELF\0GCC: (Debian) 12.2.0\0GCC: (Debian) 12.2.0\0GCC: (cut")
    assert library.compilers() == ["GCC: (Debian) 12.2.0"]
