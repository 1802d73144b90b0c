"""Build a datastore in one call: walk, tokenize in parallel, sort, commit, and record the recipe.

    with Model.open("model.gguf", vocab_only=True) as model:
        built = build_datastore("mycode", ["~/src/mycode"], vocabulary=model.vocabulary)
    print(built.tokens, "tokens,", built.skipped.summary())

Knows no model: it accepts any tokenizer with a name, a size and a hash. `updating` and `forgetting`
change what was built.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rest_local.cluster import connected
from rest_local.errors import CorpusEmpty, DatastoreError, DatastoreExists, OptionError
from rest_local.retrieval.building.build import SEGMENT_TOKENS, Progress, build, check_ours, commit, no_progress
from rest_local.retrieval.building.cluster import Cluster
from rest_local.retrieval.building.shards import (
    ShardPlan,
    build_shard,
    build_shards,
    finished,
    plan,
    segment_tokens,
    staged,
)
from rest_local.retrieval.documents import DocumentTokenizer, Text, counted, opener_of, tokenize_documents
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import MANIFEST, Manifest, VocabularyId
from rest_local.retrieval.home import datastore_path, newest_manifest
from rest_local.retrieval.sources.recipes import from_recipe
from rest_local.retrieval.sources.source import Reading, Skipped, Source
from rest_local.retrieval.sources.walk import MAX_FILE_SIZE, Walk
from rest_local.retrieval.staging import Staged, delete, writing


@dataclass(frozen=True)
class Built:
    """The result of a build: the path, the commit, and the files that the walk skipped."""

    path: Path
    manifest: Manifest
    skipped: Skipped

    @property
    def tokens(self) -> int:
        """Count the tokens, with one separator for each document."""
        return self.manifest.tokens

    @property
    def documents(self) -> int:
        return self.manifest.documents

    @property
    def bytes(self) -> int:
        """Return the size on disk without the manifest."""
        return self.manifest.size

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "tokens": self.tokens,
            "documents": self.documents,
            "segments": len(self.manifest.segments),
            "bytes": self.bytes,
            "skipped": dict(self.skipped.counts),
            "unwanted": dict(self.skipped.kinds),
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
    replace: bool = True,
    memory: int | None = None,
    jobs: int = 1,
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> Built:
    """Build the datastore `name` (or a path) for a vocabulary from the text files below `paths`.

    `retrieval.sources.walk.walk_files` decides which files are taken. An existing index for this vocabulary is
    replaced; those for other vocabularies stay. After an error the existing datastore is intact. If the process is
    killed, the next call with the same arguments goes on where it was.

    Args:
        vocabulary: a tokenizer, such as `Model.vocabulary`
        include: globs of the wanted files, instead of the usual extensions
        exclude: globs of unwanted files
        allow_secrets: take files that look like secrets, too
        max_file_size: larger files, in bytes, are skipped
        recipe: fields to record in addition to paths and filters
        progress: called with the bytes or tokens of each stage
        replace: False refuses to replace an index
        memory: bytes of all processes together, by default a quarter of the machine's
        jobs: processes, for large text and a vocabulary that another process can open. A script that asks for several
            needs the guard `if __name__ == "__main__"`, because they import it.
        cluster: tasks of a Ray cluster build in place of processes; each gets `memory` divided by `jobs`

    Raises:
        InputInvalid: a path does not exist
        OptionError: a glob, the name or the memory is wrong
        CorpusEmpty: no file has text to index
        CorpusTooLarge: no segment can hold a file
        DatastoreLocked: another process writes
        DatastoreUnwritable: writing fails
        DatastoreExists: there is an index, and `replace` is False
        ClusterFailed: the cluster cannot be reached, or has no room
    """
    walk = Walk(
        tuple(map(str, paths)),
        include=tuple(include),
        exclude=tuple(exclude),
        allow_secrets=allow_secrets,
        max_file_size=max_file_size,
    )
    return build_from_sources(
        name,
        [walk],
        vocabulary=vocabulary,
        recipe=recipe,
        progress=progress,
        replace=replace,
        memory=memory,
        jobs=jobs,
        cluster=cluster,
        files=files,
    )


def build_from_sources(
    name: str | os.PathLike[str],
    sources: Sequence[Source],
    *,
    vocabulary: DocumentTokenizer,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    replace: bool = True,
    memory: int | None = None,
    jobs: int = 1,
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> Built:
    """Build a datastore as `build_datastore` does, from sources of any kind, in their order.

    Args:
        jobs: counts for a single walk only; `memory` bounds the segments of other sources, too

    Raises:
        OptionError: a cluster cannot build anything but a single walk
    """
    report, memory, sources = progress or no_progress, memory or default_memory(), [one.prepared() for one in sources]
    recorded = {**recipe_of(sources), **(recipe or {})}
    if len(sources) == 1 and isinstance(walk := sources[0], Walk):
        files, identity, share = files or Files(), _identity(vocabulary), memory // jobs
        with connected(cluster.address) if cluster else nullcontext(), ExitStack() as stack:
            made = plan(walk, share, identity, cluster.slots(share) if cluster else jobs)
            directory = stack.enter_context(writing(path := datastore_path(name), vocabulary.hash, files))
            if not replace and (directory / MANIFEST).exists():
                raise DatastoreExists(path, vocabulary.name)
            check_ours(directory)
            place, made = stack.enter_context(staged(directory, made, files))
            _build_shards(made, place, vocabulary, jobs, cluster, report, files)
            shards = [done for number in range(len(made.shards)) if (done := finished(made, number, place))]
            skipped = Skipped()
            for part in (made.skipped, *(shard.skipped for shard in shards)):
                skipped.include(part)
            ready = Staged(place, tuple(segment for shard in shards for segment in shard.segments))
            if ready.segments:
                manifest = commit(directory, vocabulary=identity, recipe=recorded, staged=ready, files=files)
            delete(place, files)
            if not ready.segments:
                raise CorpusEmpty(walk.about(), skipped.summary())
        return Built(path, manifest, skipped)
    if cluster:
        raise OptionError("a cluster builds an index of files below paths alone; build the other sources without it")
    skipped = Skipped()
    reading = Reading(skipped, looked_at=lambda size: report("read", size))
    texts = chain.from_iterable([source.texts(reading) for source in sources])
    try:
        return build_from_texts(
            name,
            texts,
            vocabulary=vocabulary,
            recipe=recorded,
            progress=progress,
            skipped=skipped,
            replace=replace,
            memory=memory,
        )
    except CorpusEmpty as error:
        raise CorpusEmpty(", ".join(source.about() for source in sources), skipped.summary()) from error


def build_from_texts(
    name: str | os.PathLike[str],
    texts: Iterable[Text | tuple[str, str]],
    *,
    vocabulary: DocumentTokenizer,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    skipped: Skipped | None = None,
    replace: bool = True,
    memory: int | None = None,
) -> Built:
    """Build a datastore in one process as `build_datastore` does, from texts or (document name, text) of any origin."""
    path, report, identity = datastore_path(name), progress or no_progress, _identity(vocabulary)
    documents = counted(tokenize_documents(texts, vocabulary), report)
    most = min(SEGMENT_TOKENS, segment_tokens(memory or default_memory(), vocabulary.size))
    manifest = build(
        path, documents, vocabulary=identity, recipe=recipe, progress=report, replace=replace, segment_tokens=most
    )
    return Built(path, manifest, skipped or Skipped())


def rebuild_datastore(
    name: str | os.PathLike[str],
    *,
    vocabulary: DocumentTokenizer,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    replace: bool = True,
) -> Built:
    """Build a datastore for a vocabulary from the sources that its newest index was built from.

    Args:
        vocabulary: a tokenizer, such as `Model.vocabulary`
        recipe: fields to record in addition to the sources
        progress: called with the bytes or tokens of each stage
        replace: False refuses to replace an index

    Raises:
        DatastoreNotFound: there is no datastore of this name
        DatastoreError: its text cannot be read again, or any error of `build_datastore`
        OptionError: this version does not know a source
    """
    sources = recorded_sources(datastore_path(name))
    return build_from_sources(name, sources, vocabulary=vocabulary, recipe=recipe, progress=progress, replace=replace)


def recorded_sources(path: Path) -> list[Source]:
    """Return the sources that the newest index of a datastore was built from. Raises DatastoreNotFound,
    DatastoreCorrupt, DatastoreVersion, OptionError for a source that this version does not know, and DatastoreError for
    text that is of another origin or cannot be read again.
    """
    sources = from_recipe(newest_manifest(path).recipe)
    if not sources:
        raise DatastoreError(f"datastore {path}: it was not built from files, so nothing says how to build it again")
    for source in sources:
        if not source.repeatable:
            raise DatastoreError(
                f"datastore {path}: it was built from {source.about()}, which cannot be read again; build it anew"
            )
    return sources


def recipe_of(sources: Sequence[Source]) -> dict[str, Any]:
    return {"sources": [source.to_dict() for source in sources]}


SMALL_TEXT = 16 << 20  # one process has tokenized so many bytes before others have started


def _identity(vocabulary: DocumentTokenizer) -> VocabularyId:
    return VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)


def _build_shards(
    made: ShardPlan,
    staging: Path,
    vocabulary: DocumentTokenizer,
    jobs: int,
    cluster: Cluster | None,
    progress: Progress,
    files: Files,
) -> None:
    """Build the shards of a plan that are not done, on a cluster, in this process or in several."""
    left = [number for number in range(len(made.shards)) if not finished(made, number, staging, check=True)]
    progress("read", made.bytes - sum(map(made.shard_bytes, left)))
    opener = opener_of(vocabulary)
    if cluster:
        cluster.build_shards(made, left, staging, vocabulary, progress, files)
    elif jobs > 1 and len(left) > 1 and opener and sum(map(made.shard_bytes, left)) >= SMALL_TEXT:
        build_shards(made, left, staging, opener, jobs, progress, files)
    else:
        for number in left:
            build_shard(made, number, staging, vocabulary, progress, files)


def default_memory() -> int:
    """Return a quarter of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
