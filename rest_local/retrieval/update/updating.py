"""Bring a datastore up to date with its sources, and add documents or sources to it.

    updated = update(path, vocabulary=model.vocabulary)
    print(updated.added, updated.changed, updated.deleted)

A file of the same size and time of change is not read, and only new content is tokenized. A bit in the manifest masks
the old text of a changed or deleted file until a merge writes its segment again.

Files are read and tokenized without the writers' lock. A few tokens are then written under it, as a segment that takes
up the small ones before it; more tokens are written as separate segments in a staging directory, and only published
under the lock. If another writer committed meanwhile, the deletions are found anew in its commit; if that one changed
the same files or the recipe, everything is done again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rest_local.errors import CorpusEmpty, DatastoreError, DatastoreLocked, InputInvalid, printable
from rest_local.retrieval.building.build import (
    SMALL_SEGMENT,
    Progress,
    commit,
    no_progress,
    write_segments,
)
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, DocumentTokenizer, FileState, Text, counted, tokenize_documents
from rest_local.retrieval.files import WAIT_S, Files, locked, mapping_os_errors
from rest_local.retrieval.format import Manifest, SegmentEntry
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.sources.recipes import from_recipe
from rest_local.retrieval.sources.source import Reading, Skipped, Source
from rest_local.retrieval.sources.walk import Walk, resolved
from rest_local.retrieval.staging import Staged, clear, staging
from rest_local.retrieval.update.merging import Entries, live_states, merge, segments_without, unstated

log = logging.getLogger("rest_local.datastore")

_ATTEMPTS = 5


@dataclass(frozen=True)
class Updated:
    """The result of an update, in files."""

    added: int
    changed: int
    deleted: int
    unchanged: int  # includes files with another time of change and the same content
    tokens: int  # tokens of the tokenized files
    manifest: Manifest  # the newest commit's
    skipped: Skipped  # files that the walk left out

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields. `total` and `documents` describe the index, without deleted documents."""
        segments = self.manifest.segments
        return {
            "vocabulary": self.manifest.vocabulary.name,
            **{name: getattr(self, name) for name in ("added", "changed", "deleted", "unchanged", "tokens")},
            "total": sum(segment.tokens for segment in segments),
            "documents": sum(segment.live for segment in segments),
            "segments": len(segments),
            "skipped": dict(self.skipped.counts),
            "secrets": self.skipped.secrets,
        }


class _Moved(Exception):
    """Another writer's commit makes this attempt useless."""


