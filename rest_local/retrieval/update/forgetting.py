"""Remove documents from the files of a datastore, not only from what readers see.

Deleted text stays in the files until its segment is written again. So `forget` writes every segment again that holds a
document or a file state of these names, or any deleted text: an earlier version of a file, or a copy under a deleted
name, goes too. Leftovers of killed processes go first, which also makes room on a full disk. Unfinished writes of other
processes are deleted; an update then starts again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rest_local.errors import DatastoreNotFound, OptionError
from rest_local.retrieval.building.build import commit
from rest_local.retrieval.building.indexing import recipe_of
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import WAIT_S, Files, locked, mapping_os_errors
from rest_local.retrieval.format import SegmentEntry
from rest_local.retrieval.home import find, holds_files
from rest_local.retrieval.sources.recipes import from_recipe
from rest_local.retrieval.sources.source import Source
from rest_local.retrieval.sources.walk import Walk
from rest_local.retrieval.staging import clear, delete_unnamed, remove_all, remove_index_locked
from rest_local.retrieval.update.merging import live_states, segments_without, unstated

Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class Forgotten:
    """The names that were removed, of files and of documents without a file, sorted."""

    names: tuple[str, ...]
    copies: tuple[str, ...] = ()  # files that stay and have the content of one of them
    removed: bool = False  # the index was deleted, because nothing was left of it


def forget(path: Path, names: Collection[str], **options: Any) -> int:
    """Remove these names as `forget_where` does, and return the number of those that were there."""
    return len(forget_where(path, set(names).__contains__, **options).names)


def forget_where(
    path: Path,
    is_meant: Callable[[str], bool],
    *,
    recipe: Callable[[Recipe, Collection[str]], Recipe] = lambda recipe, names: recipe,
    files: Files | None = None,
    whole: bool = False,
    mmap: bool | None = None,
    vocabulary_hash: str | None = None,
) -> Forgotten:
    """Remove the files, and documents without a file, whose name is meant, from the index for a vocabulary.

    When it returns, no file of the index holds their text or an earlier version of it, unless another file has that
    content. Nor do leftovers of killed processes (`staging.clear`). The writers' lock is held while it writes: O(tokens
    of the segments that hold a name, or deleted text).

    `recipe` makes the new recipe from the present one and the names. An index is never empty: if no document would be
    left, it is deleted with `whole`, and otherwise OptionError is raised. Raises DatastoreNotFound, DatastoreCorrupt,
    DatastoreVersion, DatastoreLocked, DatastoreUnwritable.
    """
    files, directory = files or Files(), find(path, vocabulary_hash)
    if not holds_files(directory):
        raise DatastoreNotFound(path)  # no directory to lock
    clear(path, files, everything=True)
    with locked(directory, WAIT_S), Datastore.open(directory, vocabulary_hash=vocabulary_hash, mmap=mmap) as store:
        meant = {name for name in names_in(store) if is_meant(name)}
        if not meant:
            return Forgotten(())
        states = live_states(store)
        gone = meant & (states.keys() | unstated(store))
        entries = segments_without(store, meant)
        digests = {states[name].sha256 for name in gone & states.keys()}
        copies = sorted(name for name, state in states.items() if name not in meant and state.sha256 in digests)
        if not any(entries):
            if not whole:
                what = "no document would be left; `rest-local index remove` deletes the datastore"
                raise OptionError(f"datastore {path}: {what}")
            remove_index_locked(path, directory, files)
            return Forgotten(tuple(sorted(gone)), removed=True)
        _rewrite(store, entries, meant, recipe(store.manifest.recipe, meant), files)
    return Forgotten(tuple(sorted(gone)), tuple(copies))


def names_in(store: Datastore) -> set[str]:
    """Return all names of files and documents in the files of an index, with deleted ones. O(documents + states)."""
    return {name for index in range(len(store.segments)) for name in _names(store, index)}


def _names(store: Datastore, index: int) -> Iterator[str]:
    """Yield all names in the files of a segment, with deleted ones."""
    yield from store.names(index)
    states = store.states(index)
    yield from (states.name(number) for number in range(len(states))) if states is not None else ()


def _rewrite(
    store: Datastore, entries: list[SegmentEntry | None], names: set[str], recipe: Recipe, files: Files
) -> None:
    """Commit, under the lock, without the segments that hold a name or deleted text, and with their other text."""
    again = [
        index
        for index, entry in enumerate(entries)
        if entry is None or entry.dead or entry.gone or not names.isdisjoint(_names(store, index))
    ]
    # Damaged text must not get a new, valid checksum.
    store.check([store.manifest.segments[index] for index in again if entries[index]])
    commit(
        store.directory,
        chain.from_iterable(store.each_document(index, entries[index]) for index in again if entries[index]),
        vocabulary=store.manifest.vocabulary,
        recipe=dict(recipe),
        keep=tuple(entry for index, entry in enumerate(entries) if entry and index not in again),
        files=files,
    )
    with mapping_os_errors(store.directory):
        delete_unnamed(store.directory, files)
        remove_all(store.directory, files)


_SPECIAL = re.compile(r"([\\*?\[\]!# ])")


def excluding(recipe: Mapping[str, Any], names: Collection[str], globs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recipe without files of these names, and without those that match the globs (as in .gitignore, below
    each path). Raises OptionError for a source that this version does not know.
    """
    sources = [new for source in from_recipe(recipe) for new in _excluding(source, names, globs)]
    if sources == from_recipe(recipe):
        return dict(recipe)
    return {**recipe, **recipe_of(sources)}


def excludable(recipe: Mapping[str, Any], name: str) -> bool:
    """Return True if a recipe can leave out a file of this name. Rows of a file cannot be left out one by one."""
    return excluding(recipe, [name]) != dict(recipe)


def relative_names(recipe: Mapping[str, Any], name: str) -> list[str]:
    """Return a name below each of the recorded paths that contain it, to compare with globs."""
    return [relative for source in from_recipe(recipe) for _, relative in _places(source, name)]


def _excluding(source: Source, names: Collection[str], globs: Sequence[str]) -> Iterator[Source]:
    if not isinstance(source, Walk):
        yield source
        return
    patterns: dict[str, set[str]] = {}
    for name in sorted(names):
        for root, relative in _places(source, name):
            patterns.setdefault(root, set()).add("/" + _SPECIAL.sub(r"\\\1", relative))
    source = replace(source, exclude=_more(source.exclude, globs))
    if len(source.paths) > 1 and patterns:
        # A pattern counts below every path of a walk, and the same relative name may exist below another one.
        others = tuple(path for path in source.paths if path not in patterns)
        if others:
            yield replace(source, paths=others)
        for root, some in patterns.items():
            yield replace(source, paths=(root,), exclude=_more(source.exclude, sorted(some)))
        return
    every = sorted({pattern for some in patterns.values() for pattern in some})
    yield replace(source, exclude=_more(source.exclude, every))


def _more(exclude: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*exclude, *patterns]))


def _places(source: Source, name: str) -> Iterator[tuple[str, str]]:
    """Yield (recorded path, name below it) of a file in a source: several if the paths overlap."""
    if isinstance(source, Walk):
        for path in source.paths:
            root = os.path.realpath(path)
            if name == root:
                yield path, os.path.basename(root)
            elif name.startswith(os.path.join(root, "")):
                yield path, name[len(os.path.join(root, "")) :].replace(os.sep, "/")
