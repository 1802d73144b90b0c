"""Measure the time of a lookup, warm and cold, and the speed of sorting a datastore.

The text is Python source of this machine, tokenized with the vocabulary of a model and continued with edited copies:
the paragraphs of a file in another order, and EDITED of their tokens replaced. Without a model it is synthetic. Queries
are contexts of 40 tokens from the datastore with one of the newest 33 replaced, so that matches have all lengths. Other
load disturbs all times. It disturbs `best` less: the median over queries of the shortest of PASSES times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.rows import Int32Array, Rows, order_of, pack, width_of

SYNTHETIC_SIZE = 32_000  # number of ids in the synthetic text
WALK = 5_000  # length of a synthetic document in tokens


def python_sources(vocabulary: Vocabulary, tokens: int) -> list[Int32Array]:
    """Tokenize the Python files of the interpreter and its packages, up to `tokens` tokens."""
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib"))
    texts = (path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py")))
    return list(up_to(filter(len, map(vocabulary.tokenize, texts)), tokens))


def synthetic(random: np.random.Generator) -> Iterator[Int32Array]:
    """Yield walks over a graph in which each of SYNTHETIC_SIZE tokens has 64 successors, chosen by Zipf's law."""
    successors = (random.zipf(1.2, (SYNTHETIC_SIZE, 64)) - 1) % SYNTHETIC_SIZE
    while True:
        walks = np.empty((WALK, 200), np.int32)
        at = random.integers(0, SYNTHETIC_SIZE, 200)
        for step in range(WALK):
            walks[step] = at
            at = successors[at, (random.zipf(1.5, 200) - 1) % 64]
        yield from np.ascontiguousarray(walks.T)


def up_to(documents: Iterable[Int32Array], tokens: int) -> Iterator[Int32Array]:
    """Yield documents of `tokens` tokens in all. The last one is cut."""
    for document in documents:
        yield document[:tokens]
        tokens -= len(document)
        if tokens <= 0:
            return


PASSES = 3
COLD_QUERIES = 100
FLUSHED = 40_000_000  # more bytes than a last-level cache has
_SORT_SAMPLE = 5_000_000
_OPENED = 5

Times = npt.NDArray[np.int64]


