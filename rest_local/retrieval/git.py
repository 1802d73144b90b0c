"""How git is asked about a repository of unknown origin: so that nothing runs that its configuration names.

A checkout can name programs for git to run: a file system monitor, a program that checks signatures of commits where
the log shows them, the other end of a partial clone whose missing blobs git fetches when they are read.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_HARMLESS = ("core.fsmonitor=false", "log.showSignature=false", "protocol.allow=never")


def git_command(repository: Path, *arguments: str) -> list[str]:
    """The command line; run it with `git_environment`."""
    settings = [part for setting in _HARMLESS for part in ("-c", setting)]
    return ["git", "-C", str(repository), *settings, *arguments]


def git_environment() -> dict[str, str]:
    """This process's, in which git fetches nothing (git 2.45 and later; earlier ones heed `protocol.allow`)."""
    return {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def git_files(root: Path) -> Iterator[str] | None:
    """What git tracks or would track below `root`, sorted, each name once; None outside a work tree, in an ignored
    directory, without git. Names are relative to `root`, with slashes.

    The names go through temporary files, so that memory does not depend on how many there are.
    """
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(variable, None)
    safe = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(root)]

    def git(*arguments: str, output: IO[bytes] | int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*safe, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    undo, listed = contextlib.ExitStack(), []
    with undo, contextlib.suppress(OSError):
        inside = git("rev-parse", "--is-inside-work-tree")
        if inside.returncode != 0 or inside.stdout.strip() != b"true" or git("check-ignore", "-q", ".").returncode == 0:
            return None
        for arguments in (("--cached",), ("--others", "--exclude-standard")):
            listed.append(undo.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
            if git("ls-files", "-z", *arguments, output=listed[-1]).returncode != 0:
                return None
        undo.pop_all()  # from here on `_split` closes them
        return _merged([_split(file) for file in listed])
    return None


def _merged(parts: list[Iterator[str]]) -> Iterator[str]:
    """Of sorted names, each once: in the index a file that is being merged stands several times."""
    last = None
    for name in heapq.merge(*parts):
        if name != last:
            yield name
        last = name


def _split(file: IO[bytes]) -> Iterator[str]:
    """The names in a file that ends each with a NUL byte."""
    with file:
        file.seek(0)
        rest = b""
        while chunk := file.read(1 << 16):
            *names, rest = (rest + chunk).split(b"\0")
            yield from map(os.fsdecode, names)
