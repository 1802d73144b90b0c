"""Builds a datastore: sort, write, commit. The build is atomic, also if it is killed or the disk fails.

1. Take the lock.
2. Write the files of the segments under new names, fsync each, fsync the directory.
3. Write the manifest under a new name, fsync it, rename it over the old one, fsync the directory.
4. Then delete the files that the new manifest does not name. The next build deletes the orphans of a killed one.

Knows nothing about models: documents are names and token ids, and the states of the files that they were read from.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import CorpusEmpty, CorpusTooLarge, DatastoreError, DatastoreExists, DatastoreUnwritable
from rest_local.retrieval.building.staged import Staged, remove_orphans, stagings
from rest_local.retrieval.building.writing import GrowingSegment, write_file
from rest_local.retrieval.building.writing import Progress as Progress
from rest_local.retrieval.documents import Document
from rest_local.retrieval.files import LOCK, Files, unwritable
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
from rest_local.retrieval.home import datastore_of, folders, manifests, writing

SEGMENT_TOKENS = 1 << 26
"""Default maximum size of a segment. Sorting takes 4 bytes of memory for each byte: about 0.9 GB at 2 bytes a token,
1.3 GB at 3."""

Documents = Iterable[Document | tuple[str, npt.NDArray[np.integer]]]


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
    """Build the index of the datastore at `path` for a vocabulary from documents, or (name, token ids), and commit it.

    It replaces an existing index for this vocabulary, unless `replace` is False; those for others stay. segment_tokens:
    maximum size of a segment, which bounds memory. A larger document gets a segment of its own. files: the file
    operations; tests replace them.

    Documents without tokens are left out. Raises:

    - CorpusEmpty if no document has tokens, CorpusTooLarge for a document that no segment can hold
    - ValueError for an id outside the vocabulary or a recipe field of a wrong type
    - DatastoreLocked, DatastoreUnwritable if writing fails, and DatastoreExists

    After an error the existing datastore is intact. O(n log n), 5 M tokens/s or more on one core.
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
            progress=progress,
            segment_tokens=segment_tokens,
            files=files,
        )


def commit(
    directory: Path,
    documents: Documents,
    *,
    vocabulary: VocabularyId,
    recipe: Mapping[str, Any] | None = None,
    keep: tuple[SegmentEntry, ...] = (),
    staged: Staged | None = None,
    progress: Progress | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    files: Files | None = None,
) -> Manifest:
    """Steps 2 to 4, for a caller that holds the lock. The new commit has the segments `keep` of the present commit,
    then those that are `staged`, then the segments of `documents`.

    Other arguments and errors as for `build`, except DatastoreLocked.
    """
    check_recipe(recipe or {})
    with unwritable(directory):
        check_ours(directory)
        builder = _Builder(directory, files or Files(), vocabulary, progress or (lambda what, tokens: None))
        return builder.commit(_groups(documents, vocabulary.size, segment_tokens), recipe or {}, keep, staged)


def write_segments(
    directory: Path,
    documents: Documents,
    *,
    vocabulary: VocabularyId,
    progress: Progress | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    files: Files | None = None,
) -> Staged:
    """Write the segments of `documents` into a staging directory, durably. Arguments and errors as for `commit`; no
    segment at all is no error.
    """
    with unwritable(directory):
        builder = _Builder(directory, files or Files(), vocabulary, progress or (lambda what, tokens: None))
        return builder.stage(_groups(documents, vocabulary.size, segment_tokens))


