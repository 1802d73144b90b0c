"""Builds an index of the files of a walk, shard by shard, and commits it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from rest_local.cluster import connected
from rest_local.errors import CorpusEmpty, DatastoreExists
from rest_local.retrieval.building.build import check_ours, commit
from rest_local.retrieval.building.cluster import Cluster
from rest_local.retrieval.building.shards import Plan, plan
from rest_local.retrieval.building.staged import delete
from rest_local.retrieval.building.staging import Shard, build_shard, finished, moved, staged
from rest_local.retrieval.building.tokenizing import DocumentTokenizer, opener_of
from rest_local.retrieval.building.workers import build_shards
from rest_local.retrieval.building.writing import Progress
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import MANIFEST, Manifest, VocabularyId
from rest_local.retrieval.home import writing
from rest_local.retrieval.sources.skipped import Skipped, joined
from rest_local.retrieval.sources.walk import Walk

SMALL_TEXT = 16 << 20  # bytes of text that one process has done before others have started
WALK = ("paths", "include", "exclude", "allow_secrets", "max_file_size")


def build_walk(
    path: Path,
    walk: Walk,
    vocabulary: DocumentTokenizer,
    recipe: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    replace: bool = True,
    memory: int | None = None,
    jobs: int = 1,
    cluster: Cluster | None = None,
    files: Files | None = None,
) -> tuple[Manifest, Skipped]:
    """Build the index of the datastore at `path` from a prepared walk: the commit, and the files that were skipped.

    Arguments and errors as for `indexing.build_datastore`; `recipe` is recorded as it is.
    """
    files, identity = files or Files(), VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
    share = (memory or default_memory()) // jobs
    with connected(cluster.address) if cluster else nullcontext(), ExitStack() as stack:
        made = plan(recipe_of_walk(walk), share, identity, cluster.slots(share) if cluster else jobs)
        directory = stack.enter_context(writing(path, vocabulary.hash, files))
        if not replace and (directory / MANIFEST).exists():
            raise DatastoreExists(path, vocabulary.name)
        check_ours(directory)
        with staged(directory, made, files) as (staging, made):
            shards = _build_shards(made, staging, vocabulary, jobs, cluster, progress, files)
            skipped = joined([made.skipped, *(shard.skipped for shard in shards)])
            segments = tuple(segment for shard in shards for segment in shard.segments)
            if not segments:
                delete(staging, files)
                raise CorpusEmpty(walk.about(), skipped.summary())
            with moved(staging, directory, segments, files):
                manifest = commit(directory, (), vocabulary=identity, recipe=recipe, keep=segments, files=files)
            delete(staging, files)
    return manifest, skipped


def recipe_of_walk(walk: Walk) -> dict[str, Any]:
    """What `shards.plan` takes of a walk, JSON-ready."""
    fields = {name: getattr(walk, name) for name in WALK}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _build_shards(
    made: Plan,
    staging: Path,
    vocabulary: DocumentTokenizer,
    jobs: int,
    cluster: Cluster | None,
    progress: Progress | None,
    files: Files,
) -> list[Shard]:
    """Build the shards of a plan that are not done, on a cluster, in this process or in several."""
    numbers = range(len(made.shards))
    left = [number for number in numbers if not finished(made, number, staging, check=True)]
    if progress:
        progress("read", made.bytes - sum(map(made.shard_bytes, left)))
    opener = opener_of(vocabulary)
    if cluster:
        cluster.build_shards(made, left, staging, vocabulary, progress, files)
    elif jobs > 1 and len(left) > 1 and opener and sum(map(made.shard_bytes, left)) >= SMALL_TEXT:
        build_shards(made, left, staging, opener, jobs, progress, files)
    else:
        for number in left:
            build_shard(made, number, staging, vocabulary, progress, files)
    shards = [finished(made, number, staging) for number in numbers]
    return [shard for shard in shards if shard]


def default_memory() -> int:
    """A quarter of the machine's memory, in bytes; 2 GB where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return 2 << 30
