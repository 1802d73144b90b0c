"""Brings a datastore up to date with its sources, and adds documents or sources to it.

    updated = update(path, vocabulary=model.vocabulary)
    print(updated.added, updated.changed, updated.deleted)

A file of the same size and time of change is not read. Only new content is tokenized. The old text of a changed or
deleted file is masked by a bit in the manifest until a merge writes its segment again.

Files are read and tokenized without the writers' lock. A few tokens are then written under it, as a segment that takes
up the small ones before it; more tokens are written as segments of their own in a staging directory, and only published
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

from rest_local.errors import CorpusEmpty, DatastoreError, DatastoreLocked, DatastoreNotFound, printable
from rest_local.retrieval.building.build import SEGMENT_TOKENS, Progress, commit, write_segments
from rest_local.retrieval.building.indexing import recipe_of
from rest_local.retrieval.building.staged import Staged, is_there, staging
from rest_local.retrieval.building.tokenizing import DocumentTokenizer, tokenize_documents
from rest_local.retrieval.changing.masking import Entries, live_states, live_states_below, unstated, without
from rest_local.retrieval.changing.merging import merge
from rest_local.retrieval.changing.rereading import WALKED, Rereading, is_walk, present, resolved, roots_of, united
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, Text
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import Manifest, SegmentEntry, VocabularyId
from rest_local.retrieval.history import SMALL_SEGMENT, WAIT_S
from rest_local.retrieval.home import clear, find, read_manifest
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.sources.git_source import Git
from rest_local.retrieval.sources.registry import from_recipe, is_repeatable
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.source import Render, Source

log = logging.getLogger("rest_local.datastore")

AT_ONCE = 1 << 20
"""Tokens that `add` merges at once after its commit: a quarter of a second."""

_ATTEMPTS = 5


@dataclass(frozen=True)
class Updated:
    """What an update did, in files. unchanged: also files of another time of change and the same content; tokens: of
    the files that were tokenized; manifest: of the newest commit; skipped: what the walk left out.
    """

    added: int
    changed: int
    deleted: int
    unchanged: int
    tokens: int
    manifest: Manifest
    skipped: Skipped


class _Moved(Exception):
    """Another writer's commit makes what was read useless."""


def update(
    path: Path,
    *,
    vocabulary: DocumentTokenizer,
    only: Collection[str] | None = None,
    missing: bool = False,
    merging: bool = False,
    render: Render | None = None,
    progress: Progress | None = None,
    files: Files | None = None,
    wait_s: float = WAIT_S,
    mmap: bool | None = None,
) -> Updated:
    """Read the recorded sources of the index for a vocabulary again, as far as they may have changed, and commit what
    changed, if anything did.

    only: absolute paths of files, or of deleted folders, to look at alone; sources that do not walk are left out then.
    render: for transcripts of chats (`sources.source.Render`). missing: a recorded path that is gone or
    empty means that its files are deleted; otherwise that is refused, because a drive may not be mounted. merging: then
    merge the segments that are due, which may take seconds. wait_s: for the lock; mmap: False reads every file instead
    of mapping it.

    Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked,
    DatastoreUnwritable, DatastoreError for text of another origin, InputInvalid for a missing path, CorpusEmpty if no
    file would be left. After an error the old commit is intact. O(states) and what the walk and the new text cost.
    """
    report = progress or (lambda what, amount: None)
    given = _Given(path, vocabulary, report, files or Files(), wait_s, mmap, render)
    updated = _again(given, lambda base: _update(given, base, only, missing))
    return _merged(given, updated) if merging else updated


def add_sources(
    path: Path,
    sources: Sequence[Source],
    *,
    vocabulary: DocumentTokenizer,
    merging: bool = False,
    render: Render | None = None,
    progress: Progress | None = None,
    files: Files | None = None,
    wait_s: float = WAIT_S,
    mmap: bool | None = None,
) -> Updated:
    """Add sources to the index for a vocabulary; only these are read. The same commit records them. Arguments and
    errors as for `update`.
    """
    report = progress or (lambda what, amount: None)
    given = _Given(path, vocabulary, report, files or Files(), wait_s, mmap, render)
    prepared = [source.prepared() for source in sources]
    updated = _again(given, lambda base: _add_sources(given, base, prepared))
    return _merged(given, updated) if merging else updated


def _merged(given: _Given, updated: Updated) -> Updated:
    merged = _merge(given.path, given.vocabulary.hash, given.files, given.mmap)
    return replace(updated, manifest=merged) if merged else updated


