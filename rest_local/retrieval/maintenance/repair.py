"""Repairs what `checking` found: keeps every intact segment, and never deletes the only copy of an intact file.

- A segment whose tokens or documents are damaged is dropped. An update or a rebuild reads its files again.
- A segment whose tokens and documents are intact is written again: order, file states and whatever else is derived.
- A damaged manifest is replaced by the copy of a killed commit, if all files of that are intact.
- What killed processes left is deleted.

All changes of an index are one commit (docs/FORMAT.md), so the files of before stay until the new ones are durable.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.errors import DatastoreError, DatastoreLocked
from rest_local.retrieval.building.build import commit, write_file
from rest_local.retrieval.documents import Document, DocumentTable, FileState, StateTable, numbers_in
from rest_local.retrieval.files import Files, locked, unwritable
from rest_local.retrieval.format import MANIFEST, Manifest, SegmentEntry, file_name
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.maintenance.checking import LEFT, Fault, Looked, seal_of, segment_faults
from rest_local.retrieval.rows import MAX_DEPTH, from_big_endian, width_of
from rest_local.retrieval.staging import delete, delete_unnamed

_NEEDED = ("tokens", "documents")  # of a segment; everything else follows from them, or is optional


@dataclass(frozen=True)
class Plan:
    """What a repair will do to one index. lost: segments that are dropped; again: that are written again, from intact
    text; copy: of a manifest that replaces a damaged one; hopeless: why the index cannot be repaired, empty if it can;
    lost_names: of the documents whose text is lost, as far as an intact table tells; None if none does.
    """

    looked: Looked
    lost: tuple[SegmentEntry, ...] = ()
    again: tuple[SegmentEntry, ...] = ()
    copy: Path | None = None
    hopeless: str = ""
    lost_names: tuple[str, ...] | None = ()

    @property
    def left(self) -> tuple[Fault, ...]:
        """What killed processes left, which is deleted."""
        return tuple(fault for fault in self.looked.faults if fault.kind in LEFT)

    @property
    def needs_lock(self) -> bool:
        """Whether files of the index change, not only directories that nothing uses."""
        return bool(self.lost or self.again or self.copy) or any(fault.kind == "orphan" for fault in self.left)

    @property
    def lost_tokens(self) -> int:
        return sum(entry.tokens for entry in self.lost)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "directory": str(self.looked.directory),
            "dropped": [entry.name for entry in self.lost],
            "dropped_tokens": self.lost_tokens,
            "dropped_documents": None if self.lost_names is None else list(self.lost_names),
            "written_again": [entry.name for entry in self.again],
            "manifest_from": self.copy.name if self.copy else None,
            "deleted": [fault.name for fault in self.left],
            "freed": sum(fault.bytes for fault in self.left),
            "hopeless": self.hopeless,
        }


def plan(looked: Looked) -> Plan:
    """What a repair would do. Reads the copies of a damaged manifest with all of their segments."""
    manifest, faults = looked.manifest, looked.faults
    if manifest is None:
        unreadable = next((fault for fault in faults if fault.kind in ("manifest", "version")), None)
        copy = _complete_copy(looked.directory) if unreadable and unreadable.kind == "manifest" else None
        if unreadable and copy is None:
            return Plan(looked, hopeless=f"the manifest cannot be read and there is no copy of it: {unreadable.what}")
        return Plan(looked, copy=copy)
    bad = [entry for entry in manifest.segments if looked.faults_of(entry)]
    lost = tuple(entry for entry in bad if not looked.faults_of(entry).isdisjoint(_NEEDED))
    again = tuple(entry for entry in bad if entry not in lost)
    if lost and len(lost) == len(manifest.segments):
        return Plan(looked, hopeless="no segment is intact")
    return Plan(looked, lost, again, lost_names=_lost_names(looked, lost))


def repair(planned: Plan, *, wait_s: float = 0.0, files: Files | None = None) -> None:
    """Do what a plan says, under the writers' lock, in one commit.

    A hopeless index stays as it is. Needs the memory of a build for a segment that is written again. Raises
    DatastoreError if there was a commit since the look, DatastoreLocked, and DatastoreUnwritable: then the index is as
    it was before.
    """
    files, directory = files or Files(), planned.looked.directory
    if planned.hopeless:
        return
    if planned.needs_lock:
        with locked(directory, wait_s):
            if seal_of(directory) != planned.looked.seal:
                raise DatastoreError(f"datastore {directory}: it was changed since it was checked; check it again")
            if planned.copy:
                _restore(directory, planned.copy, files)
            elif planned.lost or planned.again:
                _commit(planned, files)
            if any(fault.kind == "orphan" for fault in planned.left):
                with unwritable(directory):
                    delete_unnamed(directory, files, everything=True)
    for fault in planned.left:
        path = directory / fault.name
        with unwritable(path):
            if fault.kind == "removed" and path.exists():
                delete(path, files)
            elif fault.kind in ("staging", "importing") and path.exists():
                with contextlib.suppress(DatastoreLocked), locked(path):  # which a process may have taken up
                    files.unlink_tree(path)


def _commit(planned: Plan, files: Files) -> None:
    manifest, directory = planned.looked.manifest, planned.looked.directory
    assert manifest is not None
    changed = {entry.name for entry in (*planned.lost, *planned.again)}
    documents = (
        document
        for entry in planned.again
        for document in read_documents(directory, entry, manifest.vocabulary.size, planned.looked.faults_of(entry))
    )
    keep = tuple(entry for entry in manifest.segments if entry.name not in changed)
    commit(directory, documents, vocabulary=manifest.vocabulary, recipe=manifest.recipe, keep=keep, files=files)


def read_documents(directory: Path, entry: SegmentEntry, size: int, bad: set[str]) -> Iterator[Document]:
    """The documents of a segment that are not deleted, from its intact tokens and tables. size: of the vocabulary; bad:
    the kinds of files that are not read. Without its states the files of a document are read again by an update.
    """
    path = directory / file_name(entry.name, "documents")
    table = DocumentTable(path.read_bytes(), path, entry.documents, entry.tokens)
    width = width_of(size)
    packed = np.fromfile(directory / file_name(entry.name, "tokens"), np.uint8)
    backwards = packed[MAX_DEPTH * width : (MAX_DEPTH + entry.tokens) * width]
    states = {} if "states" in bad else _states(directory, entry)
    dead = set(numbers_in(entry.dead).tolist())
    for number in range(len(table)):
        if number not in dead:
            first, last = entry.tokens - table.start(number + 1) + 1, entry.tokens - table.start(number)
            tokens = from_big_endian(backwards[first * width : last * width], width)[::-1]
            yield Document(table.name(number), tokens, tuple(states.get(number, ())))


def _states(directory: Path, entry: SegmentEntry) -> dict[int, list[FileState]]:
    by_document: dict[int, list[FileState]] = {}
    if entry.states:
        path = directory / file_name(entry.name, "states")
        table = StateTable(path.read_bytes(), path, entry.states, entry.documents)
        gone = set(numbers_in(entry.gone).tolist())
        for number in range(len(table)):
            if number not in gone:
                by_document.setdefault(int(table.documents[number]), []).append(table[number])
    return by_document


def _lost_names(looked: Looked, lost: tuple[SegmentEntry, ...]) -> tuple[str, ...] | None:
    known = [names for names in (_names(looked, entry) for entry in lost) if names is not None]
    return tuple(name for names in known for name in names) if known or not lost else None


def _names(looked: Looked, entry: SegmentEntry) -> list[str] | None:
    """The names of a segment's documents that are not deleted, from its documents or else its states."""
    bad = looked.faults_of(entry)
    with contextlib.suppress(DatastoreError, OSError):
        if "documents" not in bad:
            path = looked.directory / file_name(entry.name, "documents")
            table = DocumentTable(path.read_bytes(), path, entry.documents, entry.tokens)
            dead = set(numbers_in(entry.dead).tolist())
            return [table.name(number) for number in range(len(table)) if number not in dead]
        if "states" in {*entry.files} - bad:
            return [state.name for states in _states(looked.directory, entry).values() for state in states]
    return None


def _complete_copy(directory: Path) -> Path | None:
    """The newest copy of a manifest whose segments are all intact."""
    complete: list[tuple[int, Path]] = []
    for path in sorted(directory.glob(f"{MANIFEST}.new-*")):
        with contextlib.suppress(DatastoreError, OSError):
            manifest = Manifest.parse(path.read_bytes(), path)
            if not any(segment_faults(directory, entry, manifest.vocabulary) for entry in manifest.segments):
                complete.append((manifest.revision, path))
    return max(complete)[1] if complete else None


def _restore(directory: Path, copy: Path, files: Files) -> None:
    """Step 3 of a commit, for a manifest that is there already. The copy stays until the next writer deletes it: on a
    file system whose renames are not atomic (exFAT), a power cut may take it away before it has its new name.
    """
    with unwritable(directory):
        new = directory / f"{MANIFEST}.new-{secrets.token_hex(8)}"
        write_file(files, new, copy.read_bytes())
        files.sync_directory(directory)
        files.rename(new, directory / MANIFEST)
        files.sync_directory(directory)
    read_manifest(directory)
