"""The time of a lookup, the memory of an open datastore, and the speed of sorting one.

    python -m benchmarks.lookup [--tokens N] [--queries N] [--model GGUF] [--json]

The text is Python source of the running interpreter, tokenized with the vocabulary of `--model`. If there is too little
of it, it is repeated with shuffled paragraphs. Without a model it is a synthetic stream, in which each token is drawn
by Zipf's law from the successors of the previous one. The result names the text. Queries are contexts of 40 tokens from
the text with one of the newest 33 tokens replaced, so that matches have all lengths.
"""

from __future__ import annotations

import argparse
import gc
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.drafting.candidates import SOURCE_NUMBER, SourceRows
from rest_local.drafting.drafter import draft
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.retrieval import tokenize_documents
from rest_local.retrieval.build import build
from rest_local.retrieval.corpus import walk
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.rows import Int32Array, Rows, order_of, pack, width_of

DOCUMENT = 5_000
_SYNTHETIC_SIZE = 32_000
_SORT_SAMPLE = 5_000_000
COLD_QUERIES = 300
FLUSHED = 40_000_000  # bytes: more than a last-level cache


def run(tokens: int = 20_000_000, queries: int = 2000, seed: int = 0, model: str | None = None) -> dict[str, Any]:
    """Build a datastore of `tokens` tokens in a temporary directory and measure it.

    Times in microseconds:

    - `lookup_us`, the headline: one `Datastore.rows` of 64 rows and 16 tokens, and their weighted trie
    - `first_lookup_us`: the same in the first pass over the queries
    - `cold_lookup_us`: the same with the processor's caches flushed before each lookup, as after a forward pass
    - `rows_us`: only the rows
    - `draft_us`: the rows and a tree of up to 16 nodes grown from them, which visits only a part of the trie

    Memory in MB:

    - `open_rss_mb`: after opening
    - `used_rss_mb`: after all queries, including mapped pages, which the system may reclaim at any time
    - `trimmed_rss_mb`: after `Datastore.trim`
    - `own_rss_mb`: the part of `used_rss_mb` that is no mapped file
    """
    random = np.random.default_rng(seed)
    text, vocabulary, source = _text(tokens, random, model)
    sort = _sort_speed(text[:_SORT_SAMPLE], vocabulary.size)
    contexts = _contexts(text, queries, vocabulary.size, random)
    documents = ((str(at), text[at : at + DOCUMENT]) for at in range(0, len(text), DOCUMENT))
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        build(Path(directory) / "store", documents, vocabulary=vocabulary, recipe={})
        built = time.perf_counter() - began
        length = len(text)
        del text, documents
        gc.collect()
        before, before_own = _resident()
        with Datastore.open(Path(directory) / "store") as store:
            opened, _ = _resident()
            first, rows, lookup = (_times(store, contexts, then) for then in (_trie, _nothing, _trie))
            draft = _times(store, contexts, _drafted())
            used, used_own = _resident()
            cold = _times(store, contexts[:COLD_QUERIES], _trie, np.zeros(FLUSHED, np.uint8))
            store.trim()
            trimmed, _ = _resident()
            info = store.info()
    return {
        "text": source,
        "tokens": length,
        "vocabulary": vocabulary.size,
        "width": width_of(vocabulary.size),
        "segments": info["segments"],
        "queries": queries,
        "lookup_us": _quantiles(lookup),
        "first_lookup_us": _quantiles(first),
        "cold_lookup_us": _quantiles(cold),
        "rows_us": _quantiles(rows),
        "draft_us": _quantiles(draft),
        "open_rss_mb": round(opened - before, 1),
        "used_rss_mb": round(used - before, 1),
        "trimmed_rss_mb": round(trimmed - before, 1),
        "own_rss_mb": round(used_own - before_own, 1),
        "bytes_per_token": round(info["bytes"] / info["tokens"], 3),
        "build_s": round(built, 1),
        "sort_tokens_per_s": round(sort),
    }


