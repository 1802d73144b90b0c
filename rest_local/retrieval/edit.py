"""Adding documents to a datastore and forgetting them: one commit each, all or nothing, old readers undisturbed.

A document is known by its name: adding one of a name that is there replaces it. Segments that hold nothing of what
changes stay as they are, except small ones at the end, which the new segment takes up, so that many small additions do
not leave many segments. What is forgotten is gone from the files when the call returns.
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
from rest_local.retrieval.history import MERGE, SMALL
from rest_local.retrieval.home import holds_files, remove_locked
from rest_local.retrieval.rows import Int32Array

WAIT_S = 2.0

Documents = list[tuple[str, Int32Array]]


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
    """Adds documents, each a name and token ids; makes the datastore where there is none.

    `recipe`: of a new one; `wait_s`: for the lock; `mmap`: as for `Datastore.open`, False reads all of it. Raises
    DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked, DatastoreUnwritable, CorpusEmpty where
    there is no token: what was there before is intact.
    """
    files = files or Files()
    with locked(path, wait_s, make=files):
        try:
            store = Datastore.open(path, vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name, mmap=mmap)
        except DatastoreNotFound:
            return commit(path, documents, vocabulary=vocabulary, recipe=recipe, files=files)
        with store:
            keep, kept = _divided(store, {name for name, _ in documents}, sum(len(t) + 1 for _, t in documents))
            recipe = dict(store.manifest.recipe)
        return commit(path, [*kept, *documents], vocabulary=vocabulary, recipe=recipe, keep=keep, files=files)


def forget(
    path: Path,
    names: set[str],
    *,
    wait_s: float = WAIT_S,
    files: Files | None = None,
    whole: bool = False,
    mmap: bool | None = None,
) -> int:
    """Removes the documents of these names; returns how many there were.

    A datastore is never empty. Where nothing would be left it is removed with `whole`, else OptionError. `mmap`: as for
    `add`. Raises
    DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreLocked, DatastoreUnwritable.
    """
    if not holds_files(path):
        raise DatastoreNotFound(path)  # a lock cannot be taken on what is not there
    with locked(path, wait_s), Datastore.open(path, mmap=mmap) as store:
        held = store.document_names()
        count = sum(name in names for name in held)
        if count == 0:
            return 0
        if count == len(held) and whole:
            remove_locked(path, files)
            return count
        if count == len(held):
            raise OptionError(f"datastore {path}: nothing would be left; `rest-local index remove` removes it whole")
        keep, kept = _divided(store, names, 0)
        manifest = store.manifest
        commit(path, kept, vocabulary=manifest.vocabulary, recipe=manifest.recipe, keep=keep, files=files)
        return count


def _divided(store: Datastore, names: set[str], size: int) -> tuple[tuple[SegmentEntry, ...], Documents]:
    """Segments that stay, and the documents of the others without those of `names`, oldest first.

    `size`: tokens that the new segment gets besides."""
    entries = list(store.manifest.segments)
    touched = _touched(store, names)
    last = len(entries)
    while size and last and entries[last - 1].tokens <= max(MERGE * size, SMALL):
        last -= 1
        touched.add(last)
        size += entries[last].tokens
    store.check([entries[index] for index in sorted(touched)])  # damage must not be written under a new checksum
    documents = [document for index in sorted(touched) for document in store.documents(index)]
    keep = tuple(entry for index, entry in enumerate(entries) if index not in touched)
    return keep, [(name, tokens) for name, tokens in documents if name not in names]


def _touched(store: Datastore, names: set[str]) -> set[int]:
    """Segments that hold a document of these names."""
    held, touched, start = store.document_names(), set(), 0
    for index, entry in enumerate(store.manifest.segments):
        if not names.isdisjoint(held[start : start + entry.documents]):
            touched.add(index)
        start += entry.documents
    return touched
