"""Look at every file of a datastore, list each fault, and repair what can be repaired.

Checksums find damage on the disk. The content is looked at as well, because a wrong file may have a right checksum if a
broken machine wrote it, or if it came from elsewhere. A look changes nothing.

A repair keeps every intact segment, and never deletes the only copy of an intact file:

- A segment whose tokens or documents are damaged is dropped. An update or a rebuild reads its files again.
- A segment whose tokens and documents are intact is written again: order, file states and whatever else is derived.
- A damaged manifest is replaced by the copy of a killed commit, if all files of that are intact.
- Leftovers of killed processes are deleted.

All changes of an index are one commit (docs/FORMAT.md), so the files of before stay until the new ones are durable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreLocked
from rest_local.retrieval.building.build import commit, write_file
from rest_local.retrieval.documents import Document, alive, documents_of, states_by_document, states_of
from rest_local.retrieval.files import Files, digest_of, is_held, locked, mapping_os_errors
from rest_local.retrieval.format import MANIFEST, Manifest, SegmentEntry, VocabularyId, file_name, owns
from rest_local.retrieval.home import folders, read_manifest, stagings
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, PADDING, from_big_endian, order_of, width_of
from rest_local.retrieval.staging import delete, delete_unnamed, leftovers

# These kinds of faults are only leftovers of killed processes. They take room and do no harm.
LEFT = ("orphan", "staging", "removed")

_SAMPLE = 1000
_ATTEMPTS = 5
_NEEDED = ("tokens", "documents")  # the other files of a segment follow from these, or are optional


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file or directory of an index."""

    directory: Path
    name: str  # file or directory in the index
    kind: str  # manifest, version, missing, unreadable, size, checksum, table, ids, order, or one of LEFT
    what: str  # message to people
    segment: str = ""  # name of the faulty segment
    part: str = ""  # kind of its file
    bytes: int = 0  # size of a leftover

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("name", "kind", "what", "segment", "bytes")}
        return {"directory": str(self.directory), **fields}


@dataclass(frozen=True)
class Looked:
    """The result of a look at an index."""

    directory: Path
    manifest: Manifest | None  # None if it cannot be read
    seal: bytes  # sha256 of the manifest's bytes
    faults: tuple[Fault, ...]
    bytes: int = 0  # number of bytes read

    def faults_of(self, entry: SegmentEntry) -> set[str]:
        """Return the kinds of a segment's files that have a fault."""
        return {fault.part for fault in self.faults if fault.segment == entry.name}


def look(path: Path, directories: Iterable[Path] | None = None, *, thorough: bool = False) -> list[Looked]:
    """Look at these indexes of the datastore at `path`, or at all of it and at leftovers of killed processes.

    Every byte of the segments' files is read once, in little memory. The order of a segment is compared with its text
    at _SAMPLE places, or as a whole if `thorough`, which sorts the text again: O(n log n), with the memory of a build.
    Changes nothing and needs no lock. A commit in the meantime makes it look again.
    """
    if directories is not None:
        return [_look_at(directory, thorough) for directory in directories]
    found = [_look_at(directory, thorough) for directory in (path, *folders(path)) if directory.is_dir()]
    return [*found, Looked(path.parent, None, b"", tuple(_removed(path.parent)))]


def _look_at(directory: Path, thorough: bool, attempts: int = _ATTEMPTS) -> Looked:
    seal, manifest, faults, total = seal_of(directory), None, list[Fault](), 0
    try:
        manifest = read_manifest(directory)
    except DatastoreCorrupt as error:
        faults.append(Fault(directory, MANIFEST, "manifest", error.what))
    except DatastoreError as error:
        if os.path.lexists(directory / MANIFEST):
            faults.append(Fault(directory, MANIFEST, "version", str(error)))
    for entry in manifest.segments if manifest else ():
        found = segment_faults(directory, entry, manifest.vocabulary, thorough=thorough)  # type: ignore[union-attr]
        faults += found
        total += sum(entry.files[kind].size for kind in {*entry.files} - {fault.part for fault in found})
    if not any(fault.kind in ("manifest", "version") for fault in faults):  # only a manifest says which files are used
        faults += _left(directory, manifest)
    faults += _removed(directory)
    if faults and attempts > 1 and seal != seal_of(directory):  # a commit came in the meantime
        return _look_at(directory, thorough, attempts - 1)
    return Looked(directory, manifest, seal, tuple(faults), total)


