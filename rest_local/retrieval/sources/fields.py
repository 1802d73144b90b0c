"""The text in a field of a row, and the rows of JSON Lines, in bounded memory."""

from __future__ import annotations

import glob
import gzip
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from rest_local.errors import InputInvalid, printable
from rest_local.retrieval.sources.reading import certain
from rest_local.retrieval.sources.skipped import Skipped

MAX_ROW = 1 << 24
"""Bytes of a line of JSON; a longer one is skipped. Parsed it can take 30 times as much memory."""

WRONG = "without text in the field"
_GLOB = frozenset("*?[")
_FLAGS = (
    getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)  # a FIFO must not block


class Row(NamedTuple):
    """A row of a file. name: `FILE:LINE`, lines from 1; mark: for `Reading.text`."""

    name: str
    value: Any
    mark: int


def dig(value: Any, field: str) -> Any:
    """The value in a field of a row, None without it. Dots lead into objects and lists (`messages.0.content`), unless
    the object has a field whose name contains the dots.
    """
    while field:
        if isinstance(value, dict) and field in value:
            return value[field]
        first, _, field = field.partition(".")
        if isinstance(value, dict):
            value = value.get(first)
        elif isinstance(value, list) and first.isascii() and first.isdigit() and len(first) < 10:
            value = value[int(first)] if int(first) < len(value) else None
        else:
            return None
    return value


def files_of(path: str) -> list[str]:
    """The files that a path means, sorted: itself, or those that it matches if it is a glob. Raises InputInvalid."""
    if os.path.lexists(path) or not _GLOB.intersection(path):
        found = [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise InputInvalid("path", printable(path), "no file matches it")
    for name in found:
        try:
            regular = stat.S_ISREG(os.stat(name).st_mode)
        except OSError as error:
            raise InputInvalid("path", printable(name), (error.strerror or "cannot be read").lower()) from error
        if not regular:
            raise InputInvalid("path", printable(name), "not a regular file")
    return [str(Path(name).resolve()) for name in found]


def size_of(path: str) -> tuple[int, int]:
    """(files, bytes) of `files_of`."""
    sizes = [os.path.getsize(name) for name in files_of(path)]
    return len(sizes), sum(sizes)


def open_file(path: str) -> tuple[IO[bytes], int]:
    """A regular file, open for reading, and the mark of its rows. Raises InputInvalid."""
    try:
        now = time.time_ns()
        file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    except OSError as error:
        raise InputInvalid("path", printable(path), (error.strerror or "cannot be read").lower()) from error
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise InputInvalid("path", printable(path), "not a regular file")
    return file, certain(status.st_mtime_ns, now)


def json_rows(path: str, skipped: Skipped, looked_at: Callable[[int], None]) -> Iterator[Row]:
    """The values of the lines of a JSON Lines file, which may be compressed with gzip. A damaged line is counted, and
    of a damaged compressed file the rest. Raises InputInvalid if it cannot be opened.
    """
    raw, mark = open_file(path)
    with raw:
        lines: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if path.lower().endswith(".gz") else raw
        number = seen = 0
        while True:
            try:
                line = lines.readline(MAX_ROW + 1)
                cut = len(line) > MAX_ROW
                while cut and not line.endswith(b"\n") and (line := lines.readline(MAX_ROW)):
                    pass
            except (OSError, EOFError, zlib.error):
                skipped.add("damaged: the rest of a file", path)
                return
            looked_at(raw.tell() - seen)
            seen = raw.tell()
            if not line and not cut:
                return
            number += 1
            if cut:
                skipped.add("too large", path)
            elif line.strip():
                yield from _parsed(f"{path}:{number}", line, mark, skipped)


def _parsed(name: str, line: bytes, mark: int, skipped: Skipped) -> Iterator[Row]:
    try:
        yield Row(name, json.loads(line.decode("utf-8", "replace").removeprefix("\ufeff")), mark)
    except (ValueError, RecursionError):
        skipped.add("damaged JSON", name)
