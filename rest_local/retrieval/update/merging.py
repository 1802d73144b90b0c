"""Merge the segments of a datastore, so that a lookup searches few of them and deleted text goes.

Segments are in tiers: up to SMALL_SEGMENT tokens, and FANOUT times as many in each further tier. FANOUT segments of one
tier become one of the next. So there are fewer than FANOUT in each, and a token is written once for each tier: 7 times
in a datastore of 100 M tokens. A segment with a share of deleted text above DEAD is written again alone; so less than
1 / DEAD - 1 = 3 tokens are written for each that goes.

A merge reads a snapshot and writes in a staging directory, so no reader or writer waits for it. It takes the writers'
lock only for its commit, which also deletes what other commits deleted meanwhile. If an input is gone by then, the
merge is dropped. A second merge of the same index does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt, DatastoreLocked
from rest_local.retrieval.building.build import (
    SEGMENT_TOKENS,
    SMALL_SEGMENT,
    commit,
    write_segments,
)
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import (
    DocumentTable,
    FileState,
    StateTable,
    alive,
    bitmap_of,
    documents_of,
    numbers_in,
    states_of,
)
from rest_local.retrieval.files import Files, locked, mapping_os_errors
from rest_local.retrieval.format import Manifest, SegmentEntry
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.staging import MERGE, Staged, clear, staging

FANOUT = 4
DEAD = 0.25
WAIT_S = 60.0  # a finished merge waits so long for a writer


class Size(NamedTuple):
    """The live and the deleted tokens of a segment."""

    live: int
    dead: int


def merge(
    path: Path,
    *,
    vocabulary_hash: str | None = None,
    most: int = SEGMENT_TOKENS,
    files: Files | None = None,
) -> Manifest | None:
    """Merge the due segments of the index for a vocabulary (None: the first one). Returns the newest commit, or None if
    there was nothing to do, or another process merges already.

    `most` limits the tokens of a segment, which bounds memory. After an error the old commit is intact. Raises
    DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked, DatastoreUnwritable.
    """
    files, done = files or Files(), None
    clear(path, files)
    while True:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(Datastore.open(path, vocabulary_hash=vocabulary_hash, mmap=True))
            sizes = []
            for index, entry in enumerate(store.manifest.segments):
                starts, dead = store.table(index).starts, numbers_in(entry.dead)
                gone = int((starts[dead + 1] - starts[dead]).sum())
                sizes.append(Size(entry.tokens - gone, gone))
            chosen = chosen_of(sizes, most)
            if not chosen:
                return done
            try:
                place = stack.enter_context(staging(store.directory, files, MERGE))
            except DatastoreLocked:
                return done
            try:
                staged = _write(store, chosen, place, most, files)
                done = _publish(store, chosen, staged, files) or done
            except (DatastoreCorrupt, FileNotFoundError):  # A newer commit may have deleted an input.
                if read_manifest(store.directory) == store.manifest:
                    raise


def chosen_of(sizes: Sequence[Size], most: int = SEGMENT_TOKENS) -> list[int]:
    """Return the numbers of the segments to merge now, those of the lowest tier first; none if nothing is due."""
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index].live)
    for tier in sorted({tier_of(size.live) for size in sizes}):
        members = [index for index in smallest_first if tier_of(sizes[index].live) == tier]
        if len(members) >= FANOUT and (fitting := _fitting(members, sizes, most)):
            return fitting
    dead = [index for index, size in enumerate(sizes) if size.dead > DEAD * (size.live + size.dead)]
    return [index for index in dead if sizes[index].live <= most][:1]


def tier_of(tokens: int) -> int:
    """Return 0 up to SMALL_SEGMENT tokens, and one more for each FANOUT times as many."""
    tier = 0
    while tokens > SMALL_SEGMENT * FANOUT**tier:
        tier += 1
    return tier


def _fitting(members: Sequence[int], sizes: Sequence[Size], most: int) -> list[int]:
    """Return as many of these segments as fit into `most` tokens, smallest first, or none if only one does."""
    total = np.cumsum([sizes[index].live for index in members])
    count = int(np.searchsorted(total, most, side="right"))
    return list(members[:count]) if count > 1 else []


def _write(store: Datastore, chosen: Sequence[int], place: Path, most: int, files: Files) -> Staged:
    """Write the merged segment of the chosen ones into a staging directory."""
    entries = store.manifest.segments
    store.check([entries[index] for index in chosen])  # or damaged text would get a new, valid checksum
    documents = (document for index in chosen for document in store.each_document(index))
    vocabulary = store.manifest.vocabulary
    with mapping_os_errors(place):
        written = write_segments(place, documents, vocabulary=vocabulary, segment_tokens=most, files=files)
    return Staged(place, written)


def _publish(store: Datastore, chosen: Sequence[int], staged: Staged, files: Files) -> Manifest | None:
    """Commit the merged segments instead of the chosen ones. Return None if one of these is gone."""
    with locked(store.directory, WAIT_S):
        now = read_manifest(store.directory)
        present = {entry.name: entry for entry in now.segments}
        inputs = {store.manifest.segments[index].name: index for index in chosen}
        if not inputs.keys() <= present.keys() or not staged.is_there():
            return None
        names: set[str] = set()
        for name, index in inputs.items():
            names |= _deleted_since(store, index, present[name])
        kept = tuple(entry for entry in now.segments if entry.name not in inputs)
        merged = [_trimmed(staged.place, entry, names) for entry in staged.segments] if names else staged.segments
        staged = Staged(staged.place, tuple(entry for entry in merged if entry))
        return commit(
            store.directory, [], vocabulary=now.vocabulary, recipe=now.recipe, keep=kept, staged=staged, files=files
        )


def _deleted_since(store: Datastore, index: int, now: SegmentEntry) -> set[str]:
    """Return the names of files, and documents without a file, that a newer commit deleted from a segment."""
    then, states, table = store.manifest.segments[index], store.states(index), store.table(index)
    gone = np.setdiff1d(numbers_in(now.gone), numbers_in(then.gone))
    names = {states.name(number) for number in gone.tolist()} if states is not None else set()
    dead = np.setdiff1d(numbers_in(now.dead), numbers_in(then.dead))
    if states is not None:
        dead = np.setdiff1d(dead, states.documents)
    return names | {table.name(number) for number in dead.tolist()}


def _trimmed(place: Path, entry: SegmentEntry, names: Collection[str]) -> SegmentEntry | None:
    """Delete these files and documents from a merged segment. Return None if nothing is left."""
    return segment_without(entry, states_of(place, entry), documents_of(place, entry), names)


Entries = list[SegmentEntry | None]  # the segments of a commit, in order; None if nothing is left of one


def segments_without(store: Datastore, names: Collection[str]) -> Entries:
    """Delete files, or documents without a file, of these names. O(states). Raises DatastoreCorrupt."""
    entries = store.manifest.segments
    return [
        segment_without(entry, store.states(index), store.table(index), names) if names else entry
        for index, entry in enumerate(entries)
    ]


def segment_without(
    entry: SegmentEntry, states: StateTable | None, table: DocumentTable, names: Collection[str]
) -> SegmentEntry | None:
    """Delete files, or documents without a file, of these names from a segment. Return None if no document is left."""
    lost = [] if states is None else states.numbers_of(names)
    stateless = _stateless(entry, states)
    named = table.numbers_of(names) if stateless.any() else []
    died = [number for number in named if stateless[number]]
    if not (lost or died):
        return entry
    gone_now = {*numbers_in(entry.gone).tolist(), *lost}
    dead_now = {*numbers_in(entry.dead).tolist(), *died}
    if states is not None:
        has_file = stateless.copy()
        has_file[states.documents[alive(bitmap_of(gone_now, len(states)), len(states))]] = True
        dead_now.update(np.flatnonzero(~has_file).tolist())
    if len(dead_now) == entry.documents:
        return None
    return dataclasses.replace(entry, gone=bitmap_of(gone_now, entry.states), dead=bitmap_of(dead_now, entry.documents))


def _stateless(entry: SegmentEntry, states: StateTable | None) -> npt.NDArray[np.bool_]:
    """Return a mask of the documents of a segment that have no state, not even a deleted one."""
    found = np.ones(entry.documents, np.bool_)
    if states is not None:
        found[states.documents] = False
    return found


def live_states(
    store: Datastore, names: Collection[str] | None = None, folders: Collection[str] = ()
) -> dict[str, FileState]:
    """Return the live states by file; with `names` only these and those below `folders`. Raises DatastoreCorrupt."""
    found: dict[str, FileState] = {}
    for index, entry in enumerate(store.manifest.segments):
        table = store.states(index)
        if table is not None:
            numbers = range(len(table)) if names is None else table.numbers_of(names)
            below = [number for folder in folders for number in table.numbers_below(folder)]
            live = alive(entry.gone, len(table))
            states = (table[number] for number in (*numbers, *below) if live[number])
            found.update((state.name, state) for state in states)
    return found


def unstated(store: Datastore, names: Collection[str] | None = None) -> set[str]:
    """Return the names (among `names`) of live documents without a state. O(documents)."""
    found: set[str] = set()
    for index, entry in enumerate(store.manifest.segments):
        table = store.table(index)
        stateless = _stateless(entry, store.states(index)) & alive(entry.dead, entry.documents)
        if stateless.any():
            numbers = np.flatnonzero(stateless) if names is None else table.numbers_of(names)
            found |= {table.name(int(number)) for number in numbers if stateless[number]}
    return found
