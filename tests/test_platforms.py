"""Windows, as far as another system can show it: modules and names that it lacks are hidden from this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rest_local.calibration import measuring
from rest_local.server import app

PACKAGE = Path(app.__file__).parents[1]
MODULES = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("[!_]*.py"))

# Hides them from modules of this package only: the standard library and other packages need them on this system.
HIDDEN = """
import builtins, os, signal, sys, types
MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "readline", "syslog", "crypt"}
NAMES = {
    "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGPIPE", "SIGALRM", "SIGCHLD", "SIGTSTP",
    "pause", "setitimer", "pthread_sigmask", "getuid", "geteuid", "getgid", "fork", "setsid", "getsid", "killpg",
    "getpgid", "statvfs", "uname", "nice", "mkfifo", "getloadavg", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK",
    "O_DIRECTORY", "O_NOCTTY", "sched_getaffinity", "sched_setaffinity", "sysconf", "fchmod", "openpty", "ctermid",
}

class Without(types.ModuleType):
    def __init__(self, module):
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name):
        if name in NAMES:
            raise AttributeError(name)
        return getattr(self._module, name)

real, here = builtins.__import__, {"os": Without(os), "signal": Without(signal)}

def without(name, globals=None, locals=None, fromlist=(), level=0):
    if str((globals or {}).get("__name__")).startswith("rest_local"):
        if name.split(".")[0] in MODULES:
            raise ImportError(f"No module named {name!r}", name=name)
        if name in here:
            return here[name]
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = without
from rest_local.retrieval import files
files.WINDOWS = True
"""


def run_hidden(code: str, *arguments: str, folder: Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + code, *arguments], env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_every_module_imports_without_what_windows_lacks() -> None:
    done = run_hidden("from importlib import import_module\nfor name in sys.argv[1:]: import_module(name)\n", *MODULES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(MODULES) > 100


COMMANDS: list[tuple[list[str], str]] = [
    (["--help"], "Commands:"),
    (["generate", "-n", "3", "--no-history", "def main():"], ""),
    (["generate", "-n", "3", "def main():"], ""),
    (["doctor", "--json"], '"versions"'),
    (["history", "list"], "demo"),
    (["index", "build", "text.py", "-o", "store"], "of 1 file,"),
]
RUN = """
import contextlib, io, json
from rest_local.chat import renderer
from rest_local.cli.main import run
from rest_local.server.http import connection_limit, outlives_terminal

told = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        told.append((run(arguments), shown.getvalue()))
told.append([renderer.render_limited("{{ name }}", {"name": "it"}), connection_limit(), outlives_terminal()])
print(json.dumps(told))
"""


def test_commands_work_without_what_windows_lacks(tmp_path: Path) -> None:
    """One after another in one process; so do chat templates, and what the server asks the system."""
    (tmp_path / "text.py").write_text("def main():\r\n    pass\r\n", newline="")
    done = run_hidden(RUN, json.dumps([arguments for arguments, _ in COMMANDS]), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    *said, others = json.loads(done.stdout.splitlines()[-1])
    for (arguments, expected), (code, shown) in zip(COMMANDS, said, strict=True):
        assert code == 0, (arguments, done.stderr[-2000:])
        assert shown.strip(), arguments
        assert expected in shown, arguments
    assert others == ["it", 1024, True]


def test_without_counts_of_preemptions_no_load_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "resource", None)
    meter = measuring.LoadMeter(lambda: os.cpu_count() or 1)
    meter.start()
    assert not meter.busy(1e9)
