"""The choice of compiler and flags for llama.cpp, with shell scripts as compilers and with real ones."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import load_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "compiler_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script(SCRIPT, "compiler_check")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    return module


# Reports that it turns AMX on unless a flag turns it off; it "compiles" a program that exits with the given status.
COMPILER = """#!/bin/sh
for argument in "$@"; do
    case $argument in
        --version) echo "{name} 1.0"; exit 0 ;;
        -mno-amx-tile) amx=off ;; # before or after -march=native, as in gcc and clang
        -march=native|-mamx-tile) : "${{amx:={amx}}}" ;;
        -dM) [ "$amx" = on ] && echo "#define __AMX_TILE__ 1"; exit 0 ;;
        -S) assembly=yes ;;
    esac
    [ "$last" = -o ] && output=$argument
    last=$argument
done
if [ "$assembly" = yes ]; then printf '\\tldtilecfg\\t(%%rsp)\\n' > "$output"; exit 0; fi
printf '#!/bin/sh\\nexit {status}\\n' > "$output"; /bin/chmod 700 "$output"
"""

# Like clang 14, whose macro has another name, so that llama.cpp builds no AMX code.
OLD_CLANG = COMPILER.replace("__AMX_TILE__", "__AMXTILE__")

Install = Callable[..., dict[str, str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Return `install("g++", amx="on", right=False)`, which makes a compiler the only thing on PATH."""

    def put(*names: str, amx: str = "on", right: bool = True, text: str = COMPILER) -> dict[str, str]:
        for name in names:
            (tmp_path / name).write_text(text.format(name=name, amx=amx, status=0 if right else 1), "utf-8")
            (tmp_path / name).chmod(0o700)
        return {"PATH": str(tmp_path)}

    return put


def test_a_correct_compiler_is_kept(check: ModuleType, install: Install) -> None:
    decision = check.decide(install("cc", "c++"))
    assert not decision.error
    assert "c++ 1.0" in decision.line
    assert "correctly" in decision.line
    assert decision.environment == {"PIP_NO_CACHE_DIR": "1"}  # a cached wheel may have the fault


def test_a_cpu_without_amx_changes_nothing(check: ModuleType, install: Install) -> None:
    decision = check.decide(install("cc", "c++", amx="off", right=False))
    assert "nothing to change" in decision.line
    assert decision.environment == {}


def test_clang_replaces_a_compiler_that_fails(check: ModuleType, install: Install, tmp_path: Path) -> None:
    install("cc", "c++", "clang", "clang++", right=False)
    install("clang-30", "clang++-30", text=OLD_CLANG)
    decision = check.decide(install("clang-16", "clang++-16"))
    assert decision.environment["CC"] == str(tmp_path / "clang-16")
    assert decision.environment["CXX"] == str(tmp_path / "clang++-16")
    assert "CFLAGS" not in decision.environment
    assert "clang++-16 1.0" in decision.line
    assert "\n" not in decision.line


def test_without_clang_amx_is_turned_off(check: ModuleType, install: Install) -> None:
    environment = {**install("cc", "c++", right=False), "CXXFLAGS": "-O2 -march=native"}
    decision = check.decide(environment)
    assert decision.environment["CXXFLAGS"] == "-O2 -march=native -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert decision.environment["CFLAGS"] == "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert "CC" not in decision.environment
    again = check.decide({**environment, **decision.environment})
    assert "nothing to change" in again.line  # the flags turn AMX off


def test_definitions_of_the_user_are_kept_and_extended(check: ModuleType, install: Install) -> None:
    arguments = "-DGGML_CUDA=on '-DCMAKE_CXX_FLAGS=-O2 -g'"
    decision = check.decide({**install("cc", "c++", right=False), "CMAKE_ARGS": arguments})
    changed = check.shlex.split(decision.environment["CMAKE_ARGS"])
    assert changed[:2] == ["-DGGML_CUDA=on", "-DCMAKE_CXX_FLAGS=-O2 -g"]
    assert check._defined(changed, "CMAKE_CXX_FLAGS") == "-O2 -g -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert decision.environment["CFLAGS"].endswith("-mno-amx-bf16")
    assert "CXXFLAGS" not in decision.environment  # cmake would not read it


def test_a_compiler_that_the_user_chose_is_kept(check: ModuleType, install: Install) -> None:
    install("cc", "c++", "mine", right=False)
    decision = check.decide({**install("clang", "clang++"), "CXX": "mine"})
    assert "CXX" not in decision.environment
    assert decision.environment["CXXFLAGS"].startswith("-mno-amx-tile")
    assert "you chose CXX" in decision.line


def test_a_gpu_build_keeps_its_compiler(check: ModuleType, install: Install) -> None:
    install("cc", "c++", right=False)
    decision = check.decide({**install("clang", "clang++"), "CMAKE_ARGS": "-DGGML_CUDA=on"})
    assert "CXX" not in decision.environment
    assert "CXXFLAGS" in decision.environment


@pytest.mark.parametrize(("names", "missing"), [((), "cc or gcc or clang"), (("cc",), "c++ or g++ or clang++")])
def test_a_missing_compiler_is_named_with_its_packages(
    check: ModuleType, install: Install, names: tuple[str, ...], missing: str
) -> None:
    decision = check.decide(install(*names))
    assert decision.error
    for words in (missing, "build-essential", "gcc-c++", "xcode-select"):
        assert words in decision.line
    assert "\n" not in decision.line


def test_a_chosen_compiler_that_is_missing_is_named(check: ModuleType, install: Install) -> None:
    decision = check.decide({**install("cc", "c++"), "CXX": "absent-c++"})
    assert decision.error
    assert "CXX=absent-c++" in decision.line


def test_other_platforms_are_left_alone(check: ModuleType, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.platform, "machine", lambda: "arm64")
    decision = check.decide(install("cc", "c++", right=False))
    assert decision.environment == {}
    assert not decision.error


def test_the_command_runs_in_the_chosen_environment(install: Install, tmp_path: Path) -> None:
    environment = {**install("cc", "c++", amx="off"), "CMAKE_ARGS": "-DGGML_CUDA=on"}
    shell = shutil.which("sh")
    assert shell
    command = [sys.executable, str(SCRIPT), shell, "-c", 'echo "$PIP_NO_CACHE_DIR $CMAKE_ARGS"; exit 3']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "1 -DGGML_CUDA=on\n")
    assert done.stderr.startswith("compiler: ")
    for name in ("cc", "c++"):
        (tmp_path / name).unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "build-essential" in done.stderr


def test_a_missing_compiler_does_not_matter_if_llama_cpp_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), sys.executable, "-c", "print('continued')"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "continued\n", "")


@pytest.mark.skipif(
    (platform.machine(), platform.system(), bool(shutil.which("g++"))) != ("x86_64", "Linux", True),
    reason="needs g++ for x86-64 on Linux",
)
@pytest.mark.parametrize(("operand", "right"), [("const char (*)[64]", True), ("const void **", False)])
def test_a_real_compiler_is_checked_by_the_bytes_in_memory(check: ModuleType, operand: str, right: bool) -> None:
    """The intrinsic as declared by current gcc, and by gcc 11 and 12."""
    statement = f'__asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*(({operand}) &config)));'
    source = check.SOURCE.replace("_tile_loadconfig(&config);", statement)
    assert check.builds_tiles(["g++"], source) == right
