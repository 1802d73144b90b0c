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
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rest_local.cluster import connected
from rest_local.errors import CorpusEmpty, DatastoreError
from rest_local.retrieval.building.build import SEGMENT_TOKENS, Progress, build, no_progress, segment_tokens_in
from rest_local.retrieval.building.cluster import Cluster
from rest_local.retrieval.documents import DocumentTokenizer, Text, counted, tokenize_documents
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import Manifest, VocabularyId
from rest_local.retrieval.home import datastore_path, newest_manifest
from rest_local.retrieval.sources.recipes import from_recipe
from rest_local.retrieval.sources.source import Reading, Skipped, Source
from rest_local.retrieval.sources.walk import MAX_FILE_SIZE, Walk


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
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> Built:
    """Build a datastore for a vocabulary from the text files below some paths.

    `retrieval.sources.walk.Walk` decides which files are taken. An existing index for this vocabulary is
    replaced; those for other vocabularies stay. After an error the existing datastore is intact.

    Args:
        name: the name of the datastore, or a path
        paths: files and directories
        vocabulary: a tokenizer, such as `Model.vocabulary`
        include: globs of the wanted files, instead of the usual extensions
        exclude: globs of unwanted files
        allow_secrets: take files that look like secrets, too
        max_file_size: larger files, in bytes, are skipped
        recipe: fields to record in addition to paths and filters
        progress: called with the bytes or tokens of each stage
        replace: False refuses to replace an index
        memory: bytes that the build may take, which limits the size of a segment; by default about 1.5 GB
        cluster: tasks of a Ray cluster tokenize in place of threads
        files: file operations; tests replace them

    Raises:
        InputInvalid: a path does not exist
        OptionError: a glob, the name or the memory is wrong
        CorpusEmpty: no file has text to index
        CorpusTooLarge: no segment can hold a file
        DatastoreLocked: another process writes
        DatastoreUnwritable: writing fails
        DatastoreExists: there is an index, and `replace` is False
        ClusterFailed: the cluster cannot be reached, or fails
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
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> Built:
    """Build a datastore as `build_datastore` does, from sources of any kind, in their order."""
    report, skipped, sources = progress or no_progress, Skipped(), [one.prepared() for one in sources]
    reading = Reading(skipped, looked_at=lambda size: report("read", size))
    texts = chain.from_iterable([source.texts(reading) for source in sources])
    try:
        return build_from_texts(
            name,
            texts,
            vocabulary=vocabulary,
            recipe={**recipe_of(sources), **(recipe or {})},
            progress=progress,
            skipped=skipped,
            replace=replace,
            memory=memory,
            cluster=cluster,
            files=files,
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
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> Built:
    """Build a datastore as `build_datastore` does, from texts or (document name, text) of any origin."""
    path, report = datastore_path(name), progress or no_progress
    most = SEGMENT_TOKENS if memory is None else segment_tokens_in(memory, vocabulary.size)
    with connected(cluster.address) if cluster else nullcontext():
        tokenized = cluster.documents(texts, vocabulary) if cluster else tokenize_documents(texts, vocabulary)
        manifest = build(
            path,
            counted(tokenized, report),
            vocabulary=VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name),
            recipe=recipe,
            progress=report,
            replace=replace,
            segment_tokens=most,
            files=files,
        )
    return Built(path, manifest, skipped or Skipped())


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
