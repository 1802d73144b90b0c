"""Measures a build from files to a committed index, its stages, and what tokenizing text by text would take."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.errors import CorpusEmpty
from rest_local.llama.model import VocabularyOpener
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.building.shards import plan
from rest_local.retrieval.building.tokenizing import tokenize_documents
from rest_local.retrieval.building.walking import default_memory, recipe_of_walk
from rest_local.retrieval.building.writing import GrowingSegment, write_file
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.sources.corpus import Filters, read_files
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.walk import Walk

SAMPLE_BYTES = 32 << 20
PLAIN_TEXTS = 200


def bench_build(model: str | Path, paths: Sequence[str], memory: int | None, jobs: int | None) -> dict[str, Any]:
    """Build an index of `paths` in a temporary directory and report it, JSON-ready.

    `end_to_end`: wall clock and CPU of all processes, tokens/s, peak resident bytes of the largest process. `stages`:
    CPU seconds and shares on one core for the first SAMPLE_BYTES of the text. `one_text_at_a_time`: the same texts
    tokenized by `Vocabulary.tokenize` on one core, and whether the ids are the same. Raises as `build_datastore`.
    """
    with VocabularyOpener(Path(model))() as vocabulary, tempfile.TemporaryDirectory() as directory:
        jobs = jobs or os.cpu_count() or 1
        report = {"vocabulary": vocabulary.name, "jobs": jobs}
        report["end_to_end"] = _end_to_end(Path(directory) / "built", paths, vocabulary, memory, jobs)
        return {**report, **_stages(Path(directory), paths, vocabulary)}


def _end_to_end(
    path: Path, paths: Sequence[str], vocabulary: Vocabulary, memory: int | None, jobs: int
) -> dict[str, Any]:
    began, spent = time.perf_counter(), _cpu_seconds()
    built = build_datastore(path, paths, vocabulary=vocabulary, memory=memory, jobs=jobs)
    wall, spent = time.perf_counter() - began, _cpu_seconds() - spent
    return {
        "tokens": built.tokens,
        "documents": built.documents,
        "segments": len(built.manifest.segments),
        "seconds": round(wall, 3),
        "cpu_seconds": round(spent, 3),
        "tokens_per_second": round(built.tokens / wall),
        "tokens_per_cpu_second": round(built.tokens / spent),
        "peak_bytes": _peak_bytes(),
    }


def _stages(directory: Path, paths: Sequence[str], vocabulary: Vocabulary) -> dict[str, Any]:
    spent: dict[str, float] = {}
    identity = VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
    with _clock(spent, "list"):
        made = plan(recipe_of_walk(Walk(tuple(paths)).prepared()), default_memory(), identity)
    with _clock(spent, "read"):
        texts = list(_first(read_files((file.path for shard in made.shards for file in shard), Filters(), Skipped())))
    with _clock(spent, "tokenize"):
        documents = list(tokenize_documents(texts, vocabulary))
    growing = GrowingSegment(vocabulary.size)
    with _clock(spent, "pack and sort"):
        for document in documents:
            if len(document.tokens):
                growing.add(*document)
        if not growing.tokens:
            raise CorpusEmpty(", ".join(map(str, paths)), made.skipped.summary())
        content = growing.content()
    with _clock(spent, "write and hash"):
        for kind, data in content.files.items():
            write_file(Files(), directory / kind, data)
    share = content.tokens / sum(spent.values())
    stages = {
        name: {"seconds": round(seconds, 3), "share": round(seconds / sum(spent.values()), 3)}
        for name, seconds in spent.items()
    }
    plain = _plain(texts, [document.tokens for document in documents], vocabulary)
    return {
        "sample_tokens": content.tokens,
        "tokens_per_cpu_second": round(share),
        "stages": stages,
        "one_text_at_a_time": plain,
    }


def _first(texts: Iterator[Any]) -> Iterator[Any]:
    size = 0
    for text in texts:
        yield text
        size += len(text.text)
        if size > SAMPLE_BYTES:
            return


def _plain(texts: Sequence[Any], ids: Sequence[Int32Array], vocabulary: Vocabulary) -> Mapping[str, Any]:
    step = max(len(texts) // PLAIN_TEXTS, 1)
    chosen = list(itertools.islice(zip(texts, ids, strict=True), 0, None, step))
    began = time.process_time()
    plain = [vocabulary.tokenize(text.text) for text, _ in chosen]
    seconds = time.process_time() - began
    same = all(np.array_equal(a, b) for a, (_, b) in zip(plain, chosen, strict=True))
    tokens = sum(map(len, plain))
    return {"texts": len(chosen), "tokens_per_cpu_second": round(tokens / max(seconds, 1e-9)), "same_ids": same}


@contextmanager
def _clock(spent: dict[str, float], stage: str, now: Callable[[], float] = time.process_time) -> Iterator[None]:
    began = now()
    yield
    spent[stage] = now() - began


def _cpu_seconds() -> float:
    """Of this process and its children that ended."""
    return sum(os.times()[:4])


def _peak_bytes() -> int | None:
    """Resident memory of the largest process so far; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most if sys.platform == "darwin" else most << 10
