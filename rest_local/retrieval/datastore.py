"""A committed datastore, opened for reading: segments over mapped files, searched as one text.

Needs no lock: a reader keeps the snapshot it opened, since published files are only ever replaced or unlinked.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap as memory
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreNotFound, DatastoreVersion, DatastoreVocabulary
from rest_local.retrieval.format import KINDS, MANIFEST, Documents, Manifest, SegmentEntry, file_name
from rest_local.retrieval.rows import Context, Int32Array, Rows
from rest_local.retrieval.segment import Segment, search_all

log = logging.getLogger("rest_local.datastore")

MAX_MANIFEST = 64 << 20
_CHUNK = 1 << 20
_ATTEMPTS = 5

SMALL = 32 << 20
"""Bytes up to which a datastore is read into memory. Mapped, single lookups in 3.5 M tokens took 0.5 to 6 ms now and
then; read into memory, none of those timed took over 0.4 ms. Why was not found out."""

BYTES_A_TOKEN = 7  # tokens.bin and order.bin, at most

OUTSIDE = "a segment points outside its text"

LEFT_OFF = 3  # tokens at the end of a text: a word that is being typed has rarely more


class Datastore:
    """An open datastore. Use `Datastore.open`, in a `with` statement or with `close`.

    path: its directory; manifest: the commit that was opened.
    """

    def __init__(self, path: Path, manifest: Manifest, mmap: bool) -> None:
        self.path = path
        self.manifest = manifest
        self._maps: list[memory.mmap] = []
        self._segments: list[Segment] = []
        self._documents: list[Documents] = []
        self._offsets = np.cumsum([0, *(entry.tokens for entry in manifest.segments)], dtype=np.int64)
        self._placed: tuple[tuple[int, Segment], ...] = ()
        try:
            for entry in manifest.segments:
                self._open_segment(entry, mmap)
            self._placed = tuple(zip(self._offsets.tolist(), self._segments, strict=False))
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        vocabulary_hash: str | None = None,
        vocabulary_name: str = "",
        mmap: bool | None = None,
    ) -> Datastore:
        """Opens the newest commit at `path`, after comparing every file's size with the manifest.

        vocabulary_hash: refuse a datastore for another one; vocabulary_name: what the refusal calls it.
        mmap: None reads a datastore of up to SMALL bytes into memory and maps a larger one; False reads any (for
        network drives, where a map can break off), True maps any.

        Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary. O(1) in the size of the
        datastore when mapped. Contents are not checked here: `check` does that.
        """
        directory = Path(path)
        for attempt in range(_ATTEMPTS):
            manifest = read_manifest(directory)
            found = manifest.vocabulary
            if vocabulary_hash is not None and found.hash != vocabulary_hash:
                name, wanted = f"{found.name or '?'} ({found.hash[:12]})", f"{vocabulary_name} ({vocabulary_hash[:12]})"
                raise DatastoreVocabulary(directory, name, wanted, rebuild_command(directory, manifest))
            size = BYTES_A_TOKEN * sum(entry.tokens for entry in manifest.segments)
            try:
                return cls(directory, manifest, size > SMALL if mmap is None else mmap)
            except FileNotFoundError as error:
                # A build may have committed between our two reads and deleted what the old manifest names.
                if attempt + 1 == _ATTEMPTS or read_manifest(directory) == manifest:
                    raise DatastoreCorrupt(directory, f"{Path(error.filename).name} is missing") from error
        raise AssertionError("unreachable")

    def __enter__(self) -> Datastore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in the order of the text."""
        return tuple(self._segments)

    @property
    def placed(self) -> tuple[tuple[int, Segment], ...]:
        """Where each segment starts in the text, and the segment."""
        return self._placed

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """As `Segment.rows`, merged over the segments; `locate` takes the positions.

        Raises DatastoreCorrupt if a position on disk points outside its segment, or a mapped file has changed its size.
        Other damage to the files cannot be seen here and only makes rows useless; ids are always below the vocabulary's
        size.
        """
        self._check_sizes()
        try:
            return search_all(self._placed, context, limit, depth)
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error

    def find(self, context: npt.NDArray[np.integer], limit: int = 64) -> tuple[int, int, npt.NDArray[np.int64]]:
        """(match, count, positions): the longest match of `context`, in how many places, and up to `limit` of them.

        Raises DatastoreCorrupt as `rows` does.
        """
        self._check_sizes()
        try:
            found = [(*segment.find(context), start, segment) for start, segment in self._placed]
            longest = max((match for match, *_ in found), default=0)
            if longest == 0:
                return 0, 0, np.empty(0, np.int64)
            best = [(low, high, start, segment) for match, low, high, start, segment in found if match == longest]
            places = [segment.positions(low, min(high, low + limit)) + start for low, high, start, segment in best]
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error
        return longest, sum(high - low for low, high, *_ in best), np.concatenate(places)[:limit]

    def to_leave_off(self, tokens: npt.NDArray[np.integer]) -> int:
        """How many tokens at the end of a text to search without. A text that ends inside a word ends in other tokens
        than stored text has there: after `self` it may hold `.items` as one, where the text has `.` so far. What agrees
        without them is longer. Raises DatastoreCorrupt as `rows` does.
        """
        most = max(min(LEFT_OFF, len(tokens) - 1), 0)
        matches = [self.find(tokens[: len(tokens) - left], 1)[0] for left in range(most + 1)]
        return matches.index(max(matches))

    def locate(self, position: int) -> tuple[str, int]:
        """(document name, token offset in it) of a position of the text. O(log documents).

        IndexError outside the text; DatastoreCorrupt where the document table is damaged there.
        """
        segment, document, local = self._place(position)
        table = self._documents[segment]
        return table.name(document), local - table.start(document)

    def before(self, position: int) -> Int32Array:
        """The tokens of the document of `position` from its start up to there: int32 [token offset], each below the
        vocabulary's size. Errors as `locate`; DatastoreCorrupt for any other id.
        """
        segment, document, local = self._place(position)
        tokens = self._segments[segment].slice(self._documents[segment].start(document), local)
        self._check_ids(tokens, segment, document)
        return tokens

    def place(self, position: int, decode: Callable[[Sequence[int]], str]) -> tuple[str, int, int]:
        """(document name, line from 1, token offset in it) of a position, for people. Reads and decodes the document up
        to there. Errors as `before`.
        """
        name, offset = self.locate(position)
        return name, decode(self.before(position).tolist()).count("\n") + 1, offset

    def document_names(self) -> list[str]:
        """All document names, in the order of the text. DatastoreCorrupt where a table is damaged."""
        self._check_sizes()
        return [table.name(index) for table in self._documents for index in range(len(table))]

    def info(self) -> dict[str, Any]:
        """What it holds and from where, as JSON-ready values. bytes: on disk, without the manifest."""
        manifest = self.manifest
        entries = [file.size for segment in manifest.segments for file in segment.files.values()]
        return {
            "path": str(self.path),
            "created": manifest.created,
            "vocabulary": {
                "name": manifest.vocabulary.name,
                "size": manifest.vocabulary.size,
                "hash": manifest.vocabulary.hash,
            },
            "tokens": len(self),
            "documents": sum(segment.documents for segment in manifest.segments),
            "segments": len(manifest.segments),
            "bytes": sum(entries),
            "recipe": dict(manifest.recipe),
        }

    def documents(self, index: int) -> list[tuple[str, Int32Array]]:
        """Name and tokens of every document of a segment. DatastoreCorrupt where one is not what a build writes."""
        self._check_sizes()
        table, segment = self._documents[index], self._segments[index]
        found = []
        for number in range(len(table)):
            start, end = table.start(number), table.start(number + 1) - 1
            if not 0 <= start < end < len(segment):
                raise DatastoreCorrupt(self.path, f"document {number} of segment {index} lies outside the text")
            tokens = segment.slice(start, end)
            self._check_ids(tokens, index, number)
            found.append((table.name(number), tokens))
        return found

    def check(self, segments: Sequence[SegmentEntry] | None = None) -> int:
        """Reads every file of these segments (default: all) and compares checksums; returns the bytes read.

        Reads the files the snapshot names: DatastoreCorrupt also if a newer commit has deleted them meanwhile.
        """
        total = 0
        for entry in self.manifest.segments if segments is None else segments:
            for kind in KINDS:
                path = self.path / file_name(entry.name, kind)
                try:
                    digest, size = _digest(path)
                except OSError as error:
                    raise DatastoreCorrupt(self.path, f"{path.name} cannot be read: {error.strerror}") from error
                if digest != entry.files[kind].sha256:
                    raise DatastoreCorrupt(self.path, f"{path.name} does not match its checksum")
                total += size
        return total

    def trim(self) -> None:
        """Takes the mapped pages that lookups have touched out of this process, for an owner that has to be small.

        They stay in the system's cache and are mapped again by the next lookups. A `Service` calls it when it has had
        nothing to do for some seconds. Without it the resident set grows up to the size of the files, all of it memory
        that the system may take back at any time.
        """
        for mapped in self._maps:
            try:
                mapped.madvise(memory.MADV_DONTNEED)
            except OSError as error:  # pages that are locked stay: this is an economy, and nobody depends on it
                log.debug("datastore %s: its pages stay mapped: %s", self.path, error)

    def close(self) -> None:
        """Unmaps the files. A second call does nothing; rows that were returned stay valid."""
        for segment in self._segments:
            segment.release()
        for table in self._documents:
            table.release()
        self._segments, self._documents, self._placed = [], [], ()
        for mapped in self._maps:
            # A view may still be alive (in the traceback of a refused file, in another thread): the map goes with it.
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps = []

    def _check_sizes(self) -> None:
        """Raises DatastoreCorrupt where a mapped file has another size than when it was opened: reading beyond a new
        end kills the process with SIGBUS. 0.5 us a file. A file that is cut between this look and the read still does;
        only reading into memory (`mmap=False`) is safe from that.
        """
        for mapped in self._maps:
            try:
                size = mapped.size()
            except OSError as error:  # a network drive that is gone
                raise DatastoreCorrupt(self.path, f"a mapped file cannot be read: {error.strerror}") from error
            if size != len(mapped):
                raise DatastoreCorrupt(self.path, "a file has changed its size since it was opened")

    def _check_ids(self, tokens: Int32Array, segment: int, document: int) -> None:
        """Raises DatastoreCorrupt unless all are of the vocabulary: llama.cpp crashes on others."""
        if len(tokens) and int(tokens.max()) >= self.manifest.vocabulary.size:
            raise DatastoreCorrupt(self.path, f"document {document} of segment {segment} holds ids of no vocabulary")

    def _place(self, position: int) -> tuple[int, int, int]:
        self._check_sizes()
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a text of {len(self)} tokens")
        segment = int(np.searchsorted(self._offsets, position, side="right")) - 1
        local = int(position - self._offsets[segment])
        return segment, self._documents[segment].at(local), local

    def _open_segment(self, entry: SegmentEntry, mmap: bool) -> None:
        data = {
            kind: self._read(self.path / file_name(entry.name, kind), entry.files[kind].size, mmap) for kind in KINDS
        }
        self._documents.append(Documents(data["documents"], self.path, entry.documents, entry.tokens))
        size = self.manifest.vocabulary.size
        segment = Segment(data["tokens"], data["order"], length=entry.tokens, vocab_size=size)
        self._segments.append(segment)
        if int(segment.slice(entry.tokens - 1, entry.tokens)[0]) != size:  # what keeps every match inside the text
            raise DatastoreCorrupt(self.path, "no separator ends the text of a segment")

    def _read(self, path: Path, size: int, mmap: bool) -> bytes | memory.mmap:
        """A file's content, mapped or read, once its size is known to be what the manifest says."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise DatastoreCorrupt(self.path, f"{path.name} has {found} bytes, the manifest says {size}")
                if not mmap:
                    return file.read()
                mapped = memory.mmap(file.fileno(), size, access=memory.ACCESS_READ)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DatastoreCorrupt(self.path, f"{path.name} cannot be read: {error.strerror or error}") from error
        mapped.madvise(memory.MADV_RANDOM)  # no read-ahead: a lookup touches some 200 pages, all over the file
        self._maps.append(mapped)
        return mapped


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the newest commit. Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion."""
    if directory.is_file():
        raise DatastoreVersion(directory, "of a single file", "1, a directory")
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST + 1)
    except FileNotFoundError as error:
        raise DatastoreNotFound(directory) from error
    except OSError as error:
        raise DatastoreError(
            f"datastore {directory}: {MANIFEST} cannot be read: {error.strerror}; check its permissions"
        ) from error
    if len(data) > MAX_MANIFEST:
        raise DatastoreCorrupt(directory, f"the manifest is larger than {MAX_MANIFEST} bytes")
    return Manifest.parse(data, directory)


def rebuild_command(directory: Path, manifest: Manifest) -> str:
    """The command that builds the datastore again, from its recipe, with the caller's model."""
    recipe = manifest.recipe
    words = ["rest-local", "index", "build", *(recipe.get("paths") or ["PATH"])]
    for option in ("include", "exclude"):
        for glob in recipe.get(option, ()):
            words += [f"--{option}", glob]
    return shlex.join([*words, "-o", str(directory), "-m", "MODEL"])


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size
