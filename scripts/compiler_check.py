"""Choose the compiler and flags that llama.cpp is built with, then run a command in that environment.

    python scripts/compiler_check.py .venv/bin/python -m pip install --editable .

- It uses only the standard library, because it runs before anything is installed.
- It prints its decision in one line on stderr and replaces itself with the command. Without a command it only prints.
- It keeps what the user sets (CMAKE_ARGS, CC, CXX, CFLAGS, CXXFLAGS), and checks that compiler with those flags.

The fault: the header of gcc 11 and 12 declares that `_tile_loadconfig` reads 8 bytes. The compiler then drops the other
stores to the 64-byte tile configuration, and `ldtilecfg` raises SIGSEGV at the first decode of a quantized model. Only
CPUs with AMX are affected, because only there `-march=native` turns AMX on. The check compiles such a function to
assembly, replaces `ldtilecfg` with instructions that copy the 64 bytes, and runs it. That needs no CPU with AMX.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
TILE_FLAGS = ("-mamx-tile", "-mamx-int8")
CLANG_VERSIONS = range(30, 13, -1)  # The newest that passes the check is taken, such as clang-16.
TIMEOUT_SECONDS = 60.0
GPU_BUILD = re.compile(r"-DGGML_(CUDA|HIP|HIPBLAS|MUSA|SYCL|VULKAN|METAL|OPENCL|CANN)(:BOOL)?=(?i:on|1|true|yes)$")
MISSING = (
    "no C++ compiler found ({what}); llama.cpp is compiled during the installation. Install one: "
    "Debian, Ubuntu: apt install build-essential cmake; Fedora: dnf install gcc-c++ make cmake; "
    "Arch: pacman -S base-devel cmake; macOS: xcode-select --install, then brew install cmake"
)
NO_CMAKE = (
    "no cmake found: pip fetches one for most platforms; if that fails, install it "
    "(apt install cmake, dnf install cmake, pacman -S cmake, brew install cmake)"
)

SOURCE = """
#include <immintrin.h>
#include <stdint.h>
struct tiles { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };
extern "C" {
    __attribute__((used)) volatile unsigned char seen[64];
    __attribute__((used)) unsigned char saved[32];
}
__attribute__((noinline)) static void configure(int rows) {
    alignas(64) tiles config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) { config.rows[i] = (uint8_t) rows; config.colsb[i] = 64; }
    _tile_loadconfig(&config);
}
int main(int count, char **) {
    for (int i = 0; i < 64; i++) seen[i] = 255;
    configure(15 + count);
    for (int i = 0; i < 16; i++) {
        const int used = i < 8;
        if (seen[48 + i] != (used ? 16 : 0) || seen[16 + 2 * i] != (used ? 64 : 0) || seen[17 + 2 * i]) return 1;
    }
    return seen[0] == 1 ? 0 : 1;
}
"""

STAND_IN = """
\tmovq\t%rax, saved(%rip)
\tmovups\t%xmm0, 16+saved(%rip)
\tleaq\t{operand}, %rax
\tmovups\t(%rax), %xmm0
\tmovups\t%xmm0, seen(%rip)
\tmovups\t16(%rax), %xmm0
\tmovups\t%xmm0, 16+seen(%rip)
\tmovups\t32(%rax), %xmm0
\tmovups\t%xmm0, 32+seen(%rip)
\tmovups\t48(%rax), %xmm0
\tmovups\t%xmm0, 48+seen(%rip)
\tmovups\t16+saved(%rip), %xmm0
\tmovq\tsaved(%rip), %rax
"""


@dataclass(frozen=True)
class Decision:
    """A decision in words, with the variables to change for the build, or an error if none is possible."""

    line: str
    environment: Mapping[str, str]
    error: bool = False


def decide(environment: Mapping[str, str]) -> Decision:
    """Choose the compiler and flags for this machine, which takes a second on a CPU with AMX."""
    path, arguments = environment.get("PATH"), shlex.split(environment.get("CMAKE_ARGS", ""))
    wanted = {
        "CC": _defined(arguments, "CMAKE_C_COMPILER") or environment.get("CC", ""),
        "CXX": _defined(arguments, "CMAKE_CXX_COMPILER") or environment.get("CXX", ""),
    }
    for language, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        command = shlex.split(wanted[language])
        if not _first([command[0]] if command else names, path):
            what = f"{language}={wanted[language]}" if command else " or ".join(names)
            return Decision(MISSING.format(what=what), {}, error=True)
    name, *options = shlex.split(wanted["CXX"]) or [_first(("c++", "g++", "clang++"), path)]
    compiler = [_first((name,), path), *options]
    fresh = {"PIP_NO_CACHE_DIR": "1"}  # pip caches the wheels that it builds, regardless of their flags
    changed = fresh if any(environment.get(name) for name in ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS")) else {}
    if platform.machine().lower() not in ("x86_64", "amd64") or platform.system() != "Linux":
        return Decision(f"compiler: {version(compiler)}; AMX does not concern this platform", changed)
    flags = shlex.split(_defined(arguments, "CMAKE_CXX_FLAGS") or environment.get("CXXFLAGS", ""))
    if not _turns_amx_on(compiler, flags, arguments):
        return Decision(f"compiler: {version(compiler)}; it uses no AMX on this CPU, nothing to change", changed)
    if builds_tiles(compiler):
        return Decision(f"compiler: {version(compiler)}; it builds AMX code correctly", fresh)
    return _without(compiler, wanted, environment, arguments, path, fresh)


def _without(
    compiler: Sequence[str], wanted: Mapping[str, str], environment: Mapping[str, str], arguments: list[str],
    path: str | None, fresh: Mapping[str, str],
) -> Decision:  # fmt: skip
    """Decide for a compiler that builds AMX code wrongly: clang if possible, else no AMX."""
    fault = f"compiler: {version(compiler)} builds AMX code that crashes"
    fixed = [name for name, value in wanted.items() if value]
    # The GPU toolkit may not accept clang as host compiler.
    on_gpu = any(GPU_BUILD.match(argument) for argument in arguments)
    if not fixed and not on_gpu and (pair := _clang(path)):
        line = f"{fault}; llama.cpp is built with {version([pair[1]])} instead"
        if not _has_openmp([pair[1]]):
            line += " and without OpenMP (its package: libomp-dev, or libomp-devel on Fedora)"
        # Clang's strip removes the name of the compiler, which `rest-local doctor` shows.
        return Decision(line, {**fresh, "CC": pair[0], "CXX": pair[1], "SKBUILD_INSTALL_STRIP": "false"})
    added = {**fresh, **_no_amx(environment, arguments)}
    kept = f"you chose {' and '.join(fixed)}" if fixed else "a GPU build keeps its compiler" if on_gpu else ""
    why = kept or "no working clang is installed; with clang 16 or newer AMX makes drafts cheaper"
    return Decision(f"{fault}; AMX is turned off with {' '.join(NO_AMX)} ({why})", added)


def _no_amx(environment: Mapping[str, str], arguments: list[str]) -> dict[str, str]:
    """Return the flags that turn AMX off, where cmake reads them: a user's definition hides the environment's flags."""
    changed: dict[str, str] = {}
    for define, name in (("CMAKE_C_FLAGS", "CFLAGS"), ("CMAKE_CXX_FLAGS", "CXXFLAGS")):
        if (given := _defined(arguments, define)) is None:
            changed[name] = " ".join((*shlex.split(environment.get(name, "")), *NO_AMX))
        else:
            arguments = [*arguments, f"-D{define}={' '.join((given, *NO_AMX))}"]  # The last definition counts.
            changed["CMAKE_ARGS"] = shlex.join(arguments)
    return changed


def _defined(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of the last `-DNAME=VALUE` or `-DNAME:TYPE=VALUE`."""
    found = None
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.split(":")[0] == f"-D{name}":
            found = value
    return found