def _merge(
    path: Path, vocabulary_hash: str, files: Files, mmap: bool | None, most: int = SEGMENT_TOKENS
) -> Manifest | None:
    """Merge what is due after a commit, which is not undone if that fails."""
    try:
        return merge(path, vocabulary_hash=vocabulary_hash, most=most, files=files, mmap=mmap)
    except DatastoreError as error:
        log.warning("the change is committed, but its segments could not be merged: %s", error)
        return None


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
    """Add documents, each a name and token ids, to the index for this vocabulary, instead of those with the same names.
    Creates a datastore that does not exist, but not an index that an existing one lacks, which would hold these
    documents alone.

    `recipe`: of a new datastore; `wait_s`: for the lock; `mmap`: as for `Datastore.open`, False reads all of it. Raises
    DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked, DatastoreUnwritable, and CorpusEmpty
    without any token. After an error the existing datastore is intact.
    """
    files, directory = files or Files(), find(path, vocabulary.hash)
    new = [Document(name, tokens) for name, tokens in documents]
    clear(path, files)
    with locked(directory, wait_s, make=files):
        try:
            store = Datastore.open(path, vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name, mmap=mmap)
        except DatastoreNotFound:
            return commit(directory, new, vocabulary=vocabulary, recipe=recipe, files=files)
        with store:
            entries = without(store, {document.name for document in new})
            manifest = put(store, entries, _New(new), store.manifest.recipe, files)
    return _merge(path, vocabulary.hash, files, mmap, AT_ONCE) or manifest


@dataclass(frozen=True)
class _Given:
    """What the caller of an update gave."""

    path: Path
    vocabulary: DocumentTokenizer
    progress: Progress
    files: Files
    wait_s: float
    mmap: bool | None
    render: Render | None

    def open(self) -> Datastore:
        known = self.vocabulary
        is_mapped = self.mmap is not False  # only parts of it are read
        return Datastore.open(self.path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=is_mapped)


@dataclass
class _New:
    """Documents to be stored: a few in memory, many as segments in a staging directory."""

    documents: list[Document] = field(default_factory=list)
    staged: Staged | None = None


def _result(walk: Rereading, manifest: Manifest) -> Updated:
    deleted = len(walk.gone)
    return Updated(walk.added, walk.changed, deleted, walk.unchanged, walk.tokens, manifest, walk.skipped)


def _again(given: _Given, attempt: Callable[[Datastore], Updated]) -> Updated:
    """The result of an attempt that no other writer disturbed."""
    clear(given.path, given.files)
    for _ in range(_ATTEMPTS):
        with given.open() as base:
            try:
                return attempt(base)
            except (_Moved, FileNotFoundError):  # a newer commit deleted a file, or `forget` a staging directory
                continue
    raise DatastoreLocked(given.path, "other writers, one after another")


def _update(given: _Given, base: Datastore, only: Collection[str] | None, missing: bool) -> Updated:
    recipe = base.manifest.recipe
    recorded = from_recipe(recipe)
    sources = [source for source in recorded if is_repeatable(source)]
    if not sources:
        raise DatastoreError(f"datastore {given.path}: it was not built from files, so nothing says what to look at")
    if only is not None:
        return _update_only(given, base, [source for source in sources if is_walk(source)], only, missing)
    walk = Rereading(live_states(base), _unstated(base, roots_of(sources)))
    texts = walk.texts(present(sources, walk.known, missing), given.progress, given.render)
    if "sources" in recipe:  # a revision of git may mean another commit by now
        now = [source.prepared() if isinstance(source, Git) else source for source in recorded]
        recipe = {**recipe, **recipe_of(now)} if now != recorded else recipe
    return _stored(given, base, walk, texts, recipe, True)


def _update_only(
    given: _Given, base: Datastore, sources: Sequence[Source], only: Collection[str], missing: bool
) -> Updated:
    wanted = {*only, *resolved(only, roots_of(sources))}
    known = live_states(base, wanted)
    if folders := [path for path in wanted if path not in known and not os.path.lexists(path)]:
        known |= live_states_below(base, folders)
    walk = Rereading(known, unstated(base, wanted))
    texts = walk.texts(present(sources, {}, missing), given.progress, only=wanted)
    return _stored(given, base, walk, texts, base.manifest.recipe, True)


