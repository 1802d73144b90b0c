"""Read the tracked files of a git revision without a checkout, and the text that its newest commits wrote."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources.listing import git_command, git_environment, records, run_git, started
from rest_local.retrieval.sources.source import Reading, Skipped, Source
from rest_local.retrieval.sources.walk import Filters, absolute, read_text, wanted_name
from rest_local.stop import Closing

COMMITS = 1000
_SHORT = 12


@dataclass(frozen=True, slots=True)
class Git(Filters, Source):
    """A revision of a repository, which may be bare. `history` adds the text that the newest `commits` wrote.

    `revision` is as given, such as a branch; `commit` is its meaning when the source was prepared. The files are named
    `REPOSITORY@REVISION:PATH`, so that an update after the branch moved knows them again; those of the history
    `REPOSITORY@COMMIT:PATH` with 12 digits, and files too if the revision is a commit's id.
    """

    kind: ClassVar[str] = "git"
    repository: str
    revision: str = "HEAD"
    commit: str = ""
    history: bool = False
    commits: int = COMMITS

    def __post_init__(self) -> None:
        Filters.__post_init__(self)
        if self.commits < 1:
            raise OptionError(f"commits {self.commits}: must be at least 1")
        if self.revision.startswith("-") or self.commit.startswith("-") or not self.revision:
            raise OptionError(f"revision {self.revision!r}: give a branch, a tag or a commit")

    def texts(self, reading: Reading) -> Iterator[Text]:
        return self._texts(self._commit(), reading)

    def _texts(self, commit: str, reading: Reading) -> Iterator[Text]:
        repository, fixed = Path(self.repository), commit.startswith(self.revision) and len(self.revision) >= _SHORT
        name = f"{repository}@{commit[:_SHORT] if fixed else self.revision}"
        yield from files_of_commit(repository, commit, name, self, reading)
        if self.history:
            yield from changes(repository, commit, self.commits, self, reading)

    def about(self) -> str:
        return f"{self.repository}@{self.revision}{' with its history' if self.history else ''}"

    def prepared(self) -> Git:
        source = replace(self, repository=absolute(self.repository), commit="")
        return replace(source, commit=source._commit())

    def _commit(self) -> str:
        """Return the id of the recorded commit, else of the one that the revision means now. Raises InputInvalid."""
        if not os.path.isdir(self.repository):
            raise InputInvalid("repository", printable(self.repository), "no such directory; clone it first")
        wanted = self.commit or self.revision
        repository = Path(self.repository)
        answer = run_git(repository, "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}")
        if answer.returncode == 0 and (commit := os.fsdecode(answer.stdout).strip()):
            return commit
        problem = os.fsdecode(run_git(repository, "rev-parse", "--git-dir").stderr).strip()
        cause = problem.removeprefix("fatal: ") or f"no revision {wanted!r}"
        raise InputInvalid("repository", printable(self.repository), cause)


_REGULAR = ("100644", "100755")
# So many digits of a blob's id replace the time of change, which has room for these 60 bits.
_MARK_DIGITS = 15


class Entry(NamedTuple):
    """A regular file of a commit. `size` is in bytes."""

    path: str
    blob: str
    size: int


def files_of_commit(repository: Path, commit: str, name: str, filters: Filters, reading: Reading) -> Iterator[Text]:
    """Yield the text of every file of a commit that is worth indexing, named `NAME:PATH`, with a state that stays the
    same while the blob does. Raises InputInvalid if git cannot list the commit.
    """
    with Blobs(repository) as blobs:
        for entry in entries(repository, commit, filters, reading.skipped):
            title, mark = f"{name}:{entry.path}", int(entry.blob[:_MARK_DIGITS], 16) or 1
            reading.looked_at(entry.size)
            if reading.unchanged is not None and reading.unchanged(title, entry.size, mark):
                yield Text(title, None, FileState(title, entry.size, mark, b""))
                continue
            data = blobs.read(entry.blob)
            text, reason = ("", "missing in the repository") if data is None else read_text(title, data, filters)
            if data is None or reason:
                reading.skipped.add(reason, title)
            else:
                yield Text(title, text, FileState(title, len(data), mark, hashlib.sha256(data).digest()))


def entries(repository: Path, commit: str, filters: Filters, skipped: Skipped) -> Iterator[Entry]:
    """Yield the regular files of a commit whose names are wanted. Hidden ones, links and submodules are left out."""
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


@dataclass(slots=True)
class Blobs(Closing):
    """A process `git cat-file --batch`, started at the first question."""

    repository: Path
    _process: subprocess.Popen[bytes] | None = None

    def read(self, blob: str, most: int = sys.maxsize) -> bytes | None:
        """Return the content of a blob, or None if it is missing or has more than `most` bytes."""
        if self._process is None:
            command, pipe = git_command(self.repository, "cat-file", "--batch"), subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=git_environment()
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{blob}\n".encode())
            process.stdin.flush()
            head = process.stdout.readline().split()
            if len(head) != 3 or not head[2].isdigit():
                return None
            size = int(head[2])
            data = process.stdout.read(min(size, most))
            left = size + 1 - len(data)  # a line feed follows the content
            while left and (skipped := process.stdout.read(min(left, 1 << 20))):
                left -= len(skipped)
            return data if size <= most else None
        except BrokenPipeError:  # git gave up on a damaged object
            self.close()
            return None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


AROUND = 3  # unchanged lines on each side of a change

_COMMIT = re.compile(rb"commit [0-9a-f]{40,64}\n\Z")
_DIFF = b"diff " + b"--git "
_PIECE = 1 << 16  # longer lines are read in pieces of so many bytes


@dataclass(slots=True)
class _Change:
    """A file of a commit while it is read. `lines` are those of its new side, until they are too many."""

    commit: str
    path: str = ""
    lines: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, line: bytes, most: int) -> None:
        self.size += len(line)
        if self.size <= most:
            self.lines.append(line)


def changes(repository: Path, commit: str, commits: int, filters: Filters, reading: Reading) -> Iterator[Text]:
    """Yield the texts, named `REPOSITORY@COMMIT:PATH` with a commit of 12 digits. Raises InputInvalid if git fails."""
    arguments = (
        "log", f"--max-count={commits}", "--no-merges", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv",
        "--submodule=short", "--ignore-submodules=all", "--no-relative", "-O/dev/null", "--patch",
        f"--unified={AROUND}", "--src-prefix=a/", "--dst-prefix=b/", "--format=commit %H", commit, "--",
    )  # fmt: skip
    settings = ("-c", "core.quotePath=false", "-c", "diff.suppressBlankEmpty=false")
    wanted = wanted_name(filters)
    with started(git_command(repository, *settings, *arguments)) as git:
        assert git.stdout is not None
        for change in _changes(git.stdout, filters.max_file_size):
            name = f"{repository}@{change.commit[:12]}:{change.path}"
            hidden = any(part.startswith(".") for part in change.path.split("/"))
            reason = "hidden" if hidden else wanted(change.path)
            if not reason and change.size > filters.max_file_size:
                reason = "too large"
            if reason:
                reading.skipped.add(reason, name)
                continue
            text = b"".join(change.lines).decode("utf-8", "replace")
            mark = int(change.commit[:15], 16) or 1  # a commit never changes
            yield from reading.text(name, text, mark, allow_secrets=filters.allow_secrets)
    if git.returncode:
        raise InputInvalid("repository", printable(str(repository)), "git cannot read its history")


def _changes(log: IO[bytes], most: int) -> Iterator[_Change]:
    change = _Change("")
    kept = True  # True while a line of the new side is read
    inside = False  # True if the next piece continues a line
    while line := log.readline(_PIECE):
        if inside:
            if kept:
                change.add(line, most)
        elif (found := _COMMIT.match(line)) or line.startswith(_DIFF):
            if change.size:
                yield change
            change = _Change(line.split()[1].decode() if found else change.commit)
            kept = False
        elif not change.path:
            kept = False
            if line.startswith(b"+++ b/"):
                change.path = line[len(b"+++ b/") :].rstrip(b"\n\t").decode("utf-8", "surrogateescape")
        else:
            kept = line.startswith((b"+", b" "))
            if kept:
                change.add(line[1:], most)
        inside = not line.endswith(b"\n")
    if change.size:
        yield change