def _turns_amx_on(compiler: Sequence[str], flags: Sequence[str], arguments: Sequence[str]) -> bool:
    """Return True if llama.cpp's flags make this compiler use AMX: `-march=native`, or definitions of the user."""
    on = ("on", "1", "true", "yes")
    asked = any(
        (_defined(arguments, name) or "").lower() in on
        for name in ("GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_CPU_ALL_VARIANTS")
    )
    native = (_defined(arguments, "GGML_NATIVE") or "on").lower() in on
    wanted = [*(["-march=native"] if native else []), *(TILE_FLAGS if asked else ())]
    result = _run([*compiler, *wanted, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    return result is not None and result.returncode == 0 and "__AMX_TILE__" in result.stdout


def builds_tiles(compiler: Sequence[str], source: str = SOURCE) -> bool:
    """Return True if all 64 bytes of a tile configuration are in memory when `ldtilecfg` reads them."""
    with tempfile.TemporaryDirectory(prefix="rest-local-compiler-") as name:
        code, assembly, program = (Path(name) / part for part in ("tiles.cpp", "tiles.s", "tiles"))
        code.write_text(source, "utf-8")
        made = _run([*compiler, "-std=c++17", "-O3", *TILE_FLAGS, "-S", "-o", str(assembly), str(code)])
        if made is None or made.returncode or not assembly.exists():
            return False
        text, count = re.subn(
            r"^[ \t]*ldtilecfg[ \t]+([^#\n]+)$",
            lambda match: STAND_IN.format(operand=match[1].strip()),
            assembly.read_text("utf-8"),
            flags=re.MULTILINE,
        )
        assembly.write_text(text, "utf-8")
        linked = _run([*compiler, "-o", str(program), str(assembly)])
        if not count or linked is None or linked.returncode:
            return False
        ran = _run([str(program)])
        return ran is not None and ran.returncode == 0


def _clang(path: str | None) -> tuple[str, str] | None:
    """Return the C and C++ compiler of the newest clang that passes the check."""
    for suffix in ("", *(f"-{number}" for number in CLANG_VERSIONS)):
        c, cxx = shutil.which(f"clang{suffix}", path=path), shutil.which(f"clang++{suffix}", path=path)
        # Clang 14 and 15 name the macros __AMXTILE__ and __AMXINT8__, so llama.cpp leaves out its AMX code.
        if c and cxx and _turns_amx_on([cxx], TILE_FLAGS, ["-DGGML_NATIVE=off"]) and builds_tiles([cxx]):
            return c, cxx
    return None


def _has_openmp(compiler: Sequence[str]) -> bool:
    """Return True if the compiler links OpenMP. Without it, llama.cpp uses its own threads."""
    with tempfile.TemporaryDirectory(prefix="rest-local-compiler-") as name:
        code = Path(name) / "main.cpp"
        code.write_text("int main() { return 0; }\n", "utf-8")
        made = _run([*compiler, "-fopenmp", "-o", str(code.with_suffix("")), str(code)])
        return made is not None and made.returncode == 0


def version(compiler: Sequence[str]) -> str:
    """Return the first line of `--version`, without the copyright."""
    result = _run([*compiler, "--version"])
    lines = result.stdout.splitlines() if result and result.returncode == 0 else []
    return lines[0].strip() if lines else shlex.join(compiler)


def _first(names: Sequence[str], path: str | None) -> str:
    return next((found for name in names if (found := shutil.which(name, path=path))), "")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command. Returns None if it cannot be started or does not end."""
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None


def _installed(command: Sequence[str]) -> bool:
    """Return True if the command's Python already has llama.cpp, so that nothing needs to be compiled."""
    if not command or not Path(command[0]).name.startswith("python"):
        return False
    found = _run([command[0], "-c", "import importlib.util as u; raise SystemExit(not u.find_spec('llama_cpp'))"])
    return found is not None and found.returncode == 0


def main(command: Sequence[str], replace: Callable[..., object] = os.execvpe) -> int:
    """Decide, print, and become the command."""
    decision = decide(os.environ)
    needed = not _installed(command)
    if needed:
        print(decision.line, file=sys.stderr)
        if decision.error:
            return 1
        if not shutil.which("cmake"):
            print(NO_CMAKE, file=sys.stderr)
    if command:
        sys.stderr.flush()
        replace(command[0], list(command), {**os.environ, **decision.environment})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
