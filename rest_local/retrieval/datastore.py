"""A committed datastore, opened for reading: segments over mapped files, searched as one text.

Readers need no lock: a reader keeps the snapshot that it opened, because published files are only replaced or unlinked.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap as memory
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt, DatastoreNotFound
from rest_local.retrieval.documents import Document, FileState
from rest_local.retrieval.format import KINDS, Manifest, SegmentEntry, file_name
from rest_local.retrieval.home import find, indexes, no_such_vocabulary, read_manifest
from rest_local.retrieval.rows import Context, Int32Array, Int64Array, Rows
from rest_local.retrieval.segment import Segment, search_all
from rest_local.retrieval.tables import DocumentTable, StateTable, numbers_in

log = logging.getLogger("rest_local.datastore")

_CHUNK = 1 << 20
_ATTEMPTS = 5

SMALL = 32 << 20
"""Datastores up to this number of bytes are read into memory. With a mapped datastore of 3.5 M tokens single lookups
took 0.5 to 6 ms now and then; read into memory, none took more than 0.4 ms. The cause is not known."""

BYTES_A_TOKEN = 7  # in tokens.bin and order.bin together, at most

OUTSIDE = "a segment points outside its text"

LEFT_OFF = 3  # tokens at the end of a text: a word that is being typed rarely has more


class Datastore:
    """An open datastore. Make one with `Datastore.open`, and use `with` or `close`.

    path: of the datastore; directory: of the index that was opened (`retrieval.home`); manifest: its commit; segments:
    in the order of the text; placed: (start in the text, segment) of each.
    """

    def __init__(self, path: Path, directory: Path, manifest: Manifest, mmap: bool) -> None:
        self.path, self.directory = path, directory
        self.manifest = manifest
        self._maps: list[memory.mmap] = []
        self.segments: list[Segment] = []
        self._documents: list[DocumentTable] = []
        self._offsets = np.cumsum([0, *(entry.tokens for entry in manifest.segments)], dtype=np.int64)
        self.placed: tuple[tuple[int, Segment], ...] = ()
        try:
            for entry in manifest.segments:
                self._open_segment(entry, mmap)
            self.placed = tuple(zip(self._offsets.tolist(), self.segments, strict=False))
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
        """Open the newest commit at `path`, after comparing the size of every file with the manifest.

        vocabulary_hash: open the index for this vocabulary and refuse a datastore without one; by default the first
        index is opened. vocabulary_name: its name in the error message. mmap: None reads a datastore of up to SMALL
        bytes into memory and maps a larger one; True maps, False reads any datastore (for network drives, where access
        to a mapped file can fail).

        Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary. If mapped, takes O(1) in the
        size of the datastore. Does not check the contents; `check` does.
        """
        path = Path(path)
        for attempt in range(_ATTEMPTS):
            directory, manifest = _newest_commit(path, vocabulary_hash, vocabulary_name)
            size = BYTES_A_TOKEN * sum(entry.tokens for entry in manifest.segments)
            try:
                return cls(path, directory, manifest, size > SMALL if mmap is None else mmap)
            except FileNotFoundError as error:
                # A build may have committed after we read the manifest, and deleted the files that it names.
                if attempt + 1 == _ATTEMPTS or read_manifest(directory) == manifest:
                    raise DatastoreCorrupt(path, f"{Path(error.filename).name} is missing") from error
        raise AssertionError("unreachable")

    def __enter__(self) -> Datastore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """As `Segment.rows`, merged over the segments. `locate` accepts the positions.

        Raises DatastoreCorrupt if a position on disk points outside its segment, or the size of a mapped file changed.
        Other damage is not detected here and only gives useless rows. Ids are always below the vocabulary size.
        """
        self._check_sizes()
        try:
            return search_all(self.placed, context, limit, depth)
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error

    def find(self, context: npt.NDArray[np.integer], limit: int = 64) -> tuple[int, int, npt.NDArray[np.int64]]:
        """(match, count, positions): the longest match of `context`, its number of places, and up to `limit` of them.

        Raises DatastoreCorrupt as `rows` does.
        """
        self._check_sizes()
        try:
            found = [(*segment.find(context), start, segment) for start, segment in self.placed]
            longest = max((match for match, *_ in found), default=0)
            if longest == 0:
                return 0, 0, np.empty(0, np.int64)
            best = [(low, high, start, segment) for match, low, high, start, segment in found if match == longest]
            places = [segment.positions(low, min(high, low + limit)) + start for low, high, start, segment in best]
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error
        return longest, sum(high - low for low, high, *_ in best), np.concatenate(places)[:limit]

    def to_leave_off(self, tokens: npt.NDArray[np.integer]) -> int:
        """The number of tokens at the end of a text that a search should leave out.

        A text that ends inside a word has other tokens at its end than stored text: the stored text may have `.items`
        as one token, while the text ends in `.` so far. Without such tokens the match is longer. Raises
        DatastoreCorrupt as `rows` does.
        """
        most = max(min(LEFT_OFF, len(tokens) - 1), 0)
        matches = [self.find(tokens[: len(tokens) - left], 1)[0] for left in range(most + 1)]
        return matches.index(max(matches))

    def locate(self, position: int) -> tuple[str, int]:
        """(document name, token offset in it) of a position in the text. O(log documents).

        Raises IndexError outside the text, and DatastoreCorrupt if the document table is damaged there.
        """
        segment, document, local = self._place(position)
        table = self._documents[segment]
        return table.name(document), local - table.start(document)

    def before(self, position: int) -> Int32Array:
        """The tokens before `position` in its document: int32 [token offset], each below the vocabulary size.

        Raises what `locate` raises, and DatastoreCorrupt for any other id.
        """
        segment, document, local = self._place(position)
        tokens = self.segments[segment].slice(self._documents[segment].start(document), local)
        self._check_ids(tokens, segment, document)
        return tokens

    def place(self, position: int, decode: Callable[[Sequence[int]], str]) -> tuple[str, int, int]:
        """(document name, line from 1, token offset in it) of a position, for display. Reads and decodes the document
        up to the position. Raises what `before` raises.
        """
        name, offset = self.locate(position)
        return name, decode(self.before(position).tolist()).count("\n") + 1, offset

    def document_names(self) -> list[str]:
        """The names of all documents that are not deleted, in the order of the text. Raises DatastoreCorrupt if a table
        is damaged.
        """
        self._check_sizes()
        return [
            name
            for index, entry in enumerate(self.manifest.segments)
            for name, alive in zip(self.names(index), _alive(entry.dead, entry.documents), strict=True)
            if alive
        ]

    def table(self, index: int) -> DocumentTable:
        """The document table of a segment, deleted ones too. Valid until the datastore is closed."""
        return self._documents[index]

    def names(self, index: int) -> list[str]:
        """The names of all documents of a segment, deleted ones too. Raises DatastoreCorrupt."""
        table = self._documents[index]
        return [table.name(number) for number in range(len(table))]

    def states(self, index: int) -> StateTable | None:
        """The file states of a segment, deleted ones too; None if it has none. Reads their file: O(states). Raises
        DatastoreCorrupt.
        """
        entry = self.manifest.segments[index]
        if not entry.states:
            return None
        path = self.directory / file_name(entry.name, "states")
        data = self._read(path, entry.files["states"].size, mmap=False)
        return StateTable(bytes(data), self.path, entry.states, entry.documents)

    def info(self) -> dict[str, Any]:
        """Its contents and their origin, as JSON-ready values. bytes: on disk, without the manifest."""
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
            "documents": sum(segment.live for segment in manifest.segments),
            "revision": manifest.revision,
            "segments": len(manifest.segments),
            "bytes": sum(entries),
            "recipe": dict(manifest.recipe),
        }

    def documents(self, index: int) -> list[Document]:
        """The documents of a segment that are not deleted, with the states of their files that are not deleted. Raises
        DatastoreCorrupt for one that no build can write.
        """
        self._check_sizes()
        table, segment, entry = self._documents[index], self.segments[index], self.manifest.segments[index]
        states = self._states_by_document(index)
        found = []
        for number in np.flatnonzero(_alive(entry.dead, entry.documents)).tolist():
            start, end = table.start(number), table.start(number + 1) - 1
            if not 0 <= start < end < len(segment):
                raise DatastoreCorrupt(self.path, f"document {number} of segment {index} lies outside the text")
            tokens = segment.slice(start, end)
            self._check_ids(tokens, index, number)
            found.append(Document(table.name(number), tokens, tuple(states.get(number, ()))))
        return found

    def spans(self, index: int) -> Int64Array:
        """The tokens of each document of a segment that is not deleted, without its separator: int64 [documents, 2],
        half-open intervals of the segment's text. Raises DatastoreCorrupt for one that no build can write.
        """
        entry, starts = self.manifest.segments[index], self._documents[index].starts.astype(np.int64)
        spans = np.stack([starts[:-1], starts[1:] - 1], axis=1)[_alive(entry.dead, entry.documents)]
        if (spans[:, 0] < 0).any() or (spans[:, 0] >= spans[:, 1]).any() or (spans[:, 1] >= entry.tokens).any():
            raise DatastoreCorrupt(self.path, f"a document of segment {index} lies outside the text")
        return spans

    def _states_by_document(self, index: int) -> dict[int, list[FileState]]:
        table, gone = self.states(index), self.manifest.segments[index].gone
        by_document: dict[int, list[FileState]] = {}
        if table is not None:
            for number in np.flatnonzero(_alive(gone, len(table))).tolist():
                by_document.setdefault(int(table.documents[number]), []).append(table[number])
        return by_document

    def check(self, segments: Sequence[SegmentEntry] | None = None) -> int:
        """Read every file of these segments (default: all), compare checksums, and return the number of bytes read.

        Raises DatastoreCorrupt for another checksum, and also if a newer commit has deleted the files of this snapshot.
        """
        total = 0
        for entry in self.manifest.segments if segments is None else segments:
            for kind in entry.files:
                path = self.directory / file_name(entry.name, kind)
                try:
                    digest, size = _digest(path)
                except OSError as error:
                    raise DatastoreCorrupt(self.path, f"{path.name} cannot be read: {error.strerror}") from error
                if digest != entry.files[kind].sha256:
                    raise DatastoreCorrupt(self.path, f"{path.name} does not match its checksum")
                total += size
        return total

    def trim(self) -> None:
        """Remove the mapped pages that lookups have touched from the resident set of this process.

        The pages stay in the system's cache, and the next lookups map them again. A `Service` calls this after some
        idle seconds. Without it the resident set grows to the size of the files, although the system can reclaim that
        memory at any time.
        """
        for mapped in self._maps:
            try:
                mapped.madvise(memory.MADV_DONTNEED)
            except OSError as error:  # locked pages stay; nothing depends on this call
                log.debug("datastore %s: its pages stay mapped: %s", self.path, error)

    def close(self) -> None:
        """Unmap the files. A second call does nothing. Rows that were returned stay valid."""
        for segment in self.segments:
            segment.release()
        for table in self._documents:
            table.release()
        self.segments, self._documents, self.placed = [], [], ()
        for mapped in self._maps:
            # A view may still be in use (in the traceback of an error, in another thread); it frees the map later.
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps = []

    def _check_sizes(self) -> None:
        """Raise DatastoreCorrupt if the size of a mapped file changed since it was opened, because a read after its new
        end kills the process with SIGBUS. Takes 0.5 us for a file. A file that is cut between this check and the read
        still kills the process; only reading into memory (`mmap=False`) is safe from that.
        """
        for mapped in self._maps:
            try:
                size = mapped.size()
            except OSError as error:  # such as a network drive that is disconnected
                raise DatastoreCorrupt(self.path, f"a mapped file cannot be read: {error.strerror}") from error
            if size != len(mapped):
                raise DatastoreCorrupt(self.path, "a file has changed its size since it was opened")

    def _check_ids(self, tokens: Int32Array, segment: int, document: int) -> None:
        """Raise DatastoreCorrupt for an id outside the vocabulary, because llama.cpp crashes on it."""
        if len(tokens) and int(tokens.max()) >= self.manifest.vocabulary.size:
            where = f"document {document} of segment {segment}"
            raise DatastoreCorrupt(self.path, f"{where} holds ids outside the vocabulary")

    def _place(self, position: int) -> tuple[int, int, int]:
        self._check_sizes()
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a text of {len(self)} tokens")
        segment = int(np.searchsorted(self._offsets, position, side="right")) - 1
        local = int(position - self._offsets[segment])
        return segment, self._documents[segment].at(local), local

    def _open_segment(self, entry: SegmentEntry, mmap: bool) -> None:
        data = {
            kind: self._read(self.directory / file_name(entry.name, kind), entry.files[kind].size, mmap)
            for kind in KINDS
        }
        self._documents.append(DocumentTable(data["documents"], self.path, entry.documents, entry.tokens))
        size = self.manifest.vocabulary.size
        dead = _intervals(self._documents[-1], entry.dead)
        segment = Segment(data["tokens"], data["order"], length=entry.tokens, vocab_size=size, dead=dead)
        self.segments.append(segment)
        if int(segment.slice(entry.tokens - 1, entry.tokens)[0]) != size:  # it keeps every match inside the text
            raise DatastoreCorrupt(self.path, "no separator ends the text of a segment")

    def _read(self, path: Path, size: int, mmap: bool) -> bytes | memory.mmap:
        """The content of a file, mapped or read, after a check of its size against the manifest."""
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
        mapped.madvise(memory.MADV_RANDOM)  # no read-ahead, because a lookup touches some 200 pages all over the file
        self._maps.append(mapped)
        return mapped


def _newest_commit(path: Path, vocabulary_hash: str | None, vocabulary_name: str) -> tuple[Path, Manifest]:
    """The directory and the manifest of the index for a vocabulary, None: of the first one. Raises DatastoreError."""
    directory = find(path, vocabulary_hash)
    try:
        manifest = read_manifest(directory)
    except DatastoreNotFound:
        if vocabulary_hash is None or not indexes(path):
            raise
        raise no_such_vocabulary(path, vocabulary_name, vocabulary_hash) from None
    if vocabulary_hash is not None and manifest.vocabulary.hash != vocabulary_hash:
        raise no_such_vocabulary(path, vocabulary_name, vocabulary_hash)
    return directory, manifest


def _alive(deleted: bytes, count: int) -> npt.NDArray[np.bool_]:
    """Which of `count` entries are not in the bitmap `deleted`."""
    alive = np.ones(count, np.bool_)
    alive[numbers_in(deleted)] = False
    return alive


def _intervals(table: DocumentTable, dead: bytes) -> Int64Array | None:
    """The deleted documents as half-open intervals of the text: int64 [documents, 2], sorted; None without any."""
    if not dead:
        return None
    numbers = numbers_in(dead)
    return np.stack([table.starts[numbers], table.starts[numbers + 1]], axis=1).astype(np.int64)


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size