def _text(tokens: int, random: np.random.Generator, model: str | None) -> tuple[Int32Array, VocabularyId, str]:
    if model is None:
        return _synthetic(tokens, random), VocabularyId("0" * 64, _SYNTHETIC_SIZE, "synthetic"), "synthetic Zipf-Markov"
    from rest_local.llama.model import Model

    with Model.open(model, vocab_only=True) as opened:
        vocabulary = opened.vocabulary
        identity = VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
        parts, total = [], 0
        for part in _forever(random):
            (_, ids, _), *_ = tokenize_documents([("", part)], vocabulary.tokenize, 1)
            parts.append(ids)
            total += len(ids)
            if total >= tokens:
                break
    return np.concatenate(parts)[:tokens], identity, f"Python sources, vocabulary of {vocabulary.name}"


def _forever(random: np.random.Generator) -> Iterator[str]:
    """The interpreter's own sources and packages, then the same with shuffled paragraphs, without end."""
    sources = []
    for _, text in walk([sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]], ["*.py"]):
        sources.append(text)
        yield text
    while True:
        for text in sources:
            paragraphs = text.split("\n\n")
            random.shuffle(paragraphs)
            yield "\n\n".join(paragraphs)


def _synthetic(tokens: int, random: np.random.Generator) -> Int32Array:
    """Random walks over a graph in which each token has 64 successors, chosen by Zipf's law."""
    walkers = 2_000
    successors = (random.zipf(1.2, (_SYNTHETIC_SIZE, 64)) - 1) % _SYNTHETIC_SIZE
    steps = -(-tokens // walkers)
    text = np.empty((walkers, steps), np.int32)
    at = random.integers(0, _SYNTHETIC_SIZE, walkers)
    for step in range(steps):
        text[:, step] = at
        at = successors[at, (random.zipf(1.5, walkers) - 1) % 64]
    return text.reshape(-1)[:tokens]


def _contexts(text: Int32Array, queries: int, vocab_size: int, random: np.random.Generator) -> list[Int32Array]:
    contexts = []
    for at in random.integers(0, max(len(text) - 40, 1), queries):
        context = text[at : at + 40].copy()
        context[-random.integers(2, min(33, len(context)) + 1)] = random.integers(0, vocab_size)
        contexts.append(context)
    return contexts


def _sort_speed(text: Int32Array, vocab_size: int) -> float:
    packed = pack(text, vocab_size)
    began = time.perf_counter()
    order_of(packed, width_of(vocab_size))
    return len(text) / (time.perf_counter() - began)


def _times(
    store: Datastore,
    contexts: list[Int32Array],
    then: Callable[[Rows], object],
    flush: npt.NDArray[np.uint8] | None = None,
) -> Int32Array:
    """Nanoseconds of each lookup with `then` on its rows; `flush` is written to before each."""
    times = []
    for context in contexts:
        if flush is not None:
            flush += 1
        began = time.perf_counter_ns()
        then(store.rows(context))
        times.append(time.perf_counter_ns() - began)
    return np.array(times, np.int32)


def _nothing(rows: Rows) -> None:
    """Do nothing with the rows."""


def _trie(rows: Rows) -> tuple[Int32Array, npt.NDArray[np.intp]]:
    """The complete weighted trie of all rows: the sorted rows, in which a node is a run of rows and its weight the
    length of the run, and the number of tokens that each row shares with the previous one.
    """
    tokens = rows.continuations
    if len(tokens):
        tokens = tokens[tokens.view(f"V{4 * rows.depth}")[:, 0].argsort()]
    differ = np.ones((max(len(tokens) - 1, 0), rows.depth + 1), np.bool_)
    np.not_equal(tokens[1:], tokens[:-1], out=differ[:, :-1])
    return tokens, differ.argmax(axis=1)


def _drafted() -> Callable[[Rows], object]:
    estimate, calibrate = Acceptance().estimate, TokenCalibrator().calibrate
    source = SOURCE_NUMBER["datastore"]
    return lambda rows: draft(
        [SourceRows(source, rows)], estimate, lambda _: True, limit=16, leaves=8, calibrate=calibrate
    )


def _quantiles(times: Int32Array) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(times, q)) / 1000, 1) for q in (50, 99)}


def _resident() -> tuple[float, float]:
    """(resident memory, the part of it that is no mapped file) of this process, MB."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "RssFile"):
            fields[key] = int(value.split()[0]) / 1000
    return fields["VmRSS"], fields["VmRSS"] - fields.get("RssFile", 0.0)


def main() -> None:
    """The command line of this module: prints a table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    options = parser.parse_args()
    result = run(options.tokens, options.queries, options.seed, options.model)
    if not options.json:
        for key, value in result.items():
            print(f"{key:<20} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