def update(
    path: Path,
    *,
    vocabulary: DocumentTokenizer,
    only: Collection[str] | None = None,
    missing: bool = False,
    merging: bool = False,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Updated:
    """Read the recorded sources of the index for a vocabulary again, as far as they may have changed, and commit
    changes.

    `only` has absolute paths of files or deleted folders to look at alone; sources that do not walk are left out then.
    `missing` says that the files of a recorded path that is gone or empty are deleted; otherwise that is refused,
    because a drive may not be mounted. `merging` then merges the segments that are due, which may take seconds.

    Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked,
    DatastoreUnwritable, DatastoreError for text of another origin, InputInvalid for a missing path, CorpusEmpty if no
    file would be left. After an error the old commit is intact. O(states) and what the walk and the new text cost.
    """
    job = _Job(path, vocabulary, progress or no_progress, files or Files())
    return _again(job, merging, lambda base: _update(job, base, only, missing))


@dataclass(frozen=True)
class _Job:
    """The arguments of an update."""

    path: Path
    vocabulary: DocumentTokenizer
    progress: Progress
    files: Files

    def open(self) -> Datastore:
        """Open the index, mapped, because only parts of it are read."""
        known = self.vocabulary
        return Datastore.open(self.path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=True)


def _again(job: _Job, merging: bool, attempt: Callable[[Datastore], Updated]) -> Updated:
    """Repeat an attempt until no other writer disturbs it, then merge."""
    clear(job.path, job.files)
    for _ in range(_ATTEMPTS):
        with job.open() as base:
            try:
                updated = attempt(base)
            except (_Moved, FileNotFoundError):  # A newer commit deleted a file, or `forget` a staging directory.
                continue
        try:
            merged = merge(job.path, vocabulary_hash=job.vocabulary.hash, files=job.files) if merging else None
        except DatastoreError as error:
            log.warning("the change is committed, but its segments could not be merged: %s", error)
            return updated
        return replace(updated, manifest=merged) if merged else updated
    raise DatastoreLocked(job.path, "other writers, one after another")


def _update(job: _Job, base: Datastore, only: Collection[str] | None, missing: bool) -> Updated:
    sources = [source for source in from_recipe(base.manifest.recipe) if source.repeatable]
    if not sources:
        raise DatastoreError(f"datastore {job.path}: it was not built from files, so nothing says what to look at")
    if only is not None:
        sources = [source for source in sources if isinstance(source, Walk)]
        only = resolved(only, roots_of(sources))
        known = live_states(base, only)
        if folders := [path for path in only if path not in known and not os.path.lexists(path)]:
            known |= live_states(base, (), folders)
        walk = Rereading(known, unstated(base, only))
        texts = walk.texts(present(sources, {}, missing), job, only)
        return _stored(job, base, walk, texts)
    roots = [os.path.realpath(path) for path in roots_of(sources)]
    below = tuple(os.path.join(root, "") for root in roots)
    # An earlier version stored no states.
    loose = {name for name in unstated(base) if name.startswith(below) or name in roots}
    walk = Rereading(live_states(base), loose)
    texts = walk.texts(present(sources, walk.known, missing), job)
    return _stored(job, base, walk, texts)


def _stored(job: _Job, base: Datastore, walk: Rereading, texts: Iterator[Text]) -> Updated:
    """Read `texts` and commit new ones. Known files that are not among them are gone."""
    with contextlib.ExitStack() as stack:
        documents, staged = _collected(job, base, walk, texts, stack)
        walk.gone = {name for name in {*walk.known, *walk.unstated} - walk.seen if _is_gone(name)}
        names, manifest = walk.read | walk.gone, base.manifest
        if names:
            stack.enter_context(locked(base.directory, WAIT_S))
            store = base
            if read_manifest(base.directory) != manifest:
                # Another writer may have changed the same files or the recipe.
                store = stack.enter_context(job.open())
                same = store.manifest.recipe == manifest.recipe
                if not same or live_states(base, names) != live_states(store, names):
                    raise _Moved
            if staged and not staged.is_there():
                raise _Moved
            entries = segments_without(store, names)
            manifest = put(store, entries, documents, store.manifest.recipe, job.files, job.progress, staged)
        deleted = len(walk.gone)
        return Updated(walk.added, walk.changed, deleted, walk.unchanged, walk.tokens, manifest, walk.skipped)


def _collected(
    job: _Job, base: Datastore, walk: Rereading, texts: Iterator[Text], stack: contextlib.ExitStack
) -> tuple[list[Document], Staged | None]:
    """Tokenize texts. More than SMALL_SEGMENT tokens go to a staging directory, which `stack` deletes."""

    def tokenized() -> Iterator[Document]:
        for document in counted(tokenize_documents(walk.new_texts(texts), job.vocabulary), job.progress):
            walk.tokens += len(document.tokens)
            yield document

    documents, few, size = tokenized(), list[Document](), 0
    for document in documents:
        few.append(document)
        size += len(document.tokens) + 1
        if size > SMALL_SEGMENT:
            place, every = stack.enter_context(staging(base.directory, job.files)), chain(few, documents)
            identity = base.manifest.vocabulary
            with mapping_os_errors(place):
                entries = write_segments(place, every, vocabulary=identity, progress=job.progress, files=job.files)
            return [], Staged(place, entries)
    return few, None


def put(
    store: Datastore,
    entries: Entries,
    new: Sequence[Document],
    recipe: Mapping[str, Any],
    files: Files,
    progress: Progress = no_progress,
    staged: Staged | None = None,
) -> Manifest:
    """Commit, under the lock, the rest of `store`, staged segments, and new documents with all small segments."""
    keep: list[SegmentEntry] = []
    documents: list[Document] = []
    small = [i for i, entry in enumerate(entries) if new and entry and entry.tokens <= SMALL_SEGMENT]
    store.check([store.manifest.segments[index] for index in small])  # or damage would get a new, valid checksum
    for index, entry in enumerate(entries):
        if index in small:
            documents += store.each_document(index, entry)
        elif entry:
            keep.append(entry)
    documents += new
    if not (keep or documents or staged):
        raise CorpusEmpty(", ".join(source.about() for source in from_recipe(recipe)), "no file is left")
    return commit(
        store.directory,
        documents,
        vocabulary=store.manifest.vocabulary,
        recipe=dict(recipe),
        keep=tuple(keep),
        staged=staged,
        progress=progress,
        files=files,
    )


# If only the time of change of files is new, an update stores up to so many bytes of them again, so that the next ones
# need not read them. Further files follow at the next updates.
RESTATED_BYTES = 1 << 20


@dataclass
class Rereading:
    """A reader of sources that compares the files with their states in the datastore, and counts."""

    known: Mapping[str, FileState]  # the states to compare, by name
    unstated: Collection[str] = ()  # documents without a state, from an earlier version or from no file
    skipped: Skipped = field(default_factory=Skipped)
    read: set[str] = field(default_factory=set)  # names of all new content
    seen: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)  # names to delete
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    tokens: int = 0
    _restated: int = 0

    def is_unchanged(self, name: str, size: int, mtime_ns: int) -> bool:
        state = self.known.get(name)
        return state is not None and state.mtime_ns != 0 and (state.size, state.mtime_ns) == (size, mtime_ns)

    def texts(self, sources: Sequence[Source], job: _Job, only: Collection[str] | None = None) -> Iterator[Text]:
        """Yield the texts of sources. Raises as `Source.texts`."""
        report = job.progress
        reading = Reading(self.skipped, self.is_unchanged, only, lambda size: report("read", size))
        return chain.from_iterable([source.texts(reading) for source in sources])

    def new_texts(self, texts: Iterator[Text]) -> Iterator[Text]:
        for text in texts:
            self.seen.add(text.name)
            known = self.known.get(text.name)
            if text.text is None or (known and text.state and self._is_same(known, text.state)):
                self.unchanged += 1
                continue
            self.read.add(text.name)
            if known is None and text.name not in self.unstated:
                self.added += 1
            elif known and text.state and known.sha256 == text.state.sha256:
                self.unchanged += 1
            else:
                self.changed += 1
            yield text

    def _is_same(self, known: FileState, found: FileState) -> bool:
        """Return True if the content is the same, and nothing is to be stored."""
        if known.sha256 != found.sha256:
            return False
        if found.mtime_ns in (0, known.mtime_ns) or self._restated + found.size > RESTATED_BYTES:
            return True
        self._restated += found.size
        return False


