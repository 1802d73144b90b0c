"""Unified diffs of two versions of a file: a patch for a pipe, coloured lines for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from rest_local.editing.text_file import lines_of
from rest_local.errors import printable

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def unified_diff(path: Path, old: str, new: str) -> Iterator[str]:
    """The lines of a patch with their ends, as `patch -p1` and `git apply` read it (`-p0` for an absolute path);
    none where nothing differs.
    """
    from difflib import unified_diff as lines_changed

    name = printable(path.as_posix())
    names = (name, name) if path.is_absolute() else (f"a/{name}", f"b/{name}")
    before, after = ([line + end for line, end in lines_of(text)] for text in (old, new))
    for line in lines_changed(before, after, *names):
        if line.endswith("\n"):
            yield line
        else:
            yield from (f"{line}\n", "\\ No newline at end of file\n")


def coloured(line: str) -> str:
    """A line of a diff for a terminal, without its end and without byte order marks. What a file holds cannot control
    the terminal. Plain where NO_COLOR is set or the terminal is dumb.
    """
    shown = "\t".join(map(printable, line.rstrip("\r\n").replace("\ufeff", "").split("\t")))
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return shown
    if line.startswith(("--- ", "+++ ")):
        return click.style(shown, bold=True)
    return click.style(shown, fg=_COLOURS.get(line[:1]))


def count_changes(lines: list[str]) -> tuple[int, int]:
    """How many lines a diff adds and removes."""
    body = lines[2:]
    return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)
