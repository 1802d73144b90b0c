"""`rest-local serve` as a process."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class Process:
    """A server process; `line` reads what it writes to stderr."""

    def __init__(self, *arguments: str, session: bool = False, **environment: str) -> None:
        command = [sys.executable, "-m", "rest_local", "serve", "--port", "0", "--no-history", *arguments]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=session
        )
        assert self.process.stderr is not None
        self.errors: IO[str] = self.process.stderr

    def url(self) -> str:
        """Return where it listens, once the model is loaded."""
        address = self.errors.readline().split()[1]
        for line in self.errors:
            if line.startswith("{") and json.loads(line).get("event") == "loaded":
                return address
        raise AssertionError("the model was not loaded")

    def children(self) -> list[int]:
        """Return its child processes, as /proc lists them."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for each in tasks for child in each.read_text().split()]

    def end(self) -> tuple[int, str]:
        """Return its exit code and its last words."""
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, rest


@contextlib.contextmanager
def process(*arguments: str, session: bool = False, **environment: str) -> Iterator[Process]:
    """Run a server, in a `session` of its own without a terminal, as a service."""
    made = Process(*arguments, session=session, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.errors.close()
