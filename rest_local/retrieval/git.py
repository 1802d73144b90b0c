"""Runs git on a repository of unknown origin without running programs that its configuration names.

The configuration of a checkout can make git run programs: a file system monitor, a program that checks the signatures
of commits in the log, or the transport to the remote of a partial clone, from which git fetches missing blobs.
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
    """The command line of a git command. Run it with `git_environment`."""
    settings = [part for setting in _HARMLESS for part in ("-c", setting)]
    return ["git", "-C", str(repository), *settings, *arguments]


def git_environment() -> dict[str, str]:
    """This process's environment, changed so that git fetches nothing (git 2.45 and later; earlier versions obey
    `protocol.allow`).
    """
    return {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def git_files(root: Path) -> Iterator[str] | None:
    """The files below `root` that git tracks or would track, sorted, each name once. Names are relative to `root`, with
    slashes. Returns None outside a work tree, in an ignored directory, and without git.

    The names go through temporary files, so that memory does not depend on their number.
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
        undo.pop_all()  # from here on `_split` closes the files
        return _merged([_split(file) for file in listed])
    return None


def _merged(parts: list[Iterator[str]]) -> Iterator[str]:
    """Merge sorted names, each once: the index has several entries for a file with a merge conflict."""
    last = None
    for name in heapq.merge(*parts):
        if name != last:
            yield name
        last = name


def _split(file: IO[bytes]) -> Iterator[str]:
    """The names in a file, in which a NUL byte ends each name."""
    with file:
        file.seek(0)
        rest = b""
        while chunk := file.read(1 << 16):
            *names, rest = (rest + chunk).split(b"\0")
            yield from map(os.fsdecode, names)
