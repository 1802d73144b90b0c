"""How large a datastore should be: acceptance and lookup time against its size.

Documents and recorded answers go in. Random subsets of the documents, in growing sizes, and pruned ones serve as the
datastore of a replay (`rest_local.bench.replay`), one after another. A report comes out, JSON-ready:

- "points": the subsets by size, each with mean, least and greatest of its draws; "pruned": the pruned variants
- "enough": for each curve, the smallest size whose gain is ENOUGH of the greatest gain of any subset
- "slopes": for each curve, what the speed-up grows by from one size to the next, for each doubling of the tokens

The gain of a datastore is its speed-up less that without a datastore. Nothing is written to disk, so lookups here never
wait for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from math import log2
from statistics import mean, median
from typing import Any

import numpy as np

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import counted, replay
from rest_local.calibration.curves import load_curve
from rest_local.drafting.sources import CONTEXT_TOKENS, DATASTORE_ROWS, DEPTH, Sources
from rest_local.planning.policies import make_policy
from rest_local.retrieval.changing.pruning import Target, choose
from rest_local.retrieval.rows import PADDING, Int32Array, width_of
from rest_local.retrieval.segment import Segment

SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
PRUNED = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the bytes
SEEN = (2, 8)
DRAWS = 3
CURVES = ("rtx3090-8b-q4_0", "xeon-amx-1.5b-q4_k")
ENOUGH = 0.95
CONTEXTS = 400  # looked up in each datastore, to time it


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents. width: bytes of a token."""

    documents: Sequence[Int32Array]
    vocab_size: int

    @property
    def width(self) -> int:
        return width_of(self.vocab_size)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))

    def bytes_of(self, document: Int32Array) -> int:
        """In tokens.bin and order.bin, its separator included."""
        return (len(document) + 1) * (self.width + 4)

    def segment(self, numbers: Sequence[int]) -> Segment:
        return Segment.of([self.documents[number] for number in numbers], self.vocab_size)