class _Builder:
    """One build. The caller holds the lock."""

    def __init__(self, directory: Path, files: Files, vocabulary: VocabularyId, progress: Progress) -> None:
        self._directory, self._files, self._vocabulary, self._progress = directory, files, vocabulary, progress

    def commit(
        self,
        groups: Iterator[list[Document]],
        recipe: Mapping[str, Any],
        kept: tuple[SegmentEntry, ...],
        staged: Staged | None,
    ) -> Manifest:
        """Steps 2 to 4."""
        before = set(os.listdir(self._directory))
        old = self._directory / f"{MANIFEST}.new-{secrets.token_hex(8)}"
        renamed = False
        try:
            published = self._publish(staged) if staged else ()
            segments = (*kept, *published, *(self._segment(group) for group in groups))
            if not segments:
                raise CorpusEmpty(", ".join(map(str, recipe.get("paths", ()))) or "given", "no tokens")
            self._files.sync_directory(self._directory)
            created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            manifest = Manifest(self._vocabulary, segments, recipe, created, _next_revision(self._directory))
            new = self._directory / f"{MANIFEST}.new-{secrets.token_hex(8)}"
            self._write(new, manifest.to_bytes())
            if MANIFEST in before:
                # A copy, because exFAT and many network and FUSE file systems have no hard links. It is synced, because
                # it becomes the manifest again if a later step fails.
                self._write(old, (self._directory / MANIFEST).read_bytes())
            renamed = True
            self._files.rename(new, self._directory / MANIFEST)
            self._files.sync_directory(self._directory)
        except BaseException:
            if renamed:
                # It is not known whether the rename is durable. So restore the old manifest, but keep the files of both
                # commits, because after a power cut either manifest may be on the disk.
                self._restore(old)
            else:
                self._drop(set(os.listdir(self._directory)) - before)
            raise
        keep = {file_name(segment.name, kind) for segment in segments for kind in segment.files}
        self._drop({name for name in os.listdir(self._directory) if owns(name) and name not in keep})
        with contextlib.suppress(DatastoreError, OSError):  # the next commit deletes them
            remove_orphans(self._directory, self._files)
        return manifest

    def stage(self, groups: Iterator[list[Document]]) -> Staged:
        """The segments of `groups`, written and synced."""
        segments = tuple(self._segment(group) for group in groups)
        self._files.sync_directory(self._directory)
        return Staged(self._directory, segments)

    def _publish(self, staged: Staged) -> tuple[SegmentEntry, ...]:
        """Rename the files of staged segments into the directory. They are synced already, and the caller syncs it."""
        for segment in staged.segments:
            for kind in segment.files:
                name = file_name(segment.name, kind)
                self._files.rename(staged.place / name, self._directory / name)
        return staged.segments

    def _segment(self, group: list[Document]) -> SegmentEntry:
        growing = GrowingSegment(self._vocabulary.size)
        for document in group:
            growing.add(*document)
        content = growing.content()
        self._progress("sorted", content.tokens)
        name = secrets.token_hex(8)
        files = content.files.items()
        entries = {kind: self._write(self._directory / file_name(name, kind), data) for kind, data in files}
        self._progress("written", content.tokens)
        return SegmentEntry(name, content.tokens, content.documents, entries, content.states)

    def _write(self, path: Path, content: bytes | memoryview) -> FileEntry:
        return write_file(self._files, path, content)

    def _restore(self, old: Path) -> None:
        with contextlib.suppress(OSError):
            if old.exists():
                self._files.rename(old, self._directory / MANIFEST)
            else:
                self._files.unlink(self._directory / MANIFEST)

    def _drop(self, names: set[str]) -> None:
        """Delete files that no manifest names. The next build deletes those that cannot be deleted now."""
        for name in sorted(names):
            if owns(name):
                with contextlib.suppress(OSError):
                    self._files.unlink(self._directory / name)


def _next_revision(directory: Path) -> int:
    found = manifests(datastore_of(directory)).values()
    return 1 + max((manifest.revision for manifest in found if isinstance(manifest, Manifest)), default=0)


def check_ours(directory: Path) -> None:
    """Refuse a directory with other content, before anything is written to it."""
    inside = (*folders(directory), *stagings(directory))
    names = set(os.listdir(directory)) - {LOCK, *(part.name for part in inside)}
    if MANIFEST not in names and not all(owns(name) for name in names):
        with contextlib.suppress(OSError):
            (directory / LOCK).unlink()
        raise DatastoreUnwritable(directory, "the directory is not empty and not a datastore; give another path")


def _groups(documents: Documents, vocab_size: int, cap: int) -> Iterator[list[Document]]:
    """Group documents into segments of at most `cap` tokens, including separators. Keeps their order. Files of the same
    content in one segment become one document.
    """
    group: list[Document] = []
    copies: dict[bytes, int] = {}  # sha256 of a file in the group: number of its document
    total = 0
    for given in documents:
        document = given if isinstance(given, Document) else Document(given[0], np.asarray(given[1], np.int32))
        tokens = document.tokens
        if len(tokens) == 0:
            continue
        if len(tokens) + 1 >= MAX_SEGMENT:
            raise CorpusTooLarge(len(tokens))
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= vocab_size:
            raise ValueError(f"document {document.name}: token ids must be from 0 to {vocab_size - 1}")
        first = copies.get(document.states[0].sha256) if document.states else None
        if first is not None and np.array_equal(group[first].tokens, tokens):
            group[first] = group[first]._replace(states=group[first].states + document.states)
            continue
        if group and total + len(tokens) + 1 > cap:
            yield group
            group, copies, total = [], {}, 0
        if document.states:
            copies[document.states[0].sha256] = len(group)
        group.append(document)
        total += len(tokens) + 1
    if group:
        yield group
