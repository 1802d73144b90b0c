"""What a hostile solution can do in the sandbox: nothing that outlives it, and it never counts as passed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rest_local.bench import sandbox
from rest_local.bench.sandbox import Limits, SandboxMissing

pytestmark = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
SHORT = Limits(seconds=20, cpu=1, memory=256 << 20)


def reason_of(program: str, limits: Limits = SHORT, isolate: bool = True) -> str:
    """Why it does not pass; it must not."""
    try:
        outcome = sandbox.run(program, limits, isolate=isolate)
    except SandboxMissing as missing:  # root without namespaces, where the user `nobody` cannot read Python
        pytest.skip(str(missing))
    assert not outcome.passed
    assert outcome.reason
    return outcome.reason


def isolated(kind: str) -> None:
    """Skip where this system does not isolate so much."""
    if kind not in sandbox.run("").isolated:
        pytest.skip(f"this system does not isolate {kind}")


def test_code_whose_tests_hold_passes_and_its_imports_work() -> None:
    modules = "collections, copy, hashlib, math, random, re, string, typing, json.decoder, encodings.idna"
    outcome = sandbox.run(f"import {modules}\nprint('x')\nassert sum([1, 2]) == 3")
    assert (outcome.passed, outcome.reason) == (True, "")


def test_code_whose_tests_fail_does_not_pass_and_says_why() -> None:
    assert reason_of("assert 1 == 2, 'one is not two'") == "AssertionError: one is not two"
    assert reason_of("def f(:").startswith("SyntaxError")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)\nassert False",
        "raise SystemExit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        'print(\'{"token": "0"}\')\nimport os\nos._exit(0)',
        'import os\nfor fd in range(3, 32):\n  try: os.write(fd, b\'{"token": true}\\n{"token": null}\\n[]\\nx\')\n'
        "  except OSError: pass\nos._exit(0)",
        "import atexit, sys\nsys.exit()",
    ],
    ids=["exit", "SystemExit", "signal", "printed verdict", "forged verdict", "sys.exit"],
)
@pytest.mark.parametrize("isolate", [True, False])
def test_ending_before_the_tests_does_not_pass(program: str, isolate: bool) -> None:
    reason_of(program, isolate=isolate)


def test_an_endless_loop_ends_with_its_cpu_time() -> None:
    assert "CPU time" in reason_of("while True: pass")


def test_sleeping_ends_with_the_wall_clock() -> None:
    begun = time.monotonic()
    reason = reason_of("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)", Limits(seconds=0.5))
    assert reason == "not done after 0.5 s"
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize("isolate", [True, False])
def test_no_process_and_no_thread_can_be_started(isolate: bool) -> None:
    assert "BlockingIOError" in reason_of("import os\nwhile True: os.fork()", isolate=isolate)
    assert "RuntimeError" in reason_of("import threading\nthreading.Thread(target=print).start()", isolate=isolate)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit the address space")
def test_memory_is_bounded() -> None:
    assert "MemoryError" in reason_of("kept = []\nwhile True: kept.append(bytes(10**7))")


def test_output_and_files_are_bounded() -> None:
    assert "bytes of output" in reason_of("while True: print('a' * 1000)")
    assert "File too large" in reason_of("open('big', 'wb').write(bytes(10**7))")
    assert "Too many open files" in reason_of("kept = []\nwhile True: kept.append(open('small', 'w'))")


def test_input_environment_and_descriptors_are_empty() -> None:
    with open(os.devnull) as ours:
        os.set_inheritable(ours.fileno(), True)
        outcome = sandbox.run(
            "import os, sys\nassert sys.stdin.read() == ''\nassert not set(os.environ) - {'LC_CTYPE'}, os.environ\n"
            "open_ones = []\nfor fd in range(3, 1000):\n  try: os.fstat(fd); open_ones.append(fd)\n"
            "  except OSError: pass\nassert len(open_ones) <= 1, open_ones"  # the verdict
        )
    assert outcome.passed, outcome.reason
    assert "EOFError" in reason_of("input()")


def test_no_file_outside_can_be_written(tmp_path: Path) -> None:
    isolated("files")
    for folder in (str(tmp_path), os.getcwd(), "/dev/shm", "/var/tmp", str(Path.home())):
        assert reason_of(f"open({folder + '/written-by-a-sandbox'!r}, 'w')")
    tmp_path.chmod(0o777)
    assert sandbox.run("open('/tmp/written-by-a-sandbox', 'w').write('x')\nopen('here', 'w').write('y')").passed
    assert not Path("/tmp/written-by-a-sandbox").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_isolation_cannot_be_undone() -> None:
    isolated("files")
    program = (
        "import ctypes, os\ncall = ctypes.CDLL(None)\nassert call.umount2(b'/proc', 2) == -1\n"
        "assert call.mount(b'none', b'/', None, 32 | 4096, None) == -1\nassert call.setuid(0) == -1\n"
        "assert call.capset(b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24) == -1"
    )
    outcome = sandbox.run(program)
    assert outcome.passed, outcome.reason


def test_there_is_no_network() -> None:
    isolated("network")
    assert "unreachable" in reason_of("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)")


def test_other_processes_are_neither_seen_nor_killed() -> None:
    isolated("processes")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "ProcessLookupError" in reason_of(f"import os\nos.kill({other.pid}, 9)")
        assert reason_of(f"import os\nos.kill({os.getpid()}, 9)")
        assert reason_of("import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\nos.listdir('/proc/1')")
        assert other.poll() is None
    finally:
        other.communicate()


def test_killing_the_parent_without_isolation_does_not_pass() -> None:
    assert reason_of("import os\nos.kill(os.getppid(), 9)\nwhile True: pass", isolate=False)


def test_a_folder_is_left_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox.run("open('file', 'w')")
    assert list(tmp_path.iterdir()) == []


def test_windows_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in str(sandbox.why_not())
    with pytest.raises(SandboxMissing, match="Windows"):
        sandbox.run("")
