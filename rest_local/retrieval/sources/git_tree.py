"""Reads the files of a commit from git's object store. No filter, hook or other program of the repository runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from rest_local.errors import InputInvalid, printable
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources.corpus import Filters, decoded, reason_to_skip, wanted_name
from rest_local.retrieval.sources.git import git_command, git_environment, started
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.source import Reading

_REGULAR = ("100644", "100755")
_MARK_DIGITS = 15  # of a blob's id: 60 bits fit the time of change, in whose place they stand


class Entry(NamedTuple):
    """A regular file of a commit. size: bytes."""

    path: str
    blob: str
    size: int


def files_of_commit(repository: Path, commit: str, name: str, filters: Filters, reading: Reading) -> Iterator[Text]:
    """The text of every file of a commit that is worth indexing, named `NAME:PATH`, with a state that stays the same
    while the blob does. Raises InputInvalid if git cannot list the commit.
    """
    with _Blobs(repository) as blobs:
        for entry in entries(repository, commit, filters, reading.skipped):
            title, mark = f"{name}:{entry.path}", int(entry.blob[:_MARK_DIGITS], 16) or 1
            reading.looked_at(entry.size)
            if reading.unchanged is not None and reading.unchanged(title, entry.size, mark):
                yield Text(title, None, FileState(title, entry.size, mark, b""))
                continue
            data = blobs.read(entry.blob)
            reason = "missing in the repository" if data is None else reason_to_skip(data, filters)
            if data is None or reason:
                reading.skipped.add(reason, title)
            else:
                yield Text(title, decoded(data), FileState(title, len(data), mark, hashlib.sha256(data).digest()))


def measure_tree(repository: Path, commit: str, filters: Filters) -> tuple[int, int]:
    """(files, bytes) that `files_of_commit` would read."""
    sizes = [entry.size for entry in entries(repository, commit, filters, Skipped())]
    return len(sizes), sum(sizes)


def entries(repository: Path, commit: str, filters: Filters, skipped: Skipped) -> Iterator[Entry]:
    """The regular files of a commit whose names are wanted. Hidden ones, links and submodules are left out."""
    command = git_command(repository, "ls-tree", "-r", "-z", "--long", "--full-tree", commit)
    with started(command) as git:
        assert git.stdout is not None
        wanted = wanted_name(filters)
        for record in records(git.stdout):
            head, _, path = os.fsdecode(record).partition("\t")
            mode, _, blob, size = head.split()
            reason = "" if mode in _REGULAR else "link" if mode == "120000" else "submodule"
            if any(part.startswith(".") for part in path.split("/")):
                reason = "hidden"
            reason = reason or wanted(path)
            if not reason and not size.isdigit():
                reason = "missing in the repository"
            elif not reason and int(size) > filters.max_file_size:
                reason = "too large"
            if reason:
                skipped.add(reason, path)
            else:
                yield Entry(path, blob, int(size))
    if git.returncode:
        raise InputInvalid("repository", printable(str(repository)), f"git cannot list commit {commit[:12]}")


def records(file: IO[bytes]) -> Iterator[bytes]:
    """What a NUL byte ends, in turn."""
    rest = b""
    while chunk := file.read(1 << 16):
        *found, rest = (rest + chunk).split(b"\0")
        yield from found


@dataclass(slots=True)
class _Blobs:
    """A process `git cat-file --batch`, started at the first question."""

    repository: Path
    _process: subprocess.Popen[bytes] | None = None

    def read(self, blob: str) -> bytes | None:
        """The content, None if the repository does not have it."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{blob}\n".encode())
            process.stdin.flush()
            head = process.stdout.readline().split()
            if len(head) != 3 or not head[2].isdigit():
                return None
            return process.stdout.read(int(head[2]) + 1)[:-1]
        except BrokenPipeError:  # git gave up on a damaged object
            self._end()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        command = git_command(self.repository, "cat-file", "--batch")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=git_environment()
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def __enter__(self) -> _Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