def _unstated(base: Datastore, roots: Sequence[str]) -> set[str]:
    """The documents without a state that a walk may have given: those of an earlier version."""
    starts = tuple(os.path.join(os.path.realpath(path), "") for path in roots)
    ends = {os.path.realpath(path) for path in roots}
    return {name for name in unstated(base) if name.startswith(starts) or name in ends}


def _add_sources(given: _Given, base: Datastore, sources: Sequence[Source]) -> Updated:
    recipe = dict(base.manifest.recipe)
    if "kind" in recipe:
        raise DatastoreError(f"datastore {given.path}: it is of kind {printable(recipe['kind'])}, which takes no paths")
    walk = Rereading(live_states(base), unstated(base))
    texts = walk.texts(sources, given.progress, given.render)
    kept = {key: value for key, value in recipe.items() if key not in WALKED}
    return _stored(given, base, walk, texts, {**kept, **recipe_of(united(from_recipe(recipe), sources))}, False)


def _stored(
    given: _Given, base: Datastore, walk: Rereading, texts: Iterator[Text], recipe: Mapping[str, Any], is_complete: bool
) -> Updated:
    """Read `texts` and commit what is new. is_complete: known files that are not among them are gone."""
    with contextlib.ExitStack() as stack:
        new = _collected(given, base, walk, texts, stack)
        if is_complete:
            walk.note_gone([*walk.known, *walk.unstated])
        if not (walk.read or walk.gone or recipe != base.manifest.recipe):
            return _result(walk, base.manifest)
        stack.enter_context(locked(base.directory, given.wait_s))
        store = base
        if read_manifest(base.directory) != base.manifest:
            store = stack.enter_context(given.open())
            _check_moved(base, store, walk)
        if new.staged and not is_there(new.staged):
            raise _Moved
        entries = without(store, walk.read | walk.gone)
        return _result(walk, put(store, entries, new, recipe, given.files, given.progress))


def _check_moved(base: Datastore, store: Datastore, walk: Rereading) -> None:
    """Raise _Moved if another writer changed the recipe or one of the files that were read or are gone."""
    names = walk.read | walk.gone
    if store.manifest.recipe != base.manifest.recipe or live_states(base, names) != live_states(store, names):
        raise _Moved


def _collected(
    given: _Given, base: Datastore, walk: Rereading, texts: Iterator[Text], stack: contextlib.ExitStack
) -> _New:
    """Tokenize texts. More than SMALL_SEGMENT tokens go to a staging directory, which `stack` deletes."""
    documents = _tokenized(walk, texts, given)
    few: list[Document] = []
    size = 0
    for document in documents:
        few.append(document)
        size += len(document.tokens) + 1
        if size > SMALL_SEGMENT:
            place = stack.enter_context(staging(base.directory, given.files))
            every = chain(few, documents)
            identity = base.manifest.vocabulary
            staged = write_segments(place, every, vocabulary=identity, progress=given.progress, files=given.files)
            return _New([], staged)
    return _New(few)


def _tokenized(walk: Rereading, texts: Iterator[Text], given: _Given) -> Iterator[Document]:
    for document in tokenize_documents(walk.new_texts(texts), given.vocabulary):
        given.progress("tokenized", len(document.tokens))
        walk.tokens += len(document.tokens)
        yield document


def put(
    store: Datastore,
    entries: Entries,
    new: _New,
    recipe: Mapping[str, Any],
    files: Files,
    progress: Progress | None = None,
) -> Manifest:
    """Commit, under the lock: what is left of the segments of `store`, and new documents. If some are in memory, the
    new segment takes up all small ones.
    """
    keep: list[SegmentEntry] = []
    documents: list[Document] = []
    small = [i for i, entry in enumerate(entries) if new.documents and entry and entry.tokens <= SMALL_SEGMENT]
    store.check([store.manifest.segments[index] for index in small])  # damage must not get a new, valid checksum
    for index, entry in enumerate(entries):
        if index in small:
            documents += store.each_document(index, entry)
        elif entry:
            keep.append(entry)
    documents += new.documents
    if not (keep or documents or new.staged):
        raise CorpusEmpty(", ".join(source.about() for source in from_recipe(recipe)), "no file is left")
    return commit(
        store.directory,
        documents,
        vocabulary=store.manifest.vocabulary,
        recipe=dict(recipe),
        keep=tuple(keep),
        staged=new.staged,
        progress=progress,
        files=files,
    )
