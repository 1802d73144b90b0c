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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rest_local.errors import RestLocalError

_OTHER_PLACES = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_PREFIX", "GIT_SHALLOW_FILE",
)  # fmt: skip
"""Variables that a hook of git sets, and that would make git read another repository than the one that is named."""

_MOST_ARGUMENTS = 1 << 14  # bytes of names on one command line; Windows allows 32 000 characters
_HARMLESS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false", "protocol.allow=never")


def git_command(repository: Path, *arguments: str) -> list[str]:
    """The command line of a git command. Run it with `git_environment`."""
    settings = [part for setting in _HARMLESS for part in ("-c", setting)]
    return ["git", "-C", str(repository), *settings, *arguments]


def git_environment() -> dict[str, str]:
    """This process's environment, changed so that git fetches nothing (git 2.45 and later; earlier versions obey
    `protocol.allow`).
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OTHER_PLACES}
    return {**kept, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


def git_files(root: Path, only: Sequence[str] | None = None) -> Iterator[str] | None:
    """The files below `root` that git tracks or would track, sorted, each name once. Names are relative to `root`, with
    slashes. Returns None outside a work tree, in an ignored directory, and without git.

    The names go through temporary files, so that memory does not depend on their number. only: sorted names, to ask
    about these alone; git reads its index, but of the folders only those of the names.
    """
    environment = git_environment()

    def git(*arguments: str, output: IO[bytes] | int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            git_command(root, *arguments),
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
            for names in [[]] if only is None else _command_lines(only):
                command = ("--literal-pathspecs", "ls-files", "-z", *arguments, "--", *names)
                if git(*command, output=listed[-1]).returncode != 0:
                    return None
        undo.pop_all()  # from here on `_split` closes the files
        merged = _merged([_split(file) for file in listed])
        return merged if only is None else filter(set(only).__contains__, merged)
    return None


def _command_lines(names: Sequence[str]) -> Iterator[list[str]]:
    """Names in groups that are short enough for a command line."""
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + len(name) > _MOST_ARGUMENTS:
            yield group
            group, size = [], 0
        group.append(name)
        size += len(name)
    if group:
        yield group


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


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of git whose output is read, with what it complains about thrown away. It is ended at the end of the
    block, also before its output was read. Raises RestLocalError without git.
    """
    try:
        git = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=git_environment(),
        )
    except FileNotFoundError as error:
        raise RestLocalError("this needs the program git; install it") from error
    assert git.stdout is not None
    try:
        yield git
    except BaseException:
        git.kill()
        raise
    finally:
        git.stdout.close()
        git.wait()


def output_of(repository: Path, *arguments: str) -> tuple[str, str]:
    """What git prints and what it complains about, both stripped. Raises RestLocalError without git."""
    command = git_command(repository, *arguments)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=git_environment(), check=False
        )
    except FileNotFoundError as error:
        raise RestLocalError("this needs the program git; install it") from error
    output, problem = (os.fsdecode(text).strip() for text in (done.stdout, done.stderr))
    return (output if done.returncode == 0 else "", problem)
