"""Reads regular files, and says whether their time of change tells later whether they changed again."""

from __future__ import annotations

import os
import stat
import time
from typing import NamedTuple

from rest_local.retrieval.files import AS_IT_IS

RACY_NS = 2_000_000_000
"""A file that was written so short a time before its reading may be written again at the same time of change: FAT
stores even seconds."""


class Contents(NamedTuple):
    """What was read of a file. status: from before the reading; data: None if it is no regular file; mtime_ns: of the
    data, 0 if it is not certain.
    """

    status: os.stat_result
    data: bytes | None
    mtime_ns: int


def read_regular(path: str, limit: int) -> Contents:
    """Read up to `limit` bytes of a regular file. Raises OSError, also for a link."""
    # Opened before the status is read, so that both belong to the same file. O_NONBLOCK: a FIFO must not block.
    descriptor = os.open(path, os.O_RDONLY | AS_IT_IS | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        now, before = time.time_ns(), os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            return Contents(before, None, 0)
        data = file.read(limit)
        after = os.fstat(descriptor)
    same = before.st_mtime_ns == after.st_mtime_ns and before.st_size == after.st_size == len(data)
    return Contents(before, data, certain(before.st_mtime_ns, now) if same else 0)


def certain(mtime_ns: int, now_ns: int) -> int:
    """The time of change of a file that is read at `now_ns`, 0 if a later change could have the same time."""
    return mtime_ns if mtime_ns > 0 and now_ns - mtime_ns >= RACY_NS else 0
