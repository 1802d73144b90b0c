"""The matrix units of the CPU, those that llama.cpp uses, and its compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rest_local.llama import library


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


@pytest.mark.skipif(not (shutil.which("cc") and Path("/proc/self/exe").exists()), reason="needs a C compiler on Linux")
def test_the_compiler_is_read_from_a_library_that_it_built(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a;\n")
    library_file = tmp_path / "a.so"
    subprocess.run(["cc", "-shared", "-o", str(library_file), str(tmp_path / "a.c")], check=True)
    data = library_file.read_bytes()
    version = subprocess.run(["cc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    assert any(version in text for text in library.comment(data))
    for damaged in (data[:100], data[: len(data) // 2], b"", b"MZ", data[:40] + b"\xff" * 24 + data[64:]):
        library.comment(damaged)  # raises nothing
