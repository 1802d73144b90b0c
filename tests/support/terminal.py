"""A command in a real terminal of a given size, driven as a user drives it: tmux types, pastes, resizes and looks.

    with Terminal(["python", "-m", "rest_local"], width=80, height=24) as terminal:
        terminal.type("hello", "Enter")
        terminal.wait_for("world")

Every wait ends when what it waits for is seen, or fails with the screen after LONGEST_S.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

LONGEST_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
EXIT = "exit code"

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux drives the terminal, and is not installed")


class Terminal:
    """A command in a terminal. `env` has variables beyond those of this project, and `term` the value of TERM
    inside.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        width: int = 80,
        height: int = 24,
        env: Mapping[str, str] | None = None,
        term: str = "",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")  # the path of a socket has at most 107 bytes
        self._socket = f"{self._folder.name}/socket"
        given = {**{name: value for name, value in os.environ.items() if name.startswith("REST_LOCAL_")}, **(env or {})}
        given |= {"PYTHONPATH": str(ROOT), **({"TERM": term} if term else {})}
        exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
        script = f"export {exported}; {shlex.join(command)}; echo {EXIT} $?; exec sleep 1000"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TMUX")}
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", str(width), "-y", str(height), script, env=environment)
        self._tmux("set-option", "-g", "history-limit", "10000")

    def type(self, *keys: str) -> None:
        """Type texts, and press keys that tmux has a name for (`Enter`, `C-c`, `M-Enter`, `Tab`)."""
        for key in keys:
            named = key in ("Enter", "Tab", "Up", "Down", "BSpace", "Escape", "Space") or key.startswith(("C-", "M-"))
            self._tmux("send-keys", *([] if named else ["-l"]), "--", key)

    def press(self, *keys: str) -> None:
        """Press keys that tmux has a name for, so that the program reads them together."""
        self._tmux("send-keys", "--", *keys)

    def paste(self, text: str) -> None:
        """Paste, in brackets where the program has asked for them."""
        self._tmux("load-buffer", "-", stdin=text)
        self._tmux("paste-buffer", "-p", "-r")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self, *, colours: bool = False, scrolled: bool = False, copied: bool = False) -> str:
        """Return what is seen, without blank lines at the end. `scrolled` adds all that has scrolled off.

        With `copied` each line that the terminal has wrapped is whole, as it is copied.
        """
        options = ["-e"] * colours + ["-S", "-"] * scrolled + ["-J"] * copied
        return self._tmux("capture-pane", "-p", *options).rstrip()

    def wait_until(self, holds: Callable[[str], bool], what: str, *, scrolled: bool = False) -> str:
        """Wait until the screen is so, and return it."""
        end = time.monotonic() + LONGEST_S
        while True:
            screen = self.screen(scrolled=scrolled)
            if holds(screen):
                return screen
            assert time.monotonic() < end, f"no {what} on the screen:\n{screen}"
            time.sleep(0.02)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Wait until a text is on the screen so many times, and return the screen."""
        return self.wait_until(lambda screen: screen.count(text) >= times, repr(text))

    def wait_for_exit(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        screen = self.wait_for(EXIT)
        return int(screen.rpartition(EXIT)[2].split()[0])

    def _tmux(self, *arguments: str, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
        command = ["tmux", "-S", self._socket, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)
        self._folder.cleanup()


def prompted(screen: str) -> bool:
    """Return True if an empty prompt of `chat` is the last line: the terminal sends each key to it from then on."""
    return screen.rpartition("\n")[2].strip() == ">"


def answered(terminal: Terminal, answers: int = 1) -> str:
    """Wait until so many answers of `chat` are complete and the next message can be typed. Return the screen."""
    return terminal.wait_until(lambda screen: screen.count("tokens/s") >= answers and prompted(screen), "whole answer")
