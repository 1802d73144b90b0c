"""Make an index smaller: keep the documents whose contexts are seen most often, and delete the others.

A context here is CONTEXT tokens and the token that follows them. That common contexts matter most is the idea of CREST
(arXiv 2408.04678), which stores contexts and continuations apart. Here a context costs nothing in addition to its text,
so whole documents are kept or deleted. Each one counts for the contexts that no kept document has yet, weighed by the
root of their number of places in the index. So documents that repeat others go first. The log has the measurements:
leaving contexts out of the order alone, or cutting passages out of documents, loses more drafts for each saved byte.

What stays is a regular index. Provenance stays right, because no document changes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreNotFound, OptionError
from rest_local.retrieval.building.build import commit
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, encoded
from rest_local.retrieval.files import WAIT_S, Files, locked
from rest_local.retrieval.format import DOCUMENTS_HEAD, STATE_BYTES, STATES_HEAD, SegmentEntry
from rest_local.retrieval.home import find, holds_files
from rest_local.retrieval.rows import PADDING, Int32Array, Int64Array, width_of
from rest_local.retrieval.staging import clear

CONTEXT = 4  # tokens of a context; with 2, 3 and 5 the same bytes gave about as many accepted tokens

# The count table has 2 bytes per slot and is capped at 256 MB.
LEAST_SLOTS, MOST_SLOTS = 1 << 16, 1 << 27
_SLOTS_A_TOKEN = 4
_MOST = (1 << 16) - 1  # larger counts are capped
_ROOTS = np.sqrt(np.arange(_MOST + 1, dtype=np.float32))
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_TARGET = re.compile(r"seen:(?P<seen>[0-9]{1,5})|(?P<size>[0-9]{1,12}(\.[0-9]{1,6})?) ?(?P<unit>[kMG])B")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}

Tokens = Callable[[int], Int32Array]  # document number -> tokens; called several times for each


@dataclass(frozen=True)
class Target:
    """The goal of pruning: a context that is `seen` so often stays in some document, or the index has `size` bytes.
    Exactly one of them is above 0.
    """

    seen: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        if min(self.seen, self.size) < 0 or (self.seen > 0) == (self.size > 0) or self.seen > _MOST:
            raise ValueError(f"a target of seen {self.seen} and size {self.size}")

    @staticmethod
    def parse(text: str) -> Target:
        """Parse `seen:2` or `200MB` (kB, MB or GB, decimal). Raises OptionError for anything else."""
        found = _TARGET.fullmatch(text)
        if found and found["seen"] and 2 <= int(found["seen"]) <= _MOST:
            return Target(seen=int(found["seen"]))
        if found and found["size"] and (size := int(float(found["size"]) * _UNITS[found["unit"]])) > 0:
            return Target(size=size)
        raise OptionError(f"{text!r} says neither how often a context has to be seen (seen:2) nor a size (200MB)")

    def __str__(self) -> str:
        return f"seen:{self.seen}" if self.seen else f"{self.size / 1e6:g}MB"


@dataclass(frozen=True)
class Pruned:
    """The documents, tokens (with a separator for each document) and bytes of an index, before and after."""

    documents: tuple[int, int]
    tokens: tuple[int, int]
    bytes: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        rows = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return {name: {"before": before, "after": after} for name, (before, after) in rows.items()}


def prune(
    path: Path, target: Target, *, vocabulary_hash: str | None = None, files: Files | None = None, dry: bool = False
) -> Pruned:
    """Delete documents from the index for a vocabulary (None: the first one) until it meets `target`, in one atomic
    commit. An open reader keeps what it opened. The recipe gets a field `pruned`. `dry` only computes the result.

    An `update` adds the deleted files again. Raises OptionError if nothing would be left, and DatastoreNotFound,
    DatastoreCorrupt, DatastoreVersion, DatastoreLocked, DatastoreUnwritable. After an error the index is as it was.
    Takes about 2 us of CPU time a token, up to 256 MB to count in, and 4 bytes for each token of a segment at a time.
    """
    directory = find(path, vocabulary_hash)
    if not holds_files(directory):
        raise DatastoreNotFound(path)  # no directory to lock
    clear(path, files)
    with locked(directory, WAIT_S), Datastore.open(directory, vocabulary_hash=vocabulary_hash) as store:
        stored = _Stored(store)
        before = len(stored.sizes), len(store), store.info()["bytes"]
        kept = stored.choose(target)
        if not len(kept):
            raise OptionError(f"datastore {path}: no document would be left of {target}")
        whole, changed = stored.divided(kept)
        if dry or not changed:
            return stored.expected(kept, before)
        store.check([store.manifest.segments[index] for index in changed])  # or damage would get a valid checksum
        manifest = commit(
            directory,
            stored.documents(kept, changed),
            vocabulary=store.manifest.vocabulary,
            recipe={**store.manifest.recipe, "pruned": str(target)},
            keep=whole,
            files=files or Files(),
        )
    return Pruned((before[0], len(kept)), (before[1], manifest.tokens), (before[2], manifest.size))


class _Stored:
    """The documents of an open index that are not deleted, numbered over all segments."""

    def __init__(self, store: Datastore) -> None:
        self.store = store
        self._width = width_of(store.manifest.vocabulary.size)
        spans = [store.spans(index) for index in range(len(store.segments))]
        self._spans: Int64Array = np.concatenate(spans)
        self._first = np.cumsum([0, *map(len, spans)])  # each segment's first document
        self._segment = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        held = (document for index in range(len(spans)) for document in store.documents(index))
        self.sizes: Int64Array = np.array([size_of(document, self._width) for document in held], np.int64)

    def tokens(self, number: int) -> Int32Array:
        start, end = self._spans[number].tolist()
        return self.store.segments[int(self._segment[number])].slice(start, end)

    def choose(self, target: Target) -> Int64Array:
        if target.size:
            target = Target(size=max(target.size - len(self.store.segments) * _fixed(self._width), 1))
        return choose(self.sizes.tolist(), self.tokens, target, int((self._spans[:, 1] - self._spans[:, 0]).sum()))

    def divided(self, kept: Int64Array) -> tuple[tuple[SegmentEntry, ...], list[int]]:
        """Return the segments that stay unchanged, and the numbers of the others."""
        entries = self.store.manifest.segments
        left = np.bincount(self._segment[kept], minlength=len(entries))
        changed = [i for i, entry in enumerate(entries) if left[i] < entry.documents]
        return tuple(entry for i, entry in enumerate(entries) if i not in changed), changed

    def documents(self, kept: Int64Array, segments: Sequence[int]) -> Iterator[Document]:
        """Yield the kept documents of these segments, in the order of the text."""
        wanted = set(kept.tolist())
        for index in segments:
            for number, document in enumerate(self.store.documents(index), int(self._first[index])):
                if number in wanted:
                    yield document

    def expected(self, kept: Int64Array, before: tuple[int, int, int]) -> Pruned:
        """Return the result of a dry run. The bytes are exact except for the number of segments."""
        spans = self._spans[kept]
        tokens, fixed = int((spans[:, 1] - spans[:, 0] + 1).sum()), len(self.store.segments) * _fixed(self._width)
        size = min(int(self.sizes[kept].sum()) + fixed, before[2])
        return Pruned((before[0], len(kept)), (before[1], tokens), (before[2], size))


def size_of(document: Document, width: int) -> int:
    """Return the bytes that a document takes in the files of a segment."""
    states = sum(STATE_BYTES + len(encoded(state.name)) for state in document.states)
    return (len(document.tokens) + 1) * (width + 4) + 16 + len(encoded(document.name)) + states


def _fixed(width: int) -> int:
    """Return the bytes of a segment without documents."""
    return PADDING * width + DOCUMENTS_HEAD + 16 + STATES_HEAD + 8


def choose(sizes: Sequence[int], tokens: Tokens, target: Target, total: int) -> Int64Array:
    """Return the numbers of the documents to keep, ascending: int64. `sizes` are their bytes, `total` counts all
    tokens.

    Always takes the document with the most new contexts for its size, weighed as the module says, as long as it fits.
    Equal inputs give equal results. Contexts with one hash count as one, which rarely matters: the table has four slots
    for a token, up to 2^27 in all.
    """
    if target.size and sum(sizes) <= target.size:
        return np.arange(len(sizes))
    shift = np.uint64(64 - _slots(total).bit_length() + 1)
    counts = _count(len(sizes), tokens, shift, _slots(total))
    counts[counts < max(target.seen, 1)] = 0
    left = target.size or sum(sizes)
    kept: list[int] = []
    for number, contexts in _best_first(sizes, tokens, counts, shift):
        if sizes[number] <= left:
            counts[contexts] = 0
            left -= sizes[number]
            kept.append(number)
    return np.array(sorted(kept), np.int64)


def _best_first(
    sizes: Sequence[int], tokens: Tokens, counts: npt.NDArray[np.uint16], shift: np.uint64
) -> Iterator[tuple[int, Int64Array]]:
    """Yield (number, slots of its contexts) of each document, the most valuable for its size first, until none has
    value. The value of a document only falls as others are taken. So it is computed again only when it is the highest.
    """
    heap = [(-float("inf"), number) for number in range(len(sizes))]
    while heap:
        _, number = heapq.heappop(heap)
        contexts = np.unique(contexts_of(tokens(number), shift))
        value = float(_ROOTS[counts[contexts]].sum()) / sizes[number]
        if value <= 0:
            continue
        if heap and value < -heap[0][0]:
            heapq.heappush(heap, (-value, number))
        else:
            yield number, contexts


def contexts_of(tokens: Int32Array, shift: np.uint64) -> Int64Array:
    """Return the slots of a document's contexts: int64 [tokens - CONTEXT], each a hash of 64 - shift bits."""
    count = max(len(tokens) - CONTEXT, 0)
    hashes = np.zeros(count, np.uint64)
    for start in range(CONTEXT + 1):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTOR + tokens[start : start + count].astype(np.uint64)
    slots: Int64Array = ((hashes * _FACTOR) >> shift).astype(np.int64)
    return slots


def _count(documents: int, tokens: Tokens, shift: np.uint64, slots: int) -> npt.NDArray[np.uint16]:
    """Count the places of each slot's contexts in all documents."""
    counts = np.zeros(slots, np.uint16)
    for number in range(documents):
        found, times = np.unique(contexts_of(tokens(number), shift), return_counts=True)
        counts[found] = np.minimum(counts[found].astype(np.int64) + times, _MOST)
    return counts


def _slots(total: int) -> int:
    """Return the size of the count table for so many tokens: a power of 2."""
    return int(min(max(1 << (_SLOTS_A_TOKEN * total).bit_length(), LEAST_SLOTS), MOST_SLOTS))