def seal_of(directory: Path) -> bytes:
    """Return the sha256 of the manifest's bytes, empty without one, to notice a commit in between."""
    try:
        return hashlib.sha256((directory / MANIFEST).read_bytes()).digest()
    except OSError:
        return b""


def segment_faults(
    directory: Path, entry: SegmentEntry, vocabulary: VocabularyId, *, thorough: bool = False
) -> list[Fault]:
    """Return all faults of a segment, at most one for each of its files."""
    found = _Segment(directory, entry, vocabulary)
    for kind in entry.files:
        found.read(kind)
    found.check("documents", {"documents"}, found.check_documents)
    found.check("states", {"states"}, lambda: states_of(directory, entry))
    found.check("tokens", {"tokens", "documents"}, found.check_separators)
    found.check("order", {"tokens", "order"}, found.check_whole_order if thorough else found.check_some_order)
    return found.faults


class _Segment:
    """A look at the files of one segment. `good` has the kinds of its files without a fault so far."""

    def __init__(self, directory: Path, entry: SegmentEntry, vocabulary: VocabularyId) -> None:
        self.directory, self.entry, self.vocabulary = directory, entry, vocabulary
        self.width = width_of(vocabulary.size)
        self.faults: list[Fault] = []
        self.good = set(entry.files)
        self.ends: list[np.ndarray[Any, np.dtype[np.int64]]] = []  # the separators' indices in the file of tokens
        self.outside = 0

    def fault(self, part: str, kind: str, what: str) -> None:
        name = file_name(self.entry.name, part)
        self.good.discard(part)
        self.faults.append(Fault(self.directory, name, kind, what, self.entry.name, part))

    def read(self, part: str) -> None:
        """Compare the size and the checksum of a file, and look at the ids of tokens on the way."""
        wanted = self.entry.files[part]
        try:
            digest, size = digest_of(self.path(part), self._look_at_ids if part == "tokens" else None)
        except FileNotFoundError:
            return self.fault(part, "missing", "is missing")
        except OSError as error:
            return self.fault(part, "unreadable", f"cannot be read: {error.strerror or error}")
        if size != wanted.size:
            return self.fault(part, "size", f"has {size} bytes, the manifest says {wanted.size}")
        if digest != wanted.sha256:
            return self.fault(part, "checksum", "does not match its checksum")
        if part == "tokens" and self.outside:
            self.fault(part, "ids", f"holds {self.outside} ids outside the vocabulary")
        return None

    def check(self, part: str, needs: set[str], check: Callable[[], object]) -> None:
        """Run a check of a file's content if the files that it needs are there and intact so far."""
        if needs <= self.good:
            try:
                check()
            except DatastoreCorrupt as error:
                self.fault(part, "table", error.what)
            except OSError as error:
                self.fault(part, "unreadable", f"cannot be read: {error.strerror or error}")

    def path(self, part: str) -> Path:
        return self.directory / file_name(self.entry.name, part)

    def check_documents(self) -> None:
        table = documents_of(self.directory, self.entry)
        starts = table.starts
        if not (starts[1:] > starts[:-1] + np.uint64(1)).all():
            self.fault("documents", "table", "the documents are not in order")
        for number in range(len(table)):
            table.name(number)

    def check_separators(self) -> None:
        """Check that each document ends in a separator, and that there is none elsewhere."""
        length, backwards = self.entry.tokens, np.concatenate(self.ends)
        before, after = np.arange(MAX_DEPTH), np.arange(MAX_DEPTH + length, PADDING + length)
        inside = MAX_DEPTH + length - documents_of(self.directory, self.entry).starts[:0:-1].astype(np.int64)
        if not np.array_equal(backwards, np.concatenate([before, inside, after])):
            self.fault("tokens", "ids", "the separators are not at the ends of the documents")

    def _look_at_ids(self, chunk: bytes, at: int) -> None:
        whole = len(chunk) // self.width * self.width
        ids = from_big_endian(np.frombuffer(chunk[:whole], np.uint8), self.width)
        self.outside += int(np.count_nonzero(ids > self.vocabulary.size))
        self.ends.append(np.flatnonzero(ids == self.vocabulary.size) + at // self.width)

    def check_some_order(self) -> None:
        """Compare neighbours in the order at places all over the file."""
        count = self.entry.files["order"].size // 4
        with self.path("order").open("rb") as order, self.path("tokens").open("rb") as tokens:

            def text(entry: int) -> list[int]:
                tokens.seek((MAX_DEPTH + entry) * self.width)
                window = np.frombuffer(tokens.read(MAX_MATCH * self.width), np.uint8)
                ids: list[int] = from_big_endian(window, self.width).tolist()
                size = self.vocabulary.size
                return ids[: ids.index(size) + 1] if size in ids else ids  # equal up to a separator is equal

            for rank in sorted({count * part // _SAMPLE for part in range(_SAMPLE)}):
                order.seek(4 * rank)
                entries = np.frombuffer(order.read(8), "<u4").tolist()
                if max(entries) >= self.entry.tokens:
                    return self.fault("order", "order", f"rank {rank} lies outside the text")
                if len(set(entries)) < len(entries) or text(entries[0]) > text(entries[-1]):
                    return self.fault("order", "order", f"is not sorted at rank {rank}")
        return None

    def check_whole_order(self) -> None:
        """Sort the text again, and check that the file has that order, without repetitions."""
        order = np.fromfile(self.path("order"), "<u4")
        if len(order) and int(order.max()) >= self.entry.tokens:
            return self.fault("order", "order", "points outside the text")
        kept = np.zeros(self.entry.tokens, np.bool_)
        kept[order] = True
        sorted_ = order_of(self.path("tokens").read_bytes(), self.width)
        if not np.array_equal(sorted_[kept[sorted_]], order):
            return self.fault("order", "order", "is not the order of the text")
        return None


def _left(directory: Path, manifest: Manifest | None) -> Iterator[Fault]:
    """Yield leftovers of a killed writer in the directory of an index. Yield nothing while a writer works there."""
    used = {file_name(entry.name, kind) for entry in (manifest.segments if manifest else ()) for kind in entry.files}
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    orphans = [entry for entry in found if owns(entry.name) and entry.name not in used]
    if orphans and not is_held(directory):
        for entry in orphans:
            with contextlib.suppress(FileNotFoundError):
                size = entry.stat(follow_symlinks=False).st_size
                yield Fault(directory, entry.name, "orphan", "is of no commit: a killed process left it", bytes=size)
    for where in stagings(directory):
        if not is_held(where):
            yield Fault(directory, where.name, "staging", "is of a build that was killed", bytes=size_of(where))


def _removed(directory: Path) -> Iterator[Fault]:
    """Yield leftovers of killed removals and imports in a directory."""
    for path in leftovers(directory):
        if not is_held(path):
            yield Fault(directory, path.name, "removed", "is of a removal that was killed", bytes=size_of(path))


def size_of(directory: Path) -> int:
    found = (os.path.join(where, name) for where, _, names in os.walk(directory) for name in names)
    return sum(os.lstat(path).st_size for path in found if os.path.lexists(path))


@dataclass(frozen=True)
class RepairPlan:
    """The plan of a repair of one index."""

    looked: Looked
    lost: tuple[SegmentEntry, ...] = ()  # segments to drop
    again: tuple[SegmentEntry, ...] = ()  # segments to write again, from intact text
    copy: Path | None = None  # the manifest that replaces a damaged one
    hopeless: str = ""  # why the index cannot be repaired
    lost_names: tuple[str, ...] | None = ()  # documents whose text is lost, as far as known; None if no table is intact

    @property
    def left(self) -> tuple[Fault, ...]:
        """Return leftovers of killed processes, which are deleted."""
        return tuple(fault for fault in self.looked.faults if fault.kind in LEFT)

    @property
    def needs_lock(self) -> bool:
        """Return True if files of the index change, not only directories that nothing uses."""
        return bool(self.lost or self.again or self.copy) or any(fault.kind == "orphan" for fault in self.left)

    @property
    def lost_tokens(self) -> int:
        return sum(entry.tokens for entry in self.lost)

    def to_dict(self) -> dict[str, Any]:
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


def plan(looked: Looked) -> RepairPlan:
    """Plan a repair. Reads the copies of a damaged manifest with all of their segments."""
    manifest, faults = looked.manifest, looked.faults
    if manifest is None:
        unreadable = next((fault for fault in faults if fault.kind in ("manifest", "version")), None)
        copy = _complete_copy(looked.directory) if unreadable and unreadable.kind == "manifest" else None
        if unreadable and copy is None:
            return RepairPlan(looked, hopeless=f"the manifest cannot be read, and it has no copy: {unreadable.what}")
        return RepairPlan(looked, copy=copy)
    bad = [entry for entry in manifest.segments if looked.faults_of(entry)]
    lost = tuple(entry for entry in bad if not looked.faults_of(entry).isdisjoint(_NEEDED))
    again = tuple(entry for entry in bad if entry not in lost)
    if lost and len(lost) == len(manifest.segments):
        return RepairPlan(looked, hopeless="no segment is intact")
    known = [names for entry in lost if (names := _names(looked, entry)) is not None]
    return RepairPlan(looked, lost, again, lost_names=tuple(chain.from_iterable(known)) if known or not lost else None)


def repair(planned: RepairPlan, *, files: Files | None = None) -> None:
    """Execute a plan under the writers' lock, in one commit. A hopeless index stays as it is.

    Needs the memory of a build for a segment that is written again. Raises DatastoreError if there was a commit since
    the look, DatastoreLocked, and DatastoreUnwritable: then the index is as it was before.
    """
    files, directory = files or Files(), planned.looked.directory
    if planned.hopeless:
        return
    if planned.needs_lock:
        with locked(directory):
            if seal_of(directory) != planned.looked.seal:
                raise DatastoreError(f"datastore {directory}: it was changed since it was checked; check it again")
            if planned.copy:
                _restore(directory, planned.copy, files)
            elif planned.lost or planned.again:
                _commit(planned, files)
            if any(fault.kind == "orphan" for fault in planned.left):
                with mapping_os_errors(directory):
                    delete_unnamed(directory, files, everything=True)
    for fault in planned.left:
        path = directory / fault.name
        with mapping_os_errors(path):
            if fault.kind == "removed" and path.exists():
                delete(path, files)
            elif fault.kind == "staging" and path.exists():
                with contextlib.suppress(DatastoreLocked), locked(path):  # a process may have taken it up
                    files.unlink_tree(path)


def _commit(planned: RepairPlan, files: Files) -> None:
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
    """Yield the live documents of a segment from its intact tokens and tables. `size` is that of the vocabulary; files
    of the kinds in `bad` are not read. Without its states an update reads the files of a document again.
    """
    table, width = documents_of(directory, entry), width_of(size)
    packed = np.fromfile(directory / file_name(entry.name, "tokens"), np.uint8)
    backwards = packed[MAX_DEPTH * width : (MAX_DEPTH + entry.tokens) * width]
    states = {} if "states" in bad else states_by_document(states_of(directory, entry), entry.gone)
    for number in np.flatnonzero(alive(entry.dead, entry.documents)).tolist():
        first, last = entry.tokens - table.start(number + 1) + 1, entry.tokens - table.start(number)
        tokens = from_big_endian(backwards[first * width : last * width], width)[::-1]
        yield Document(table.name(number), tokens, tuple(states.get(number, ())))


def _names(looked: Looked, entry: SegmentEntry) -> list[str] | None:
    """Return the names of a segment's live documents, from its documents or else its states."""
    bad = looked.faults_of(entry)
    with contextlib.suppress(DatastoreError, OSError):
        if "documents" not in bad:
            table = documents_of(looked.directory, entry)
            return [table.name(number) for number in np.flatnonzero(alive(entry.dead, entry.documents)).tolist()]
        if "states" in {*entry.files} - bad:
            by_document = states_by_document(states_of(looked.directory, entry), entry.gone)
            return [state.name for states in by_document.values() for state in states]
    return None


def _complete_copy(directory: Path) -> Path | None:
    """Return the newest copy of a manifest whose segments are all intact."""
    complete: list[tuple[int, Path]] = []
    for path in sorted(directory.glob(f"{MANIFEST}.new-*")):
        with contextlib.suppress(DatastoreError, OSError):
            manifest = Manifest.parse(path.read_bytes(), path)
            if not any(segment_faults(directory, entry, manifest.vocabulary) for entry in manifest.segments):
                complete.append((manifest.revision, path))
    return max(complete)[1] if complete else None


def _restore(directory: Path, copy: Path, files: Files) -> None:
    """Do step 3 of a commit, for a manifest that is there already. The copy stays until the next writer deletes it: on
    a file system whose renames are not atomic (exFAT), a power cut may take it away before it has its new name.
    """
    with mapping_os_errors(directory):
        new = directory / f"{MANIFEST}.new-{secrets.token_hex(8)}"
        write_file(files, new, copy.read_bytes())
        files.sync_directory(directory)
        files.rename(new, directory / MANIFEST)
        files.sync_directory(directory)
    read_manifest(directory)
