"""Search a committed datastore: segments over mapped files, as one text.

Readers need no lock: a reader keeps the snapshot that it opened, because published files are only replaced or unlinked.
"""

from __future__ import annotations

import contextlib
import logging
import mmap as memory
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.documents import (
    Document,
    DocumentTable,
    StateTable,
    alive,
    intervals,
    other_names,
    states_by_document,
)
from rest_local.retrieval.files import digest_of
from rest_local.retrieval.format import KINDS, Manifest, SegmentEntry, file_name
from rest_local.retrieval.home import newest_commit, read_manifest
from rest_local.retrieval.rows import Context, Int32Array, Int64Array, Rows
from rest_local.retrieval.segment import Segment, search_all
from rest_local.retrieval.sparse_index import Sample
from rest_local.stop import Closing

log = logging.getLogger("rest_local.datastore")

_ATTEMPTS = 5

SMALL = 32 << 20
"""Datastores up to this number of bytes are read into memory. With a mapped datastore of 3.5 M tokens single lookups
took 0.5 to 6 ms now and then; read into memory, none took more than 0.4 ms. The cause is not known."""

# A lookup compares the size of so many mapped files: all of two segments. All files of 16 segments took 26 us.
CHECKED = 8

BYTES_A_TOKEN = 7  # maximum for tokens.bin and order.bin together

OUTSIDE = "a segment points outside its text"

LEFT_OFF = 3  # a word that is being typed rarely has more tokens


