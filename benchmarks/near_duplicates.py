"""What storing near-identical documents once would save, and what it would cost.

    python -m benchmarks.near_duplicates -m GGUF [--text PATH]... [--git REPO] [FILE...] [--limit N] [--json]

The documents are text files, and with `--git` the versions of the files that the history of a repository changed. A
document counts as a near-duplicate if an earlier one that stays has a Jaccard similarity of at least the threshold over
shingles of 8 tokens. Candidates are found by MinHash in one permutation (128 bins, 64 bands of 2), which finds a pair
of similarity 0.8 with near certainty, and compared exactly. For each threshold the report has the share of the
tokens in near-duplicates, the bytes that leaving them out saves, and the CPU time of the search next to that of the
sort. With recorded answers (`FILE`; with `--git`, the newest 10 changes, whose versions are not among the documents)
it also has the accepted tokens a pass and the speed-up by replay, without a prompt for `--git`, and those of a
datastore that `index prune` made as small.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.bench import workload
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.replay import replay
from rest_local.calibration.curves import load_curve
from rest_local.drafting.sources import Sources
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.policies import make_policy
from rest_local.retrieval import tokenize_documents
from rest_local.retrieval.changing.pruning import Target, choose
from rest_local.retrieval.rows import Int32Array, width_of
from rest_local.retrieval.segment import Segment
from rest_local.retrieval.sources.corpus import walk

SHINGLE = 8
BINS, BAND = 128, 2
THRESHOLDS = (1.0, 0.95, 0.9, 0.8)
CURVE = "rtx3090-8b-q4_0"
TESTED_EDITS = 10
VERSIONS = 3000  # at most, the newest

Shingles = npt.NDArray[np.uint64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def shingles(tokens: Int32Array) -> Shingles:
    """The distinct hashes of all windows of SHINGLE tokens, ascending; of a shorter document, one of the whole."""
    window = min(SHINGLE, len(tokens))
    count = len(tokens) - window + 1
    hashes = np.full(count, window, np.uint64)
    for start in range(window):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTOR + tokens[start : start + count].astype(np.uint64)
    return np.unique((hashes ^ (hashes >> np.uint64(32))) * _FACTOR)


def signature(found: Shingles) -> Shingles:
    """The least hash of each of BINS equal ranges of hashes; an empty one has that of the next range."""
    least = np.full(BINS, np.iinfo(np.uint64).max, np.uint64)
    bins = (found >> np.uint64(64 - BINS.bit_length() + 1)).astype(np.int64)
    held, first = np.unique(bins, return_index=True)
    least[held] = found[first]  # ascending, so the first of a range is its least
    empty = np.setdiff1d(np.arange(BINS), held)
    least[empty] = found[first[np.searchsorted(held, empty) % len(held)]]
    return least


def jaccard(one: Shingles, other: Shingles) -> float:
    same = len(np.intersect1d(one, other, assume_unique=True))
    return same / (len(one) + len(other) - same)


def near_duplicates(found: Sequence[Shingles], thresholds: Sequence[float]) -> dict[float, list[int]]:
    """By threshold, the numbers of the documents that have a similar one before them that stays."""
    bands = [[band.tobytes() for band in signature(one).reshape(-1, BAND)] for one in found]
    similarities: dict[tuple[int, int], float] = {}
    dropped: dict[float, list[int]] = {}
    for threshold in thresholds:
        kept: dict[tuple[int, bytes], list[int]] = {}
        dropped[threshold] = []
        for number in range(len(found)):
            keys = list(enumerate(bands[number]))
            candidates = {other for key in keys for other in kept.get(key, ())}
            if any(_similar(number, other, found, similarities) >= threshold for other in sorted(candidates)):
                dropped[threshold].append(number)
                continue
            for key in keys:
                kept.setdefault(key, []).append(number)
    return dropped


def _similar(number: int, other: int, found: Sequence[Shingles], known: dict[tuple[int, int], float]) -> float:
    if (number, other) not in known:
        sizes = len(found[number]), len(found[other])
        least = min(sizes) / max(sizes)  # no similarity is above this
        known[number, other] = least if least < min(THRESHOLDS) else jaccard(found[number], found[other])
    return known[number, other]


def study(documents: Sequence[Int32Array], vocab_size: int, tested: Sequence[Recorded]) -> dict[str, Any]:
    """The report, JSON-ready."""
    begun = time.process_time()
    found = [shingles(tokens) for tokens in documents]
    dropped = near_duplicates(found, THRESHOLDS)
    search_s = time.process_time() - begun
    begun = time.process_time()
    whole = Segment.of(documents, vocab_size)
    report: dict[str, Any] = {
        "documents": len(documents),
        "tokens": len(whole),
        "search_s": round(search_s, 2),
        "sort_s": round(time.process_time() - begun, 2),
        "whole": _replayed(whole, vocab_size, tested),
        "thresholds": {},
    }
    for threshold, numbers in dropped.items():
        without = set(numbers)
        left = [tokens for number, tokens in enumerate(documents) if number not in without]
        tokens = sum(len(documents[number]) + 1 for number in numbers)
        report["thresholds"][str(threshold)] = {
            "documents": len(numbers),
            "share": round(tokens / len(whole), 4),
            "saved_bytes": tokens * (4 + width_of(vocab_size)),
            **_replayed(Segment.of(left, vocab_size) if tested else None, vocab_size, tested),
            "pruned": _pruned(documents, vocab_size, tested, len(whole) - tokens) if tested else {},
        }
    return report


def _pruned(
    documents: Sequence[Int32Array], vocab_size: int, tested: Sequence[Recorded], left: int
) -> dict[str, float]:
    """The replay with a pruned datastore of `left` tokens."""
    sizes = [len(tokens) + 1 for tokens in documents]
    kept = choose(sizes, documents.__getitem__, Target(size=left), sum(sizes)).tolist()
    segment = Segment.of([documents[number] for number in kept], vocab_size)
    return {"tokens": len(segment), **_replayed(segment, vocab_size, tested)}


def _replayed(segment: Segment | None, vocab_size: int, tested: Sequence[Recorded]) -> dict[str, float]:
    if not tested or segment is None:
        return {}
    stores: Any = [segment]
    tally = replay(
        tested, partial(Sources, stores, vocab_size), make_policy("auto", load_curve(CURVE)), load_curve(CURVE)
    )
    return {"mat": round(tally.tokens / max(tally.steps, 1), 4), "speedup": round(tally.speedup, 4)}


def versions(repository: Path, after: int) -> Iterator[tuple[str, str]]:
    """(path, text) of the file versions that the history made, the newest first, without the newest `after` changes."""
    seen: set[str] = set()
    with workload._Blobs(repository) as blobs:
        for number, edit in enumerate(workload._edits(repository)):
            if number < after or len(seen) >= VERSIONS:
                continue
            for blob in (edit.new, edit.old):
                text = None if blob in seen else blobs.text(blob)
                seen.add(blob)
                if text is not None:
                    yield edit.path, text


def _tested(options: argparse.Namespace, vocabulary: Vocabulary) -> list[Recorded]:
    if options.git:
        edits = workload.load_edits(options.git, vocabulary, TESTED_EDITS)
        return [replace(edit, prompt=edit.prompt[-1:]) for edit in edits]
    return [answer for path in options.files for answer in load(path, vocabulary)][: options.limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--text", action="append", default=[], metavar="PATH")
    parser.add_argument("--git", type=Path, metavar="REPO")
    parser.add_argument("--limit", type=int, metavar="N")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with Model.open(options.model, vocab_only=True) as model:
        vocabulary = model.vocabulary
        texts = versions(options.git, 5 * TESTED_EDITS) if options.git else walk(options.text)
        documents = [tokens for _, tokens, *_ in tokenize_documents(texts, vocabulary.tokenize) if len(tokens)]
        report = study(documents, vocabulary.size, _tested(options, vocabulary))
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['documents']:,} documents, {report['tokens']:,} tokens {report['whole']}")
    print(f"CPU time: search {report['search_s']} s, sort {report['sort_s']} s")
    for threshold, row in report["thresholds"].items():
        print(f"  {threshold}: {row}")


if __name__ == "__main__":
    main()
