"""Look at every file of a datastore, and list each fault.

Checksums find damage on the disk. The content is looked at as well, because a wrong file may have a right checksum if a
broken machine wrote it, or if it came from elsewhere. A look changes nothing. What is damaged is built again from the
sources that the datastore records (`index rebuild`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.errors import DatastoreCorrupt, DatastoreError
from rest_local.retrieval.documents import documents_of, states_of
from rest_local.retrieval.files import digest_of
from rest_local.retrieval.format import MANIFEST, SegmentEntry, VocabularyId, file_name
from rest_local.retrieval.home import folders, read_manifest
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, PADDING, from_big_endian, width_of

_SAMPLE = 1000
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file of an index."""

    directory: Path
    name: str  # file in the index
    kind: str  # manifest, version, missing, unreadable, size, checksum, table, ids or order
    what: str  # message to people
    segment: str = ""  # name of the faulty segment
    part: str = ""  # kind of its file

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("name", "kind", "what", "segment")}
        return {"directory": str(self.directory), **fields}


@dataclass(frozen=True)
class Looked:
    """The result of a look at an index, with the number of bytes that were read and are intact."""

    faults: tuple[Fault, ...]
    bytes: int = 0


def look(path: Path, directories: Iterable[Path] | None = None) -> list[Looked]:
    """Look at these indexes of the datastore at `path`, or at all of it.

    Every byte of the segments' files is read once, in little memory. The order of a segment is compared with its text
    at _SAMPLE places. Changes nothing and needs no lock. A commit in the meantime makes it look again.
    """
    return [_look_at(directory) for directory in directories or (path, *folders(path))]


def _look_at(directory: Path, attempts: int = _ATTEMPTS) -> Looked:
    seal, faults, total = _seal_of(directory), list[Fault](), 0
    try:
        manifest = read_manifest(directory)
    except DatastoreCorrupt as error:
        return Looked((Fault(directory, MANIFEST, "manifest", error.what),))
    except DatastoreError as error:
        unreadable = Fault(directory, MANIFEST, "version", str(error))
        return Looked((unreadable,) if os.path.lexists(directory / MANIFEST) else ())
    for entry in manifest.segments:
        found = segment_faults(directory, entry, manifest.vocabulary)
        faults += found
        total += sum(entry.files[kind].size for kind in {*entry.files} - {fault.part for fault in found})
    if faults and attempts > 1 and seal != _seal_of(directory):  # a commit came in the meantime
        return _look_at(directory, attempts - 1)
    return Looked(tuple(faults), total)


def _seal_of(directory: Path) -> bytes:
    """Return the sha256 of the manifest's bytes, empty without one, to notice a commit in between."""
    try:
        return hashlib.sha256((directory / MANIFEST).read_bytes()).digest()
    except OSError:
        return b""


def segment_faults(directory: Path, entry: SegmentEntry, vocabulary: VocabularyId) -> list[Fault]:
    """Return all faults of a segment, at most one for each of its files."""
    found = _Segment(directory, entry, vocabulary)
    for kind in entry.files:
        found.read(kind)
    found.check("documents", {"documents"}, found.check_documents)
    found.check("states", {"states"}, lambda: states_of(directory, entry))
    found.check("tokens", {"tokens", "documents"}, found.check_separators)
    found.check("order", {"tokens", "order"}, found.check_order)
    return found.faults