class Datastore(Closing):
    """An open datastore. Make one with `Datastore.open`, and use `with` or `close`.

    Attributes:
        path: directory of the datastore
        directory: directory of the opened index (`retrieval.home`)
        manifest: its commit
        segments: segments in the order of the text
        placed: (start in the text, segment) of each segment
    """

    def __init__(self, path: Path, directory: Path, manifest: Manifest, mmap: bool) -> None:
        self.path, self.directory = path, directory
        self.manifest = manifest
        self._maps: list[memory.mmap] = []
        self._next_check = 0  # index of the next map that `_check_sizes` looks at
        self.segments: list[Segment] = []
        self._documents: list[DocumentTable] = []
        self._renamed: dict[int, dict[int, str]] = {}
        self._states: dict[int, StateTable] = {}
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
        """Open the newest commit of a datastore, after comparing the size of every file with the manifest.

        Takes O(1) in the size of the datastore if mapped. Does not check the contents; `check` does.

        Args:
            path: directory of the datastore
            vocabulary_hash: open the index for this vocabulary, by default the first index
            vocabulary_name: its name for error messages
            mmap: None reads a datastore of up to SMALL bytes into memory and maps a larger one; True maps, False reads
                any datastore (for network drives, where access to a mapped file can fail)

        Raises:
            DatastoreNotFound: there is no datastore at `path`
            DatastoreCorrupt: a file is missing, unreadable or has another size
            DatastoreVersion: it has another format
            DatastoreVocabulary: there is no index for this vocabulary
        """
        path = Path(path)
        for attempt in range(_ATTEMPTS):
            directory, manifest = newest_commit(path, vocabulary_hash, vocabulary_name)
            size = BYTES_A_TOKEN * sum(entry.tokens for entry in manifest.segments)
            try:
                return cls(path, directory, manifest, size > SMALL if mmap is None else mmap)
            except FileNotFoundError as error:
                # A build may have committed after we read the manifest, and deleted the files that it names.
                if attempt + 1 == _ATTEMPTS or read_manifest(directory) == manifest:
                    raise DatastoreCorrupt(path, f"{Path(error.filename).name} is missing") from error
        raise AssertionError("unreachable")

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """Return the tokens that follow the longest matches of a context, as `Segment.rows`, merged over the segments.

        Damage that no error names is not detected here and only gives useless rows.

        Args:
            context: the newest tokens, the last one last
            limit: rows to return at most
            depth: tokens in a row at most

        Returns:
            Rows, whose ids are below the vocabulary size and whose positions `locate` accepts.

        Raises:
            DatastoreCorrupt: a position on disk points outside its segment, or the size of a mapped file changed
        """
        self._check_sizes(CHECKED)
        try:
            return search_all(self.placed, context, limit, depth)
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error

    def find(self, context: npt.NDArray[np.integer], limit: int = 64) -> tuple[int, int, npt.NDArray[np.int64]]:
        """Find the longest match of the end of a text.

        Args:
            context: token ids, the last one last
            limit: places to return at most

        Returns:
            The length of the longest match, the number of its places, and the first places, int64.

        Raises:
            DatastoreCorrupt: as of `rows`
        """
        self._check_sizes()
        try:
            found = [(*segment.find(context), start, segment) for start, segment in self.placed]
            longest = max((match for match, *_ in found), default=0)
            if longest == 0:
                return 0, 0, np.empty(0, np.int64)
            best = [(low, high, start, segment) for match, low, high, start, segment in found if match == longest]
            places = [segment.positions(low, high, limit) + start for low, high, start, segment in best]
            count = sum(segment.count(low, high) for low, high, _, segment in best)
        except IndexError as error:
            raise DatastoreCorrupt(self.path, OUTSIDE) from error
        return longest, count, np.concatenate(places)[:limit]

    def to_leave_off(self, tokens: npt.NDArray[np.integer]) -> int:
        """Return the number of tokens at the end of a text that a search should leave out.

        A text that ends inside a word has other tokens at its end than stored text: the stored text may have `.items`
        as one token, while the text ends in `.` so far. Without such tokens the match is longer.

        Raises:
            DatastoreCorrupt: as of `rows`
        """
        most = max(min(LEFT_OFF, len(tokens) - 1), 0)
        matches = [self.find(tokens[: len(tokens) - left], 1)[0] for left in range(most + 1)]
        return matches.index(max(matches))

    def locate(self, position: int) -> tuple[str, int]:
        """Return the name of the document at a position, and the token offset in it. O(log documents).

        Args:
            position: of a row, or of `find`

        Raises:
            IndexError: the position is outside the text
            DatastoreCorrupt: the document table is damaged there
        """
        segment, document, local = self._place(position)
        return self._name(segment, document), local - self._documents[segment].start(document)

    def before(self, position: int) -> Int32Array:
        """Return the tokens before a position in its document: int32 [token offset], each below the vocabulary size.

        Args:
            position: of a row, or of `find`

        Raises:
            IndexError: the position is outside the text
            DatastoreCorrupt: the document is damaged, or has an id outside the vocabulary
        """
        segment, document, local = self._place(position)
        tokens = self.segments[segment].slice(self._documents[segment].start(document), local)
        self._check_ids(tokens, segment, document)
        return tokens

    def place(self, position: int, decode: Callable[[Sequence[int]], str]) -> tuple[str, int, int]:
        """Return the document's name, the line from 1, and the token offset of a position, for display.

        Reads and decodes the document up to the position.

        Args:
            position: of a row, or of `find`
            decode: turns tokens into text

        Raises:
            IndexError: the position is outside the text
            DatastoreCorrupt: the document is damaged, or has an id outside the vocabulary
        """
        name, offset = self.locate(position)
        return name, decode(self.before(position).tolist()).count("\n") + 1, offset

    def document_names(self) -> list[str]:
        """Return the names of all documents that are not deleted, in text order.

        Raises:
            DatastoreCorrupt: the document table is damaged
        """
        self._check_sizes()
        return [
            self._name(index, number)
            for index, entry in enumerate(self.manifest.segments)
            for number in np.flatnonzero(alive(entry.dead, entry.documents)).tolist()
        ]

    def table(self, index: int) -> DocumentTable:
        """Return the document table of a segment with deleted ones, valid until the datastore is closed."""
        return self._documents[index]

    def names(self, index: int) -> list[str]:
        """Return the stored names of all documents of a segment, with deleted ones. Raises DatastoreCorrupt."""
        table = self._documents[index]
        return [table.name(number) for number in range(len(table))]

    def _name(self, index: int, number: int) -> str:
        """Return a document's name. If the file of that name has other content by now, return another file's name."""
        if index not in self._renamed:
            gone = self.manifest.segments[index].gone
            self._renamed[index] = {}
            with contextlib.suppress(FileNotFoundError):  # unlinked after a newer commit
                if gone and (states := self.states(index)):
                    self._renamed[index] = other_names(self._documents[index], states, gone)
                    del self._states[index]  # a reader keeps only what it needs
        return self._renamed[index].get(number) or self._documents[index].name(number)

    def states(self, index: int) -> StateTable | None:
        """Return the file states of a segment with deleted ones, or None without any. Reads their file once: O(states).

        Raises:
            DatastoreCorrupt: the file is damaged
            FileNotFoundError: a newer commit has deleted it
        """
        entry = self.manifest.segments[index]
        if entry.states and index not in self._states:
            path = self.directory / file_name(entry.name, "states")
            data = self._read(path, entry.files["states"].size, mmap=False)
            self._states[index] = StateTable(bytes(data), self.path, entry.states, entry.documents)
        return self._states.get(index)

    def info(self) -> dict[str, Any]:
        """Describe contents and origin as JSON-ready values. `bytes` is the size on disk without the manifest."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "created": manifest.created,
            "vocabulary": manifest.vocabulary.to_dict(),
            "tokens": len(self),
            "documents": sum(segment.live for segment in manifest.segments),
            "revision": manifest.revision,
            "segments": len(manifest.segments),
            "bytes": manifest.size,
            "recipe": dict(manifest.recipe),
        }

    def documents(self, index: int) -> list[Document]:
        """Return the documents of `each_document` at once."""
        return list(self.each_document(index))

    def each_document(self, index: int, entry: SegmentEntry | None = None) -> Iterator[Document]:
        """Yield the documents of a segment that are not deleted, with the states of their files that are not deleted.

        `entry` replaces the manifest's bitmaps.

        Raises:
            DatastoreCorrupt: no build can write such a document
        """
        self._check_sizes()
        table, entry = self._documents[index], entry or self.manifest.segments[index]
        states = states_by_document(self.states(index), entry.gone)
        for number in np.flatnonzero(alive(entry.dead, entry.documents)).tolist():
            files = tuple(states.get(number, ()))
            name = table.name(number)
            if files and name not in (state.name for state in files):
                name = files[0].name
            yield Document(name, self._text(index, number), files)

    def spans(self, index: int) -> Int64Array:
        """Return the tokens of each live document of a segment, without separators: int64 [documents, 2].

        These are half-open intervals of the segment's text.

        Raises:
            DatastoreCorrupt: no build can write such an interval
        """
        entry, starts = self.manifest.segments[index], self._documents[index].starts.astype(np.int64)
        spans = np.stack([starts[:-1], starts[1:] - 1], axis=1)[alive(entry.dead, entry.documents)]
        if (spans[:, 0] < 0).any() or (spans[:, 0] >= spans[:, 1]).any() or (spans[:, 1] >= entry.tokens).any():
            raise DatastoreCorrupt(self.path, f"a document of segment {index} lies outside the text")
        return spans

    def _text(self, index: int, number: int) -> Int32Array:
        table, segment = self._documents[index], self.segments[index]
        start, end = table.start(number), table.start(number + 1) - 1
        if not 0 <= start < end < len(segment):
            raise DatastoreCorrupt(self.path, f"document {number} of segment {index} lies outside the text")
        tokens = segment.slice(start, end)
        self._check_ids(tokens, index, number)
        return tokens

    def check(self, segments: Sequence[SegmentEntry] | None = None) -> int:
        """Read every file of some segments, and compare checksums.

        Args:
            segments: of the manifest; by default all

        Returns:
            The number of bytes read.

        Raises:
            DatastoreCorrupt: a checksum differs, or a newer commit has deleted the files of this snapshot
        """
        total = 0
        for entry in self.manifest.segments if segments is None else segments:
            for kind in entry.files:
                path = self.directory / file_name(entry.name, kind)
                try:
                    digest, size = digest_of(path)
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
            mapped.madvise(memory.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the files. A second call does nothing. Rows that were returned stay valid."""
        for segment in self.segments:
            segment.release()
        for table in self._documents:
            table.release()
        self.segments, self._documents, self.placed = [], [], ()
        self._states.clear()
        for mapped in self._maps:
            # A view may still be in use (in the traceback of an error, in another thread); it frees the map later.
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps = []

    def _check_sizes(self, most: int | None = None) -> None:
        """Raise DatastoreCorrupt if the size of a mapped file has changed. Takes 0.5 us for a file. `most` limits the
        number of files; the next call goes on with the next ones. A read after the new end kills the process with
        SIGBUS, also if the file is cut between this check and the read. Only reading into memory (`mmap=False`) is safe
        from that.
        """
        maps = self._maps
        if most is not None and most < len(maps):
            self._next_check = (self._next_check + most) % len(maps)
            maps = (maps[self._next_check :] + maps[: self._next_check])[:most]
        for mapped in maps:
            try:
                size = mapped.size()
            except OSError as error:  # a network drive may be disconnected
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
            for kind in (*KINDS, "sample")
            if kind in entry.files
        }
        self._documents.append(DocumentTable(data["documents"], self.path, entry.documents, entry.tokens))
        size = self.manifest.vocabulary.size
        dead = intervals(self._documents[-1], entry.dead)
        sample = Sample(data["sample"], entry.tokens) if "sample" in data else None
        segment = Segment(data["tokens"], data["order"], length=entry.tokens, vocab_size=size, dead=dead, sample=sample)
        self.segments.append(segment)
        # A separator at the end keeps every match inside the text.
        if int(segment.slice(entry.tokens - 1, entry.tokens)[0]) != size:
            raise DatastoreCorrupt(self.path, "no separator ends the text of a segment")

    def _read(self, path: Path, size: int, mmap: bool) -> bytes | memory.mmap:
        """Map or read a file after comparing its size with the manifest."""
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
        mapped.madvise(memory.MADV_RANDOM)  # Read-ahead is useless, as a lookup touches some 200 scattered pages.
        self._maps.append(mapped)
        return mapped
