"""The matrix units of this CPU, which of them this llama.cpp uses, and the compiler that built it.

The CPU features come from `/proc/cpuinfo` or sysctl. The compiler comes from the `.comment` section of the ELF library;
nothing else names it. If a platform has no such information, the result is empty.
"""

from __future__ import annotations

import platform
import re
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as bindings

from rest_local.llama import library

ELF64_LITTLE = b"\x7fELF\x02\x01"
SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
SYSCTL_SECONDS = 5.0


@dataclass(frozen=True)
class MatrixUnit:
    """A CPU feature for matrix or dot products. `flags`: its names in `/proc/cpuinfo` (Linux) and sysctl (macOS).
    `built`: its name in llama.cpp's line of features.
    """

    name: str
    flags: tuple[str, ...]
    built: str


UNITS = (
    MatrixUnit("AMX", ("amx_int8",), "AMX_INT8"),
    MatrixUnit("AVX-512", ("avx512f",), "AVX512"),
    MatrixUnit("AVX-512 VNNI", ("avx512_vnni",), "AVX512_VNNI"),
    MatrixUnit("AVX-512 BF16", ("avx512_bf16",), "AVX512_BF16"),
    MatrixUnit("AVX VNNI", ("avx_vnni",), "AVX_VNNI"),
    MatrixUnit("SME", ("sme", "hw.optional.arm.FEAT_SME"), "SME"),
    MatrixUnit("I8MM", ("i8mm", "hw.optional.arm.FEAT_I8MM"), "MATMUL_INT8"),
    MatrixUnit("SVE", ("sve",), "SVE"),
    MatrixUnit("DotProd", ("asimddp", "hw.optional.arm.FEAT_DotProd"), "DOTPROD"),
)


def matrix_units() -> dict[str, bool]:
    """The units of this CPU, and whether the build of llama.cpp uses each."""
    here, built = cpu_flags(), set(re.findall(r"(\w+) = 1", library.system_info()))
    return {unit.name: unit.built in built for unit in UNITS if here.intersection(unit.flags)}


def cpu_flags() -> set[str]:
    """The feature flags of the CPU; empty if the system does not report them."""
    if platform.system() == "Darwin":
        names = [flag for unit in UNITS for flag in unit.flags if flag.startswith("hw.")]
        try:
            done = subprocess.run(
                ["sysctl", *names], capture_output=True, text=True, timeout=SYSCTL_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return set()
        return {line.split(":")[0] for line in done.stdout.splitlines() if line.endswith(": 1")}
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def compilers() -> list[str]:
    """The compilers of llama.cpp's CPU backend; empty if its library does not name them."""
    loaded = Path(bindings._lib._name)
    parts: Iterable[Path] = (*sorted(loaded.parent.glob("libggml-cpu*.so")), loaded)
    for path in parts:
        try:
            found = comment(path.read_bytes())
        except OSError:
            continue
        if found:
            return found
    return []


def comment(data: bytes) -> list[str]:
    """The strings in the `.comment` section of a 64-bit little-endian ELF file; empty for any other file."""
    if not data.startswith(ELF64_LITTLE):
        return []
    try:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
        sections = [SECTION.unpack_from(data, table + size * i) for i in range(count)]
        names = sections[names_at]
    except (struct.error, IndexError, OverflowError):
        return []
    for section in sections:
        name_at, begin, length = names[4] + section[0], section[4], section[5]
        if data[name_at : name_at + 9] == b".comment\0":
            texts = (text.decode("utf-8", "replace").strip() for text in data[begin : begin + length].split(b"\0"))
            return list(dict.fromkeys(text for text in texts if text))
    return []