def measure(
    *,
    tokens: int = 20_000_000,
    queries: int = 2000,
    directory: Path | None = None,
    model: str | None = None,
    cold: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure the datastore in `directory`, or else a temporary one of so many tokens in the vocabulary of `model`.

    Times are in microseconds:

    - `lookup_us`, the headline: one `Datastore.rows` of 64 rows and 16 tokens, and their weighted trie
    - `first_lookup_us`: the same in the first pass over the queries
    - `flushed_lookup_us`: the same with the processor's caches flushed before each lookup, as after a forward pass
    - `rows_us`: only the rows
    - `cold`: with the files dropped from the page cache before each lookup
    """
    random = np.random.default_rng(seed)
    if directory is not None:
        return {"text": str(directory), **_measure_store(directory, queries, cold, random)}
    if model is None:
        vocabulary, source = VocabularyId("0" * 64, SYNTHETIC_SIZE, "synthetic"), "synthetic Zipf-Markov"
        stored = list(up_to(synthetic(random), tokens))
    else:
        from rest_local.llama.model import Model

        with Model.open(model, vocab_only=True) as opened:
            known = opened.vocabulary
            vocabulary = VocabularyId(known.hash, known.size, known.name)
            stored = python_sources(known, tokens)
        source = f"Python sources, vocabulary of {vocabulary.name}"
    text = np.concatenate(list(up_to(stored, _SORT_SAMPLE)))
    packed = pack(text, vocabulary.size)
    began = time.perf_counter()
    order_of(packed, width_of(vocabulary.size))
    report: dict[str, Any] = {"text": source, "sort_tokens_per_s": round(len(text) / (time.perf_counter() - began))}
    del text, packed
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one"
        began = time.perf_counter()
        named = (Document(f"{number}.py", each) for number, each in enumerate(stored))
        build(one, named, vocabulary=vocabulary, recipe={})
        report["build_s"] = round(time.perf_counter() - began, 1)
        del stored
        gc.collect()
        return {**report, **_measure_store(one, queries, cold, random)}


def _measure_store(path: Path, queries: int, cold: bool, random: np.random.Generator) -> dict[str, Any]:
    opened_ms = []
    for _ in range(_OPENED):
        began = time.perf_counter()
        with Datastore.open(path, mmap=True):
            opened_ms.append((time.perf_counter() - began) * 1e3)
    with Datastore.open(path, mmap=True) as store:
        contexts = _contexts(store, queries, random)
        first = _times(store, contexts, _trie)
        passes = [_times(store, contexts, _trie) for _ in range(PASSES)]
        best = float(np.median(np.min(passes, axis=0))) / 1000
        rows = _times(store, contexts, lambda rows: None)
        flushed = _times(store, contexts[:COLD_QUERIES], _trie, np.zeros(FLUSHED, np.uint8))
        info = store.info()
        report = {
            "tokens": len(store),
            "vocabulary": store.manifest.vocabulary.size,
            "width": width_of(store.manifest.vocabulary.size),
            "segments": info["segments"],
            "queries": queries,
            "open_ms": round(float(np.median(opened_ms)), 2),
            "lookup_us": {**_quantiles(np.concatenate(passes)), "best": round(best, 1)},
            "first_lookup_us": _quantiles(first),
            "flushed_lookup_us": _quantiles(flushed),
            "rows_us": _quantiles(rows),
            "bytes_per_token": round(info["bytes"] / info["tokens"], 3),
        }
        if cold:
            report["cold"] = _cold(store, contexts[:COLD_QUERIES])
    return report


def _cold(store: Datastore, contexts: Sequence[Int32Array]) -> dict[str, Any]:
    """Measure lookups that read everything from the disk. `disk_kb` shows what the system read for one."""
    import resource

    files = [store.directory / name for name in os.listdir(store.directory) if name.endswith(".bin")]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # the system drops neither dirty pages
        os.close(descriptor)
    times, read, faults = [], [], []
    for context in contexts:
        store.trim()  # nor mapped ones
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter_ns()
        _trie(store.rows(context))
        times.append(time.perf_counter_ns() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        read.append((after.ru_inblock - before.ru_inblock) / 2)
        faults.append(after.ru_majflt - before.ru_majflt)
    milliseconds = {name: round(value / 1000, 2) for name, value in _quantiles(np.array(times)).items()}
    return {"lookup_ms": milliseconds, "disk_kb": float(np.median(read)), "major_faults": float(np.median(faults))}


def _contexts(store: Datastore, queries: int, random: np.random.Generator) -> list[Int32Array]:
    """Cut contexts of 40 tokens from the datastore, each with a token replaced."""
    vocab_size = store.manifest.vocabulary.size
    ends = np.cumsum([len(segment) for segment in store.segments])
    contexts: list[Int32Array] = []
    while len(contexts) < queries:
        place = int(random.integers(ends[-1]))
        number = int(ends.searchsorted(place, "right"))
        segment = store.segments[number]
        at = min(place - int(ends[number]) + len(segment), max(len(segment) - 40, 0))
        context = segment.slice(at, min(at + 40, len(segment))).copy()
        context[context >= vocab_size] = 0
        context[-random.integers(2, min(33, len(context)) + 1)] = random.integers(0, vocab_size)
        contexts.append(context)
    return contexts


def _times(
    store: Datastore,
    contexts: Sequence[Int32Array],
    then: Callable[[Rows], object],
    flush: npt.NDArray[np.uint8] | None = None,
) -> Times:
    """Return the nanoseconds of each lookup with `then` on its rows. `flush` is written to before each."""
    times = []
    for context in contexts:
        if flush is not None:
            flush += 1
        began = time.perf_counter_ns()
        then(store.rows(context))
        times.append(time.perf_counter_ns() - began)
    return np.array(times)


def _trie(rows: Rows) -> tuple[Int32Array, npt.NDArray[np.intp]]:
    """Return the complete weighted trie of all rows: the sorted rows, in which a node is a run of rows and its weight
    the length of the run, and the number of tokens that each row shares with the previous one.
    """
    tokens = rows.continuations
    if len(tokens):
        tokens = tokens[tokens.view(f"V{4 * rows.depth}")[:, 0].argsort()]
    differ = np.ones((max(len(tokens) - 1, 0), rows.depth + 1), np.bool_)
    np.not_equal(tokens[1:], tokens[:-1], out=differ[:, :-1])
    return tokens, differ.argmax(axis=1)


def _quantiles(times: Times) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(times, q)) / 1000, 1) for q in (50, 99)}


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="size of the text")
    parser.add_argument("--queries", type=int, default=2000, help="number of contexts")
    parser.add_argument("--cold", action="store_true", help="also drop the files from the page cache each time")
    parser.add_argument("--model", metavar="GGUF", help="tokenize Python sources of this machine with this vocabulary")
    parser.add_argument("--directory", type=Path, help="measure this datastore instead of a new one")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
