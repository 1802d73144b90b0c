"""Deletes files from the segments of a commit without writing the segments: only bits in the manifest are set.

A document is deleted when no file has its content any more. Its text stays in the files until a merge or `forget`
writes the segment again; until then every reader masks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

import numpy as np
import numpy.typing as npt

from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import FileState
from rest_local.retrieval.format import SegmentEntry
from rest_local.retrieval.tables import DocumentTable, StateTable, alive, bitmap_of, numbers_in

Entries = list[SegmentEntry | None]
"""The segments of a commit, in order; None for one of which nothing is left."""


def without(store: Datastore, names: Collection[str]) -> Entries:
    """The segments after files, or documents of no file, with these names are deleted. O(states).

    Raises DatastoreCorrupt.
    """
    entries = store.manifest.segments
    return [_without(store, index, names) if names else entry for index, entry in enumerate(entries)]


def _without(store: Datastore, index: int, names: Collection[str]) -> SegmentEntry | None:
    return without_names(store.manifest.segments[index], store.states(index), store.table(index), names)


def without_names(
    entry: SegmentEntry, states: StateTable | None, table: DocumentTable, names: Collection[str]
) -> SegmentEntry | None:
    """A segment after files, or documents of no file, with these names are deleted; None if no document is left."""
    lost = [] if states is None else states.numbers_of(names)
    stateless = _stateless(entry, states)
    named = table.numbers_of(names) if stateless.any() else []
    died = [number for number in named if stateless[number]]
    if not (lost or died):
        return entry
    gone_now = {*numbers_in(entry.gone).tolist(), *lost}
    dead_now = {*numbers_in(entry.dead).tolist(), *died}
    if states is not None:
        held = stateless.copy()
        held[states.documents[alive(bitmap_of(gone_now, len(states)), len(states))]] = True
        dead_now.update(np.flatnonzero(~held).tolist())
    if len(dead_now) == entry.documents:
        return None
    return dataclasses.replace(entry, gone=bitmap_of(gone_now, entry.states), dead=bitmap_of(dead_now, entry.documents))


def _stateless(entry: SegmentEntry, states: StateTable | None) -> npt.NDArray[np.bool_]:
    """Which documents of a segment have no state, not even a deleted one."""
    found = np.ones(entry.documents, np.bool_)
    if states is not None:
        found[states.documents] = False
    return found


def live_states(store: Datastore, names: Collection[str] | None = None) -> dict[str, FileState]:
    """The states that are not deleted, by the name of their file. names: only these. O(states). Raises
    DatastoreCorrupt.
    """
    if names is None:
        return _live(store, lambda table: range(len(table)))
    return _live(store, lambda table: table.numbers_of(names))


def live_states_below(store: Datastore, folders: Collection[str]) -> dict[str, FileState]:
    """As `live_states`, of the files below folders."""
    return _live(store, lambda table: [number for folder in folders for number in table.numbers_below(folder)])


def _live(store: Datastore, choose: Callable[[StateTable], Iterable[int]]) -> dict[str, FileState]:
    found: dict[str, FileState] = {}
    for index, entry in enumerate(store.manifest.segments):
        table = store.states(index)
        if table is not None:
            live = alive(entry.gone, len(table))
            states = (table[number] for number in choose(table) if live[number])
            found.update((state.name, state) for state in states)
    return found


def unstated(store: Datastore, names: Collection[str] | None = None) -> set[str]:
    """The names of documents that are not deleted and have no state. names: only these. O(documents)."""
    found: set[str] = set()
    for index, entry in enumerate(store.manifest.segments):
        table = store.table(index)
        stateless = _stateless(entry, store.states(index)) & alive(entry.dead, entry.documents)
        if stateless.any():
            numbers = np.flatnonzero(stateless) if names is None else table.numbers_of(names)
            found |= {table.name(int(number)) for number in numbers if stateless[number]}
    return found


def dead_tokens(store: Datastore, index: int) -> int:
    """The tokens of a segment's deleted documents, with their separators."""
    starts, numbers = store.table(index).starts, numbers_in(store.manifest.segments[index].dead)
    return int((starts[numbers + 1] - starts[numbers]).sum()) if len(numbers) else 0
