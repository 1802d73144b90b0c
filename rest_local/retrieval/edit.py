"""Adds documents to a datastore and removes them, with one atomic commit each. Open readers are not disturbed.

A document is identified by its name: a new document replaces one of the same name. Segments that do not change stay,
except small ones at the end, which are merged into the new segment, so that many small additions do not leave many
segments. When `forget` returns, no file of the datastore contains the removed text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rest_local.errors import DatastoreNotFound, OptionError
from rest_local.retrieval.build import commit
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import Manifest, SegmentEntry, VocabularyId
from rest_local.retrieval.history import MERGE, SMALL_SEGMENT, WAIT_S
from rest_local.retrieval.home import find, holds_files, remove_index_locked
from rest_local.retrieval.rows import Int32Array


def add(
    path: Path,
    documents: Sequence[tuple[str, Int32Array]],
    *,
    vocabulary: VocabularyId,
    recipe: Mapping[str, Any] | None = None,
    wait_s: float = WAIT_S,
    files: Files | None = None,
    mmap: bool | None = None,
) -> Manifest:
    """Add documents, each a name and token ids, to the index for this vocabulary. Creates a datastore that does not
    exist, but not an index that an existing one lacks, which would hold these documents alone.

    `recipe`: of a new datastore; `wait_s`: for the lock; `mmap`: as for `Datastore.open`, False reads all of it. Raises
    DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked, DatastoreUnwritable, and CorpusEmpty
    without any token. After an error the existing datastore is intact.
    """
    files, directory = files or Files(), find(path, vocabulary.hash)
    with locked(directory, wait_s, make=files):
        try:
            store = Datastore.open(path, vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name, mmap=mmap)
        except DatastoreNotFound:
            return commit(directory, documents, vocabulary=vocabulary, recipe=recipe, files=files)
        with store:
            keep, kept = _divided(store, {name for name, _ in documents}, sum(len(t) + 1 for _, t in documents))
            recipe = dict(store.manifest.recipe)
        return commit(directory, [*kept, *documents], vocabulary=vocabulary, recipe=recipe, keep=keep, files=files)


def forget(
    path: Path,
    names: set[str],
    *,
    wait_s: float = WAIT_S,
    files: Files | None = None,
    whole: bool = False,
    mmap: bool | None = None,
    vocabulary_hash: str | None = None,
) -> int:
    """Remove the documents with these names from the index for a vocabulary, None: the first one. Returns their number.

    An index is never empty: if no document would be left, it is deleted with `whole`, and otherwise OptionError is
    raised. `mmap`: as for `add`. Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreLocked,
    DatastoreUnwritable.
    """
    directory = find(path, vocabulary_hash)
    if not holds_files(directory):
        raise DatastoreNotFound(path)  # there is no directory to lock
    with locked(directory, wait_s), Datastore.open(directory, vocabulary_hash=vocabulary_hash, mmap=mmap) as store:
        held = store.document_names()
        count = sum(name in names for name in held)
        if count == 0:
            return 0
        if count == len(held) and whole:
            remove_index_locked(path, directory, files)
            return count
        if count == len(held):
            raise OptionError(
                f"datastore {path}: no document would be left; `rest-local index remove` deletes the datastore"
            )
        keep, kept = _divided(store, names, 0)
        manifest = store.manifest
        commit(directory, kept, vocabulary=manifest.vocabulary, recipe=manifest.recipe, keep=keep, files=files)
        return count


def _divided(
    store: Datastore, names: set[str], size: int
) -> tuple[tuple[SegmentEntry, ...], list[tuple[str, Int32Array]]]:
    """The segments that stay, and the documents of the other segments except those in `names`, oldest first.

    `size`: number of tokens that the new segment gets in addition.
    """
    entries = list(store.manifest.segments)
    touched = _touched(store, names)
    last = len(entries)
    while size and last and entries[last - 1].tokens <= max(MERGE * size, SMALL_SEGMENT):
        last -= 1
        touched.add(last)
        size += entries[last].tokens
    store.check([entries[index] for index in sorted(touched)])  # damaged tokens must not get a new, valid checksum
    documents = [document for index in sorted(touched) for document in store.documents(index)]
    keep = tuple(entry for index, entry in enumerate(entries) if index not in touched)
    return keep, [(name, tokens) for name, tokens in documents if name not in names]


def _touched(store: Datastore, names: set[str]) -> set[int]:
    """The numbers of the segments that hold a document with one of these names."""
    held, touched, start = store.document_names(), set(), 0
    for index, entry in enumerate(store.manifest.segments):
        if not names.isdisjoint(held[start : start + entry.documents]):
            touched.add(index)
        start += entry.documents
    return touched