@dataclass
class Point:
    """The results of one size. Each list has one entry for each draw; `speedup` has such a list for each curve."""

    label: str
    share: float
    tokens: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    mat: list[float] = field(default_factory=list)
    speedup: dict[str, list[float]] = field(default_factory=dict)
    lookup_us: float | None = None

    def add(self, segment: Segment | None, results: dict[str, tuple[float, float]]) -> None:
        """results: by curve, accepted tokens a pass and speed-up. The first curve's policy gives `mat`."""
        self.tokens.append(0 if segment is None else len(segment))
        self.size.append(0 if segment is None else len(segment) * (segment.width + 4) + PADDING * segment.width)
        self.mat.append(next(iter(results.values()))[0])
        for name, (_, speedup) in results.items():
            self.speedup.setdefault(name, []).append(speedup)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "label": self.label,
            "share": round(self.share, 6),
            "tokens": round(mean(self.tokens)),
            "bytes": round(mean(self.size)),
            "draws": len(self.mat),
            "mat": _spread(self.mat),
            "speedup": {name: _spread(values) for name, values in self.speedup.items()},
            "lookup_us": self.lookup_us,
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(mean(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


def measure(
    corpus: Corpus,
    tested: Sequence[Recorded],
    *,
    curves: Sequence[str] = CURVES,
    draws: int = DRAWS,
    shares: Sequence[float] = SHARES,
    targets: Sequence[Target] | None = None,
    seed: int = 0,
    done: Callable[[Point], None] = lambda point: None,
) -> dict[str, Any]:
    """The report that the module describes. `targets`: pruned variants, None: a few. `done` gets each point.

    Takes a replay for each curve, size and draw, and memory for twice the whole datastore. Lookup times are medians of
    CPU time, over the same contexts in every datastore in turn, so other work on the machine disturbs them little.
    """
    run = partial(_replayed, tested=tested, vocab_size=corpus.vocab_size, curves=curves)
    none = Point("none", 0.0)
    none.add(None, run(None))
    done(none)
    points, timed = [none], []
    for point, segment in chain(_subsets(corpus, shares, draws, seed, run), _pruned(corpus, targets, run)):
        points.append(point)
        timed.append((point, segment))
        done(point)
    for (point, _), micros in zip(timed, lookup_times([segment for _, segment in timed], tested), strict=True):
        point.lookup_us = micros
    subsets = [point for point in points if not point.label.startswith("pruned")]
    return {
        "answers": len(counted(tested)),
        "answer_tokens": sum(len(answer.answer) for answer in counted(tested)),
        "documents": len(corpus.documents),
        "tokens": corpus.tokens,
        "curves": list(curves),
        "points": [point.to_dict() for point in subsets],
        "pruned": [point.to_dict() for point in points if point not in subsets],
        "enough": {name: enough(subsets, name) for name in curves},
        "slopes": {name: slopes(subsets, name) for name in curves},
    }


_Run = Callable[[Segment | None], dict[str, tuple[float, float]]]


def _replayed(
    segment: Segment | None, *, tested: Sequence[Recorded], vocab_size: int, curves: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """By curve: accepted tokens a pass, and the speed-up."""
    stores: Any = [] if segment is None else [segment]  # a segment has the `rows` of a datastore
    make_sources = partial(Sources, stores, vocab_size)
    results = {}
    for name in curves:
        tally = replay(tested, make_sources, make_policy("auto", load_curve(name)), load_curve(name))
        results[name] = (tally.tokens / max(tally.steps, 1), tally.speedup)
    return results


def _subsets(
    corpus: Corpus, shares: Sequence[float], draws: int, seed: int, run: _Run
) -> Iterator[tuple[Point, Segment]]:
    """Each size, and the subset of its first draw. The subsets of one draw contain each other. A subset of everything
    has one draw.
    """
    orders = [np.random.default_rng([seed, draw]).permutation(len(corpus.documents)).tolist() for draw in range(draws)]
    for share in shares:
        point, first = Point(f"{share:.4g}", share), None
        for order in orders if share < 1 else orders[:1]:
            segment = corpus.segment(prefix(corpus, order, share))
            point.add(segment, run(segment))
            first = first or segment
        if first is not None:
            yield point, first


def prefix(corpus: Corpus, order: Sequence[int], share: float) -> list[int]:
    """As many of the documents, in this order, as come closest to the share of the tokens; at least one."""
    sizes = np.cumsum([len(corpus.documents[number]) for number in order])
    return list(order[: int(np.abs(sizes - share * sizes[-1]).argmin()) + 1])


def _pruned(corpus: Corpus, targets: Sequence[Target] | None, run: _Run) -> Iterator[tuple[Point, Segment]]:
    sizes = [corpus.bytes_of(document) for document in corpus.documents]
    if targets is None:
        targets = [*(Target(size=round(share * sum(sizes))) for share in PRUNED), *(Target(seen=n) for n in SEEN)]
    for target in targets:
        kept = choose(sizes, corpus.documents.__getitem__, target, corpus.tokens).tolist()
        if not kept:
            continue
        segment = corpus.segment(kept)
        point = Point(f"pruned {target}", sum(sizes[number] for number in kept) / sum(sizes))
        point.add(segment, run(segment))
        yield point, segment


def lookup_times(segments: Sequence[Segment], tested: Sequence[Recorded]) -> list[float]:
    """Microseconds of CPU time of a lookup in each datastore, the median of CONTEXTS. Every datastore gets the same
    contexts, in turn, so that they share what else the machine does.
    """
    texts = [(answer.prompt, answer.answer) for answer in counted(tested)]
    random = np.random.default_rng(0)
    contexts = []
    for number in random.integers(0, len(texts), CONTEXTS).tolist():
        prompt, answer = texts[number]
        end = int(random.integers(1, len(answer)))
        contexts.append([*prompt[-CONTEXT_TOKENS:], *answer[:end]][-CONTEXT_TOKENS:])
    times: list[list[int]] = [[] for _ in segments]
    for context in contexts:
        for segment, taken in zip(segments, times, strict=True):
            begun = time.thread_time_ns()
            segment.rows(context, DATASTORE_ROWS, DEPTH)
            taken.append(time.thread_time_ns() - begun)
    return [round(median(taken) / 1e3, 1) for taken in times]


def enough(points: Sequence[Point], curve: str) -> dict[str, Any] | None:
    """The smallest size with ENOUGH of the greatest gain: {"share", "tokens", "bytes", "gain"}; None without a gain.
    `gain`: the share of the greatest gain.
    """
    none, *sizes = points
    base = mean(none.speedup[curve])
    gains = [mean(point.speedup[curve]) - base for point in sizes]
    if not sizes or max(gains) <= 0:
        return None
    at = next(index for index, gain in enumerate(gains) if gain >= ENOUGH * max(gains))
    row = sizes[at].to_dict()
    return {**{key: row[key] for key in ("share", "tokens", "bytes")}, "gain": round(gains[at] / max(gains), 4)}


def slopes(points: Sequence[Point], curve: str) -> list[dict[str, float]]:
    """What the speed-up grows by with each doubling, from each size to the next: [{"tokens", "slope"}]; tokens: of the
    larger one.
    """
    sizes = points[1:]
    found = []
    for small, large in pairwise(sizes):
        doublings = log2(mean(large.tokens) / mean(small.tokens)) if mean(large.tokens) > mean(small.tokens) else 0.0
        if doublings:
            grown = mean(large.speedup[curve]) - mean(small.speedup[curve])
            found.append({"tokens": round(mean(large.tokens)), "slope": round(grown / doublings, 5)})
    return found
