"""Builds a datastore in one call: walk, tokenize in parallel, sort, commit, and record the recipe.

    with Model.open("model.gguf", vocab_only=True) as model:
        built = build_datastore("mycode", ["~/src/mycode"], vocabulary=model.vocabulary)
    print(built.tokens, "tokens,", built.skipped.summary())

Knows no model: it accepts any tokenizer with a name, a size and a hash.

`add` and `forget` change a datastore, with one atomic commit each. Open readers are not disturbed. A document is
identified by its name: a new document replaces one of the same name. Segments that do not change stay, except small
ones at the end, which are merged into the new segment, so that many small additions do not leave many segments. When
`forget` returns, no file of the datastore contains the removed text.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rest_local.errors import CorpusEmpty, DatastoreNotFound, OptionError
from rest_local.retrieval.build import Progress, build, commit
from rest_local.retrieval.corpus import MAX_FILE_SIZE, Skipped, walk
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import Manifest, SegmentEntry, VocabularyId
from rest_local.retrieval.history import MERGE, SMALL_SEGMENT, WAIT_S
from rest_local.retrieval.home import datastore_path, holds_files, remove_locked
from rest_local.retrieval.rows import Int32Array

_SURROGATES = re.compile("[\ud800-\udfff]")

Tokenize = Callable[[str], Int32Array]


class DocumentTokenizer(Protocol):
    """A vocabulary. `tokenize` is called from several threads at once."""

    @property
    def hash(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def tokenize(self, text: str) -> Int32Array: ...


@dataclass(frozen=True)
class Built:
    """The result of a build: the path, the commit, and the files that the walk skipped."""

    path: Path
    manifest: Manifest
    skipped: Skipped

    @property
    def tokens(self) -> int:
        """Including one separator for each document."""
        return sum(segment.tokens for segment in self.manifest.segments)

    @property
    def documents(self) -> int:
        return sum(segment.documents for segment in self.manifest.segments)

    @property
    def bytes(self) -> int:
        """On disk, without the manifest."""
        return sum(file.size for segment in self.manifest.segments for file in segment.files.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "path": str(self.path),
            "tokens": self.tokens,
            "documents": self.documents,
            "segments": len(self.manifest.segments),
            "bytes": self.bytes,
            "skipped": dict(self.skipped.counts),
            "secrets": self.skipped.secrets,
        }


def build_datastore(
    name: str | os.PathLike[str],
    paths: Sequence[str | os.PathLike[str]],
    *,
    vocabulary: DocumentTokenizer,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build the datastore `name` (or a path) from the text files below `paths`. It replaces an existing one.

    `rest_local.retrieval.corpus.walk` decides which files are taken. `recipe`: fields to record in addition to paths
    and filters. Memory does not depend on the size of the corpus. The tokenizer takes most of the time.

    Raises InputInvalid (no such path), OptionError (bad glob or name), CorpusEmpty, CorpusTooLarge, DatastoreLocked,
    DatastoreUnwritable. After an error the existing datastore is intact.
    """
    skipped, given = Skipped(), [str(Path(path).expanduser().absolute()) for path in paths]
    files = walk(given, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size, skipped=skipped)
    noted = recipe_of(given, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size)
    try:
        return build_from_texts(
            name, files, vocabulary=vocabulary, recipe={**noted, **(recipe or {})}, progress=progress, skipped=skipped
        )
    except CorpusEmpty as error:
        raise CorpusEmpty(", ".join(str(path) for path in paths), skipped.summary()) from error


def build_from_texts(
    name: str | os.PathLike[str],
    texts: Iterable[tuple[str, str]],
    *,
    vocabulary: DocumentTokenizer,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    skipped: Skipped | None = None,
) -> Built:
    """As `build_datastore`, from (document name, text) of any origin."""
    path, report = datastore_path(name), progress or (lambda what, tokens: None)
    documents = _counted(tokenize_documents(texts, vocabulary.tokenize), report)
    identity = VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
    manifest = build(path, documents, vocabulary=identity, recipe=recipe, progress=report)
    return Built(path, manifest, skipped or Skipped())


def recipe_of(
    paths: Sequence[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
) -> dict[str, Any]:
    """The recipe of a walk for the manifest."""
    return {
        "paths": list(paths),
        "include": list(include),
        "exclude": list(exclude),
        "allow_secrets": allow_secrets,
        "max_file_size": max_file_size,
    }


def _counted(documents: Iterator[tuple[str, Int32Array]], progress: Progress) -> Iterator[tuple[str, Int32Array]]:
    for name, tokens in documents:
        progress("tokenized", len(tokens))
        yield name, tokens


def tokenize_documents(
    documents: Iterable[tuple[str, str]], tokenize: Tokenize, workers: int | None = None
) -> Iterator[tuple[str, Int32Array]]:
    """(name, token ids) of each (name, text), in order.

    Works in threads, because a tokenizer that is called through ctypes does not hold the GIL. workers: by default one
    for each core. At most four documents for each worker are in memory, whatever the size of the corpus.
    """
    workers = workers or os.cpu_count() or 1
    waiting: deque[tuple[str, Future[Int32Array]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    try:
        for name, text in documents:
            waiting.append((name, pool.submit(_tokens, tokenize, text)))
            if len(waiting) >= 4 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tokens(tokenize: Tokenize, text: str) -> Int32Array:
    """The tokens of a text. Lone surrogates, which JSON or file names may contain, become U+FFFD, because UTF-8 cannot
    encode them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        text = _SURROGATES.sub("\ufffd", text)
    return tokenize(text)


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
    """Add documents, each a name and token ids. Creates the datastore if it does not exist.

    `recipe`: of a new datastore; `wait_s`: for the lock; `mmap`: as for `Datastore.open`, False reads all of it. Raises
    DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary, DatastoreLocked, DatastoreUnwritable, and CorpusEmpty
    without any token. After an error the existing datastore is intact.
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
    """Remove the documents with these names. Returns their number.

    A datastore is never empty: if no document would be left, it is deleted with `whole`, and otherwise OptionError is
    raised. `mmap`: as for `add`. Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion, DatastoreLocked,
    DatastoreUnwritable.
    """
    if not holds_files(path):
        raise DatastoreNotFound(path)  # there is no directory to lock
    with locked(path, wait_s), Datastore.open(path, mmap=mmap) as store:
        held = store.document_names()
        count = sum(name in names for name in held)
        if count == 0:
            return 0
        if count == len(held) and whole:
            remove_locked(path, files)
            return count
        if count == len(held):
            raise OptionError(
                f"datastore {path}: no document would be left; `rest-local index remove` deletes the datastore"
            )
        keep, kept = _divided(store, names, 0)
        manifest = store.manifest
        commit(path, kept, vocabulary=manifest.vocabulary, recipe=manifest.recipe, keep=keep, files=files)
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