def _is_gone(name: str) -> bool:
    """Return True if a file that no walk finds is deleted or left out by now, not only out of reach."""
    try:
        os.lstat(name)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False
    return True


def roots_of(sources: Sequence[Source]) -> list[str]:
    return [path for source in sources if isinstance(source, Walk) for path in source.paths]


def present(sources: Sequence[Source], known: Mapping[str, FileState], missing: bool) -> list[Source]:
    """Return the sources, each walk only with the paths that are there. Unless `missing`, raises InputInvalid for a
    path that is gone, or empty while files of it are known.
    """
    found: list[Source] = []
    for source in sources:
        if not isinstance(source, Walk):
            found.append(source)
        elif paths := tuple(path for path in source.paths if _is_present(path, known, missing)):
            found.append(replace(source, paths=paths))
    return found


def _is_present(path: str, known: Mapping[str, FileState], missing: bool) -> bool:
    what = ""
    if not os.path.exists(path):
        what = "no such file or directory"
    elif os.path.isdir(path):
        with contextlib.suppress(OSError), os.scandir(path) as entries:  # the walk counts what cannot be read
            inside = os.path.join(os.path.realpath(path), "")
            if not any(True for _ in entries) and any(name.startswith(inside) for name in known):
                what = "is empty now, while the datastore holds files of it"
    if what and not missing:
        raise InputInvalid("path", printable(path), f"{what}; mount it, or delete its files with `missing=True`")
    return os.path.exists(path)
