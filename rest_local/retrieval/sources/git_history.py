"""What the newest commits of a git repository wrote, with the lines around it: also text that was changed since.

Each file of each commit is a document, the newest commit first: the new side of its diff. Left out are merges, binary
files, text that looks like a secret, and names of files with quotes or control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rest_local.errors import InputInvalid, printable
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.corpus import Filters, wanted_name
from rest_local.retrieval.sources.git import git_command, started
from rest_local.retrieval.sources.source import Reading

AROUND = 3
"""Unchanged lines on each side of a change."""

_COMMIT = re.compile(rb"commit [0-9a-f]{40,64}\n\Z")
_DIFF = b"diff " + b"--git "
_PIECE = 1 << 16  # bytes of a longer line that are read at once


@dataclass(slots=True)
class _Change:
    """A file of a commit while it is read. lines: of its new side, until they are too many."""

    commit: str
    path: str = ""
    lines: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, line: bytes, most: int) -> None:
        self.size += len(line)
        if self.size <= most:
            self.lines.append(line)


def changes(repository: Path, commit: str, commits: int, filters: Filters, reading: Reading) -> Iterator[Text]:
    """The texts, named `REPOSITORY@COMMIT:PATH` with 12 digits of the commit. Raises InputInvalid if git fails."""
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
    kept = True  # whether the line that is being read belongs to the new side
    inside = False  # whether the next piece continues a line
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
