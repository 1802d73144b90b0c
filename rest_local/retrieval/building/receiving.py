"""Writes the segments of a shard that another machine builds, as their parts arrive."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from rest_local.errors import DatastoreError
from rest_local.retrieval.building.shards import Plan, skipped_from_dict
from rest_local.retrieval.building.staging import Shard, record, segment_name
from rest_local.retrieval.building.writing import Progress
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import FileEntry, SegmentEntry, file_name, parse_segment
from rest_local.retrieval.rows import width_of


class Receiving:
    """One shard. `host`: where it is built; `cause`: why its task was lost, for messages."""

    def __init__(self, plan: Plan, number: int, directory: Path, files: Files, report: Progress) -> None:
        self.number, self.host, self.cause = number, "", ""
        self._plan, self._directory, self._files, self._report = plan, directory, files, report
        self._done: list[SegmentEntry] = []
        self._segment: _Segment | None = None
        self._reported: Counter[str] = Counter()

    def take(self, message: tuple[Any, ...]) -> bool:
        """Take a message of the task (`cluster`); whether it was the last, and the shard is recorded as done.

        Raises DatastoreError for data with another checksum, and OSError.
        """
        kind, *content = message
        if kind == "on":
            self.host = content[0]
        elif kind == "progress":
            self._reported.update(content[0])
            for what, amount in content[0].items():
                self._report(what, amount)
        elif kind == "segment":
            entry = parse_segment(content[0], width_of(self._plan.vocabulary.size))
            self._segment = _Segment(entry, content[1], self._directory, self._files)
        elif kind == "data" and self._segment and self._segment.add(content[0]):
            self._done.append(self._segment.entry)
            self._segment = None
        elif kind == "end":
            record(
                self._plan,
                self.number,
                self._directory,
                Shard(tuple(self._done), skipped_from_dict(content[0])),
                self._files,
            )
            return True
        return False

    def drop(self) -> None:
        """Forget what has arrived, because the task is lost."""
        if self._segment:
            self._segment.drop()
        self._segment, self.host = None, ""
        self._done.clear()
        for what, amount in self._reported.items():
            self._report(what, -amount)
        self._reported.clear()


class _Segment:
    """A segment that arrives: its files one after another, in the order of `kinds`."""

    def __init__(self, entry: SegmentEntry, kinds: list[str], directory: Path, files: Files) -> None:
        self.entry, self._directory, self._files = entry, directory, files
        self._new = secrets.token_hex(8)
        self._left = list(kinds)
        self._begin()

    def add(self, data: Any) -> bool:
        """Write a part, uint8 [n]; whether it was the last of the segment, whose files then have their names."""
        path = self._path(self._left[0])
        try:
            self._files.write(self._descriptor, memoryview(data))
            self._digest.update(data)
            self._size += len(data)
            if self._size < self.entry.files[self._left[0]].size:
                return False
            self._files.sync(self._descriptor)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        self._close()
        if FileEntry(self._size, self._digest.hexdigest()) != self.entry.files[self._left[0]]:
            raise DatastoreError(f"{path}: damaged on its way from the node that built it; build again")
        self._left.pop(0)
        if self._left:
            self._begin()
            return False
        self._publish()
        return True

    def drop(self) -> None:
        """Delete what has arrived."""
        self._close()
        for kind in self.entry.files:
            with suppress(OSError):
                self._files.unlink(self._path(kind))

    def _publish(self) -> None:
        if segment_name(self.entry.files) != self.entry.name:
            raise DatastoreError(f"segment {self.entry.name}: its name is not that of its content; build again")
        for kind in self.entry.files:
            self._files.rename(self._path(kind), self._directory / file_name(self.entry.name, kind))
        self._files.sync_directory(self._directory)

    def _begin(self) -> None:
        self._descriptor = self._files.create(self._path(self._left[0]))
        self._digest, self._size = hashlib.sha256(), 0

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _path(self, kind: str) -> Path:
        return self._directory / f"{kind}.new-{self._new}"
