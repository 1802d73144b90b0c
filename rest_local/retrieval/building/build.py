"""Write segments and commit them, for every datastore and history.

1. Take the lock.
2. Write the files of the segments under new names, fsync each, fsync the directory. A long write does this in a
   staging directory without the lock (`retrieval.staging`), and the commit renames its files into the index.
3. Write the manifest under a new name, fsync it, rename it over the old one, fsync the directory.
4. Then delete the files that the new manifest does not name. The next build deletes the orphans of a killed one.

So a build is atomic, also if it is killed or the disk fails. Knows nothing about models: documents are names, token ids
and the states of their files.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import (
    CorpusEmpty,
    CorpusTooLarge,
    DatastoreError,
    DatastoreExists,
    DatastoreUnwritable,
    OptionError,
)
from rest_local.retrieval.documents import Document, FileState, encoded, pack_documents, pack_states
from rest_local.retrieval.files import LOCK, Files, mapping_os_errors
from rest_local.retrieval.format import (
    MANIFEST,
    MAX_SEGMENT,
    FileEntry,
    Manifest,
    SegmentEntry,
    VocabularyId,
    check_recipe,
    file_name,
    owns,
)
from rest_local.retrieval.home import datastore_of, folders, manifests, stagings
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, PADDING, big_endian, order_of, width_of
from rest_local.retrieval.sparse_index import SAMPLED, make_sample
from rest_local.retrieval.staging import Staged, remove_orphans, writing

# Default maximum size of a segment. Sorting takes 4 bytes of memory for each byte: about 0.9 GB at 2 bytes a token,
# 1.3 GB at 3.
SEGMENT_TOKENS = 1 << 26

# A process that builds a segment of any size takes so many bytes for Python, the vocabulary and some texts.
FIXED_MEMORY = 400 << 20
# Bytes for each token while a segment is sorted, by the width of a token: its bytes twice, 4 for each of them, 4 for
# the position, and a little.
SORTED_MEMORY = {2: 17, 3: 23}

SMALL_SEGMENT = 1 << 16  # a segment up to this size is always merged into the next commit: sorting it takes 10 ms

_WRITE = 1 << 24

# Called with ("tokenized" | "sorted" | "written", tokens since the last call), and by a walk with ("read", bytes).
Progress = Callable[[str, int], None]

Documents = Iterable[Document | tuple[str, npt.NDArray[np.integer]]]


def no_progress(what: str, amount: int) -> None:
    """Ignore progress."""


def segment_tokens_in(memory: int, vocab_size: int) -> int:
    """Return the most tokens of a segment that is made in `memory` bytes. Raises OptionError if none fits."""
    width = width_of(vocab_size)
    tokens = (memory - FIXED_MEMORY) // SORTED_MEMORY[width]
    if tokens < 1 << 20:
        least = FIXED_MEMORY + (SORTED_MEMORY[width] << 20)
        raise OptionError(f"memory of {memory >> 20} MB: at least {(least >> 20) + 1} MB are needed")
    return min(tokens, (MAX_SEGMENT - 1) // width - PADDING)  # the bytes are sorted with 32-bit positions


class GrowingSegment:
    """The documents of a segment that is being made, in their stored form: `width_of(vocab_size)` bytes a token.
    `tokens` counts those so far, with one separator for each document.
    """

    def __init__(self, vocab_size: int) -> None:
        self.tokens = 0
        self._width = width_of(vocab_size)
        self._separator = vocab_size.to_bytes(self._width, "big")
        self._texts: list[bytes] = []  # each is the separator, then a document's tokens, last first
        self._names: list[bytes] = []
        self._starts: list[int] = []
        self._states: list[tuple[int, FileState]] = []
        self._copies: dict[bytes, int] = {}  # sha256 of a file -> number of its document

    def take_copy(self, document: Document) -> bool:
        """Return True if another document here has this content. Then its file becomes another state of that one. A
        copy may come without tokens, so that they need not be computed again.
        """
        number = self._copies.get(document.states[0].sha256) if document.states else None
        if number is None or (len(document.tokens) and self._stored(document) != self._texts[number]):
            return False
        self._states += ((number, state) for state in document.states)
        return True

    def add(self, document: Document) -> None:
        """Add a document with at least one token, of ids below `vocab_size`."""
        number = len(self._names)
        if document.states:
            self._copies[document.states[0].sha256] = number
        self._names.append(encoded(document.name))
        self._starts.append(self.tokens)
        self._texts.append(self._stored(document))
        self._states += ((number, state) for state in document.states)
        self.tokens += len(document.tokens) + 1

    def content(self) -> dict[str, bytes | memoryview]:
        """Make the content of the segment's files by kind, which uses up the documents. O(tokens log tokens). Sorting
        takes 7 bytes of memory for each byte of a token, and 4 for each token.
        """
        pieces = [self._separator * MAX_DEPTH, *reversed(self._texts), self._separator * MAX_MATCH]
        self._texts.clear()
        tokens = b"".join(pieces)
        pieces.clear()
        order = order_of(tokens, self._width)
        files: dict[str, bytes | memoryview] = {
            "tokens": tokens,
            "order": order.astype("<u4", copy=False).data.cast("B"),
            "documents": pack_documents(self._names, [*self._starts, self.tokens]),
        }
        if self._states:
            files["states"] = pack_states(sorted(self._states, key=lambda state: state[0]))
        if len(order) >= SAMPLED:
            files["sample"] = make_sample(tokens, order, self._width)
        return files

    def entry(self, name: str, files: Mapping[str, FileEntry]) -> SegmentEntry:
        return SegmentEntry(name, self.tokens, len(self._names), files, len(self._states))

    def _stored(self, document: Document) -> bytes:
        return self._separator + big_endian(document.tokens[::-1], self._width)


def grown(documents: Documents, vocab_size: int, most: int) -> Iterator[GrowingSegment]:
    """Yield documents as segments of at most `most` tokens, unless one document has more, in their order. Files of the
    same content in one segment become one document; documents without tokens are left out. Raises CorpusTooLarge, and
    ValueError for an id outside the vocabulary.
    """
    growing = GrowingSegment(vocab_size)
    for item in documents:
        document = item if isinstance(item, Document) else Document(item[0], np.asarray(item[1], np.int32))
        tokens = document.tokens
        if growing.take_copy(document) or not len(tokens):
            continue
        if len(tokens) + 1 >= MAX_SEGMENT:
            raise CorpusTooLarge(len(tokens))
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= vocab_size:
            raise ValueError(f"document {document.name}: token ids must be from 0 to {vocab_size - 1}")
        if growing.tokens and growing.tokens + len(tokens) + 1 > most:
            yield growing
            growing = GrowingSegment(vocab_size)
        growing.add(document)
    if growing.tokens:
        yield growing


def write_segments(
    directory: Path,
    documents: Documents,
    *,
    vocabulary: VocabularyId,
    progress: Progress = no_progress,
    segment_tokens: int = SEGMENT_TOKENS,
    files: Files,
) -> tuple[SegmentEntry, ...]:
    """Write the segments of `documents`, if any, into a directory, durably. Raises OSError, and what `grown` raises."""
    written = []
    for growing in grown(documents, vocabulary.size, segment_tokens):
        content, name = growing.content(), secrets.token_hex(8)
        progress("sorted", growing.tokens)
        entries = {kind: write_file(files, directory / file_name(name, kind), data) for kind, data in content.items()}
        progress("written", growing.tokens)
        written.append(growing.entry(name, entries))
        del content, growing
    files.sync_directory(directory)
    return tuple(written)


def write_file(files: Files, path: Path, content: bytes | memoryview) -> FileEntry:
    """Write a new file and sync it. An OSError names the path."""
    view, digest = memoryview(content), hashlib.sha256()
    descriptor = files.create(path)
    try:
        for start in range(0, len(view), _WRITE):
            part = view[start : start + _WRITE]
            digest.update(part)
            files.write(descriptor, part)
        files.sync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)
    return FileEntry(len(view), digest.hexdigest())


def build(
    path: str | os.PathLike[str],
    documents: Documents,
    *,
    vocabulary: VocabularyId,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    replace: bool = True,
    files: Files | None = None,
) -> Manifest:
    """Build the index of a datastore for a vocabulary, and commit it.

    It replaces an existing index for this vocabulary; those for others stay. Documents without tokens are left out.
    After an error the existing datastore is intact. O(n log n), 5 M tokens/s or more on one core.

    Args:
        path: directory of the datastore
        documents: documents, or (name, token ids)
        vocabulary: what the ids belong to
        recipe: what the manifest says about the origin of the text
        progress: called with the tokens of each stage
        segment_tokens: maximum size of a segment, which bounds memory. A larger document gets a segment of its own.
        replace: False refuses to replace an index
        files: file operations; tests replace them

    Raises:
        CorpusEmpty: no document has tokens
        CorpusTooLarge: no segment can hold a document
        ValueError: an id is outside the vocabulary, or a recipe field has a wrong type
        DatastoreExists: there is an index, and `replace` is False
        DatastoreLocked: another process writes
        DatastoreUnwritable: writing fails
    """
    if not 1 <= segment_tokens < MAX_SEGMENT:
        raise ValueError(f"segment_tokens {segment_tokens} must be from 1 to {MAX_SEGMENT - 1}")
    path, files = Path(path), files or Files()
    with writing(path, vocabulary.hash, files) as directory:
        if not replace and (directory / MANIFEST).exists():
            raise DatastoreExists(path, vocabulary.name)
        return commit(
            directory,
            documents,
            vocabulary=vocabulary,
            recipe=recipe,
            progress=progress or no_progress,
            segment_tokens=segment_tokens,
            files=files,
        )


def commit(
    directory: Path,
    documents: Documents = (),
    *,
    vocabulary: VocabularyId,
    recipe: Mapping[str, Any] | None = None,
    keep: tuple[SegmentEntry, ...] = (),
    staged: Staged | None = None,
    progress: Progress = no_progress,
    segment_tokens: int = SEGMENT_TOKENS,
    files: Files,
) -> Manifest:
    """Do steps 2 to 4, for a caller that holds the lock.

    The new commit has the segments `keep` of the present commit, then those that are `staged`, then the segments of
    `documents`. Other arguments and errors are those of `build`, except DatastoreLocked.
    """
    recipe = dict(recipe or {})
    check_recipe(recipe)
    with mapping_os_errors(directory):
        check_ours(directory)
        before = set(os.listdir(directory))
        old, new = (directory / f"{MANIFEST}.new-{secrets.token_hex(8)}" for _ in range(2))
        renamed = False
        try:
            for name in staged.names if staged else ():  # The files are synced, and the directory will be.
                files.rename(staged.place / name, directory / name)  # type: ignore[union-attr]
            written = write_segments(
                directory,
                documents,
                vocabulary=vocabulary,
                progress=progress,
                segment_tokens=segment_tokens,
                files=files,
            )
            segments = (*keep, *(staged.segments if staged else ()), *written)
            if not segments:
                raise CorpusEmpty("given", "no tokens")
            created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            readable = (one for one in manifests(datastore_of(directory)).values() if isinstance(one, Manifest))
            revision = 1 + max((manifest.revision for manifest in readable), default=0)
            manifest = Manifest(vocabulary, segments, recipe, created, revision)
            write_file(files, new, manifest.to_bytes())
            if MANIFEST in before:
                # A copy, because exFAT and many network and FUSE file systems have no hard links. It is synced, because
                # it becomes the manifest again if a later step fails.
                write_file(files, old, (directory / MANIFEST).read_bytes())
            renamed = True
            files.rename(new, directory / MANIFEST)
            files.sync_directory(directory)
        except BaseException:
            if renamed and not new.exists():
                # It is not known whether the rename is durable. So restore the old manifest, but keep the files of both
                # commits, because after a power cut either manifest may be on the disk.
                with contextlib.suppress(OSError):
                    if old.exists():
                        files.rename(old, directory / MANIFEST)
                    else:
                        files.unlink(directory / MANIFEST)
            else:
                _drop(directory, set(os.listdir(directory)) - before, files)
            raise
        _drop(directory, set(os.listdir(directory)) - manifest.files.keys(), files)
        with contextlib.suppress(DatastoreError, OSError):  # the next commit tries again
            remove_orphans(directory, files)
        return manifest


def _drop(directory: Path, names: set[str], files: Files) -> None:
    """Delete files that no manifest names. The next build deletes those that cannot be deleted now."""
    for name in sorted(filter(owns, names)):
        with contextlib.suppress(OSError):
            files.unlink(directory / name)


def check_ours(directory: Path) -> None:
    """Refuse a directory with other content, before anything is written to it."""
    inside = (*folders(directory), *stagings(directory))
    names = set(os.listdir(directory)) - {LOCK, *(part.name for part in inside)}
    if MANIFEST not in names and not all(owns(name) for name in names):
        with contextlib.suppress(OSError):
            (directory / LOCK).unlink()
        raise DatastoreUnwritable(directory, "the directory is not empty and not a datastore; give another path")