class _Segment:
    """A look at the files of one segment. `good` has the kinds of its files without a fault so far."""

    def __init__(self, directory: Path, entry: SegmentEntry, vocabulary: VocabularyId) -> None:
        self.directory, self.entry, self.vocabulary = directory, entry, vocabulary
        self.width = width_of(vocabulary.size)
        self.faults: list[Fault] = []
        self.good = set(entry.files)
        self.ends: list[np.ndarray[Any, np.dtype[np.int64]]] = []  # the separators' indices in the file of tokens
        self.outside = 0

    def fault(self, part: str, kind: str, what: str) -> None:
        name = file_name(self.entry.name, part)
        self.good.discard(part)
        self.faults.append(Fault(self.directory, name, kind, what, self.entry.name, part))

    def read(self, part: str) -> None:
        """Compare the size and the checksum of a file, and look at the ids of tokens on the way."""
        wanted = self.entry.files[part]
        try:
            digest, size = digest_of(self.path(part), self._look_at_ids if part == "tokens" else None)
        except FileNotFoundError:
            return self.fault(part, "missing", "is missing")
        except OSError as error:
            return self.fault(part, "unreadable", f"cannot be read: {error.strerror or error}")
        if size != wanted.size:
            return self.fault(part, "size", f"has {size} bytes, the manifest says {wanted.size}")
        if digest != wanted.sha256:
            return self.fault(part, "checksum", "does not match its checksum")
        if part == "tokens" and self.outside:
            self.fault(part, "ids", f"holds {self.outside} ids outside the vocabulary")
        return None

    def check(self, part: str, needs: set[str], check: Callable[[], object]) -> None:
        """Run a check of a file's content if the files that it needs are there and intact so far."""
        if needs <= self.good:
            try:
                check()
            except DatastoreCorrupt as error:
                self.fault(part, "table", error.what)
            except OSError as error:
                self.fault(part, "unreadable", f"cannot be read: {error.strerror or error}")

    def path(self, part: str) -> Path:
        return self.directory / file_name(self.entry.name, part)

    def check_documents(self) -> None:
        table = documents_of(self.directory, self.entry)
        starts = table.starts
        if not (starts[1:] > starts[:-1] + np.uint64(1)).all():
            self.fault("documents", "table", "the documents are not in order")
        for number in range(len(table)):
            table.name(number)

    def check_separators(self) -> None:
        """Check that each document ends in a separator, and that there is none elsewhere."""
        length, backwards = self.entry.tokens, np.concatenate(self.ends)
        before, after = np.arange(MAX_DEPTH), np.arange(MAX_DEPTH + length, PADDING + length)
        inside = MAX_DEPTH + length - documents_of(self.directory, self.entry).starts[:0:-1].astype(np.int64)
        if not np.array_equal(backwards, np.concatenate([before, inside, after])):
            self.fault("tokens", "ids", "the separators are not at the ends of the documents")

    def _look_at_ids(self, chunk: bytes, at: int) -> None:
        whole = len(chunk) // self.width * self.width
        ids = from_big_endian(np.frombuffer(chunk[:whole], np.uint8), self.width)
        self.outside += int(np.count_nonzero(ids > self.vocabulary.size))
        self.ends.append(np.flatnonzero(ids == self.vocabulary.size) + at // self.width)

    def check_order(self) -> None:
        """Compare neighbours in the order at places all over the file."""
        count = self.entry.files["order"].size // 4
        with self.path("order").open("rb") as order, self.path("tokens").open("rb") as tokens:

            def text(entry: int) -> list[int]:
                tokens.seek((MAX_DEPTH + entry) * self.width)
                window = np.frombuffer(tokens.read(MAX_MATCH * self.width), np.uint8)
                ids: list[int] = from_big_endian(window, self.width).tolist()
                size = self.vocabulary.size
                return ids[: ids.index(size) + 1] if size in ids else ids  # equal up to a separator is equal

            for rank in sorted({count * part // _SAMPLE for part in range(_SAMPLE)}):
                order.seek(4 * rank)
                entries = np.frombuffer(order.read(8), "<u4").tolist()
                if max(entries) >= self.entry.tokens:
                    return self.fault("order", "order", f"rank {rank} lies outside the text")
                if len(set(entries)) < len(entries) or text(entries[0]) > text(entries[-1]):
                    return self.fault("order", "order", f"is not sorted at rank {rank}")
        return None
