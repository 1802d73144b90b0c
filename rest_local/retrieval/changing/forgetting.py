"""Removes documents from the files of a datastore, not only from what readers see.

Deleted text stays in the files until its segment is written again. So `forget` writes every segment again that holds a
document or a file state of these names, or any deleted text: an earlier version of a file, or a copy under a name that
was deleted, goes too. What killed processes left goes first, which also makes room on a full disk. What other processes
are writing is deleted; an update then starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rest_local.errors import DatastoreNotFound, OptionError
from rest_local.retrieval.building.build import commit
from rest_local.retrieval.building.staged import remove_all
from rest_local.retrieval.changing.masking import live_states, unstated, without
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document
from rest_local.retrieval.files import Files, locked, unwritable
from rest_local.retrieval.format import SegmentEntry
from rest_local.retrieval.history import WAIT_S
from rest_local.retrieval.home import clear, delete_unnamed, find, holds_files, remove_index_locked

Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class Forgotten:
    """What was removed. names: of files and of documents of no file, sorted; copies: names of files that stay and have
    the content of one of them; removed: the index was deleted, because nothing was left of it.
    """

    names: tuple[str, ...]
    copies: tuple[str, ...] = ()
    removed: bool = False


def forget(
    path: Path,
    names: Collection[str],
    *,
    wait_s: float = WAIT_S,
    files: Files | None = None,
    whole: bool = False,
    mmap: bool | None = None,
    vocabulary_hash: str | None = None,
) -> int:
    """Remove the files, and documents of no file, with these names from the index for a vocabulary, None: the first
    one. Returns the number of those that were there. As `forget_where`.
    """
    forgotten = forget_where(
        path,
        set(names).__contains__,
        wait_s=wait_s,
        files=files,
        whole=whole,
        mmap=mmap,
        vocabulary_hash=vocabulary_hash,
    )
    return len(forgotten.names)


def forget_where(
    path: Path,
    is_meant: Callable[[str], bool],
    *,
    recipe: Callable[[Recipe, Collection[str]], Recipe] = lambda recipe, names: recipe,
    wait_s: float = WAIT_S,
    files: Files | None = None,
    whole: bool = False,
    mmap: bool | None = None,
    vocabulary_hash: str | None = None,
) -> Forgotten:
    """Remove the files, and documents of no file, whose name is meant, from the index for a vocabulary. When it
    returns, no file of the index holds their text or an earlier version of it, unless another file has that content,
    nor does anything that killed processes left of the datastore or next to it (`home.clear`).

    recipe: the new recipe, from the present one and the names. An index is never empty: if no document would be left,
    it is deleted with `whole`, and otherwise OptionError is raised. mmap: as for `Datastore.open`. Holds the writers'
    lock while it writes: O(tokens of the segments that hold a name, or deleted text). Raises DatastoreNotFound,
    DatastoreCorrupt, DatastoreVersion, DatastoreLocked, DatastoreUnwritable.
    """
    files, directory = files or Files(), find(path, vocabulary_hash)
    if not holds_files(directory):
        raise DatastoreNotFound(path)  # there is no directory to lock
    clear(path, files, everything=True)
    with locked(directory, wait_s), Datastore.open(directory, vocabulary_hash=vocabulary_hash, mmap=mmap) as store:
        held = {name for name in names_in(store) if is_meant(name)}
        if not held:
            return Forgotten(())
        states = live_states(store)
        gone = held & (states.keys() | unstated(store))
        entries = without(store, held)
        digests = {states[name].sha256 for name in gone & states.keys()}
        copies = sorted(name for name, state in states.items() if name not in held and state.sha256 in digests)
        if not any(entries):
            if not whole:
                what = "no document would be left; `rest-local index remove` deletes the datastore"
                raise OptionError(f"datastore {path}: {what}")
            store.close()  # Windows renames no directory whose files are mapped
            remove_index_locked(path, directory, files)
            return Forgotten(tuple(sorted(gone)), removed=True)
        _rewrite(store, entries, held, recipe(store.manifest.recipe, held), files)
    return Forgotten(tuple(sorted(gone)), tuple(copies))


def names_in(store: Datastore) -> set[str]:
    """All names of files and documents in the files of an index, deleted ones too. O(documents + states)."""
    return {name for index in range(len(store.segments)) for name in _names(store, index)}


def _names(store: Datastore, index: int) -> Iterator[str]:
    """All names in the files of a segment, deleted ones too."""
    yield from store.names(index)
    states = store.states(index)
    yield from (states.name(number) for number in range(len(states))) if states is not None else ()


def _rewrite(
    store: Datastore, entries: list[SegmentEntry | None], names: set[str], recipe: Recipe, files: Files
) -> None:
    """Commit, under the lock, without the segments that hold a name or deleted text, and with what is left of them."""
    again = [
        index
        for index, entry in enumerate(entries)
        if entry is None or entry.dead or entry.gone or not names.isdisjoint(_names(store, index))
    ]
    old = store.manifest.segments
    store.check([old[index] for index in again if entries[index]])  # damage must not get a new, valid checksum
    documents = (document for index in again for document in _left(store, index, entries[index]))
    keep = tuple(entry for index, entry in enumerate(entries) if entry and index not in again)
    commit(
        store.directory,
        documents,
        vocabulary=store.manifest.vocabulary,
        recipe=dict(recipe),
        keep=keep,
        files=files,
    )
    with unwritable(store.directory):
        delete_unnamed(store.directory, files)
        remove_all(store.directory, files)


def _left(store: Datastore, index: int, entry: SegmentEntry | None) -> Iterator[Document]:
    return store.each_document(index, entry) if entry else iter(())
