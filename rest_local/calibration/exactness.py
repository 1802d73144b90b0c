"""Test whether the logits are bit-identical with drafting on and off on this machine (docs/DESIGN.md section 4).

Real text is evaluated one token at a time (n = 1) and in batches, with and without rejected drafts between them, and
every logit is compared bit by bit. llama.cpp chooses kernels by batch size, so a row can differ between the two by
about 1% of its norm; then the arg-max flips at near-ties. The result is a rate and a largest gap, or "exact".

`SelfTest` is the test of `--exact`, which runs when the model is loaded:

- The guarantee needs every row of the plan, at least LEAST_ROWS, without a difference.
- If there is no time for all rows, those compared so far are stored (`SelfTest.to_dict`), and the next load continues.
- The backend belongs to the test, which clears its KV cache.

The module knows nothing about models and files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.errors import DecodeFailed
from rest_local.kv_cache.backend import Backend, remove_tail
from rest_local.kv_cache.slot import BatchBuilder, Slot

Logits = NDArray[np.float32]
Drafts = Literal["chains", "trees"]
BATCH_SIZES = (2, 3, 4, 8, 16, 32, 64)


@dataclass
class Comparison:
    """The rows compared with n = 1."""

    rows: int = 0
    different: int = 0  # rows that differ in any bit
    flips: int = 0  # rows that differ in their arg-max
    largest_gap: float = 0.0  # largest difference between the two best logits of a row whose arg-max flips
    largest_change: float = 0.0  # largest change of a logit, relative to the norm of its row

    @property
    def exact(self) -> bool:
        return self.rows > 0 and self.different == 0

    def add(self, alone: Logits, other: Logits) -> None:
        """Compare two rows of the same token, float32 [n_vocab]."""
        self.rows += 1
        if np.array_equal(alone.view(np.uint32), other.view(np.uint32)):
            return
        self.different += 1
        change = float(np.abs(alone - other).max() / max(float(np.linalg.norm(alone)), 1e-9))
        self.largest_change = max(self.largest_change, change)
        if int(alone.argmax()) != int(other.argmax()):
            self.flips += 1
            best = np.partition(alone, -2)[-2:]
            self.largest_gap = max(self.largest_gap, float(best[1] - best[0]))

    def merge(self, other: Comparison) -> None:
        self.rows += other.rows
        self.different += other.different
        self.flips += other.flips
        self.largest_gap = max(self.largest_gap, other.largest_gap)
        self.largest_change = max(self.largest_change, other.largest_change)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """Read `to_dict`. Raises KeyError, TypeError or ValueError for other data."""
        result = cls(*(type(value)(data[name]) for name, value in asdict(cls()).items()))
        if not 0 <= result.flips <= result.different <= result.rows:
            raise ValueError(f"not a comparison: {result}")
        return result

    def to_dict(self) -> dict[str, Any]:
        rate = 1e4 * self.flips / max(self.rows, 1)
        return {**asdict(self), "exact": self.exact, "flips_per_10000": round(rate, 2)}


class Runner:
    """A runner that evaluates chains on one sequence in all sequence ids."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.n_past = 0

    def prefill(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Evaluate tokens at the current position in large batches, like a prompt."""
        backend = self.backend
        for begin in range(0, len(tokens), backend.n_batch):
            part = tokens[begin : begin + backend.n_batch]
            backend.batch.fill(part, np.arange(self.n_past, self.n_past + len(part)), 0, backend.n_branches, 0)
            if code := backend.decode():
                raise DecodeFailed(code, len(part))
            self.n_past += len(part)

    def evaluate(self, tokens: Sequence[int], keep: int) -> Logits:
        """Evaluate `tokens` at the current position, keep the first `keep` in the KV cache, and return their logits, a
        float32 [n, n_vocab] view. Raises DecodeFailed.
        """
        backend = self.backend
        positions = np.arange(self.n_past, self.n_past + len(tokens))
        goes_back = len(tokens) - keep > backend.rollback
        state = backend.save(0, partial=True, on_device=True) if goes_back else b""
        backend.batch.fill(tokens, positions, 0, backend.n_branches, 1)
        code = backend.decode()
        if code:
            raise DecodeFailed(code, len(tokens))
        if goes_back:  # The checkpoint before the step is restored, and accepted tokens are evaluated again.
            rows: Logits = backend.logits(len(tokens)).copy()
            if not backend.restore(0, state, partial=True, on_device=True) or not remove_tail(backend, self.n_past):
                raise DecodeFailed(-1, len(tokens))
            self.prefill(tokens[:keep])
            return rows
        self.n_past += keep
        if keep < len(tokens) and not remove_tail(backend, self.n_past):
            raise DecodeFailed(-1, len(tokens))
        return backend.logits(len(tokens))


def rows_alone(backend: Backend, text: Sequence[int]) -> Logits:
    """Return the logits of single tokens of the text: float32 [n, n_vocab]. Leaves the KV cache empty."""
    try:
        backend.clear()
        alone = Runner(backend)
        return np.stack([alone.evaluate([token], 1)[0].copy() for token in text])
    finally:
        backend.clear()


def compare_drafts(
    backend: Backend, text: Sequence[int], reference: Logits, drafts: Drafts, longest: int
) -> Comparison:
    """Compare `reference` (`rows_alone` of the text) with steps of random drafts, each accepted as far as it follows
    the text. Clears the KV cache before and after.
    """
    result = Comparison()
    longest = min(longest, backend.max_outputs - 1)
    if longest < 1:
        return result
    rng = np.random.default_rng(11)
    slot = Slot(backend, checkpoints=backend.rollback < longest)
    slot.tokens = list(text)
    make = _random_tree if drafts == "trees" else _random_chain
    try:
        backend.clear()
        while slot.n_past < len(text) - 1:
            begin = slot.n_past
            tree, path = make(text, begin, longest, backend.n_branches, rng)
            layout = tree.layout()
            slot.checkpoints.protect(len(tree), slot.n_past, slot.n_again)
            batch = BatchBuilder()
            batch.add_step(slot, tree, layout)
            batch.load(backend.batch)
            if code := backend.decode():
                raise DecodeFailed(code, 1 + len(tree))
            rows = backend.logits(1 + len(tree))
            place = {node: row for row, node in enumerate(layout.order, 1)}
            for k, row in enumerate([0, *(place[node] for node in path)]):
                result.add(reference[begin + k], rows[row])
            if not slot.accept(tree, layout, path):
                raise DecodeFailed(-1, 1 + len(tree))
    finally:
        backend.clear()
    return result


def _random_chain(
    text: Sequence[int], begin: int, longest: int, leaves: int, rng: np.random.Generator
) -> tuple[DraftTree, list[int]]:
    """Make a chain below text[begin], right or with a wrong tail. Return it and its nodes that follow the text."""
    size = int(rng.choice([n for n in BATCH_SIZES if n <= longest + 1]))
    truth = text[begin + 1 : begin + size]
    keep = int(rng.integers(0, len(truth) + 1)) if rng.random() < 0.5 else len(truth)
    tree = DraftTree(1)
    node = ROOT
    for k in range(size - 1):
        token = truth[k] if k < keep else text[int(rng.integers(0, len(text)))]
        node = tree.add(int(token), node, 1.0, 0)
    return tree, list(range(keep))


def _random_tree(
    text: Sequence[int], begin: int, longest: int, leaves: int, rng: np.random.Generator
) -> tuple[DraftTree, list[int]]:
    """Make a tree below text[begin]. Return it and its nodes that follow the text."""
    tree = DraftTree(leaves)
    path: list[int] = []
    truth = text[begin + 1 : begin + 1 + int(rng.integers(0, 5))]
    wanted = int(rng.integers(1, min(longest, 16) + 1))
    for _ in range(wanted):
        on_path = len(path) < len(truth) and rng.random() < 0.5
        parent = (path[-1] if path else ROOT) if on_path else int(rng.integers(-1, len(tree)))
        if not tree.can_add(parent):
            continue
        token = int(truth[len(path)]) if on_path else int(text[int(rng.integers(0, len(text)))])
        if any(tree.token[c] == token for c in tree.children_of(parent)):
            continue
        node = tree.add(token, parent, 1.0, 0)
        if on_path:
            path.append(node)
    if not len(tree):
        tree.add(int(text[0]), ROOT, 1.0, 0)
    return tree, path


# Rows that the guarantee needs. In settings that are not exact, 1% to 30% of the rows differ (docs/LOG.md). 32 rows
# miss a difference of 1% in three of four runs, 256 rows in one of 13.
LEAST_ROWS = 256

SEGMENT = 32  # rows compared at a time; their logits take 19 MB for a vocabulary of 152k
FIRST = 4  # rows of the first segment, which reveals unsuitable settings after about 8 plain steps
N_CTX = 1024  # tokens of context that the plan needs; the text is as long
DEPTH = N_CTX - LEAST_ROWS  # attention works in blocks, so half as many rows from here on are compared too


@dataclass(frozen=True)
class Segment:
    """A segment of `n` rows at the positions from `position` on, with the text from token `offset` on."""

    position: int
    n: int
    offset: int = 0


def plan_segments(n_ctx: int, largest: int) -> list[Segment]:
    """Plan the rows to compare in a context of `n_ctx` tokens: LEAST_ROWS rows at its start, in a short context in
    several rounds over different text, and half as many from DEPTH on if a chain of `largest` tokens fits after them.
    """
    usable = min(LEAST_ROWS, max(n_ctx // 2, 1))
    segments = []
    left = LEAST_ROWS
    for offset in range(0, LEAST_ROWS, usable):
        ends = [FIRST, *range(SEGMENT, usable, SEGMENT), usable]
        begin = 0
        for end in ends:
            n = min(end, usable) - begin
            n = min(n, left)
            if n > 0:
                segments.append(Segment(begin, n, offset))
                begin, left = begin + n, left - n
    deep_rows = LEAST_ROWS // 2
    if n_ctx > DEPTH + deep_rows + largest:
        segments += [Segment(DEPTH + begin, SEGMENT) for begin in range(0, deep_rows, SEGMENT)]
    return segments


class SelfTest:
    """A test that compares chains of up to `longest` drafted tokens with plain decoding. `text` has real token ids,
    which repeat if they are too few. It continues from `known`, a result of `to_dict`.
    """

    def __init__(
        self, backend: Backend, text: Sequence[int], longest: int, known: Mapping[str, Any] | None = None
    ) -> None:
        self.backend = backend
        self.longest = min(longest, backend.max_outputs - 1)
        self._text = np.asarray(text, np.int32)
        self.segments = plan_segments(backend.n_ctx, self.longest + 1)
        self.comparison = Comparison.from_dict(known) if known else Comparison()
        self.plain_ms = math.inf  # the fastest plain step so far
        self._steps = self._run()

    @property
    def rows_needed(self) -> int:
        """Return the number of rows of the whole plan."""
        return sum(segment.n for segment in self.segments)

    @property
    def complete(self) -> bool:
        """Return True if the test has ended: every row was compared, or one of them differs."""
        return self.comparison.different > 0 or self.comparison.rows >= self.rows_needed

    def run(self, seconds: float) -> bool:
        """Continue for `seconds`, and for at least one decode. Return `complete`. Raises DecodeFailed."""
        begun = time.perf_counter()
        while not self.complete and not next(self._steps, True):
            if time.perf_counter() - begun >= seconds:
                break
        return self.complete

    def begin(self) -> float:
        """Compare the first rows, and return about how many seconds the others take. Raises DecodeFailed."""
        while not self.complete and (self.comparison.rows < FIRST or self.plain_ms == math.inf):
            self.run(0.0)
        row_ms = 2.0 * self.plain_ms  # a row alone, its part of a chain, and of the text before DEPTH
        return 0.0 if self.complete else 1e-3 * row_ms * (self.rows_needed - self.comparison.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON. `exact` tells whether the guarantee holds."""
        return {
            **self.comparison.to_dict(),
            "rows_needed": self.rows_needed,
            "complete": self.complete,
            "exact": guarantees_exactness(self.comparison, self.rows_needed),
        }

    def _run(self) -> Iterator[None]:
        """Compare the remaining segments, and yield after every decode."""
        runner = Runner(self.backend)
        cells: tuple[int, int] | None = None  # (end position, offset) of the text in the KV cache
        first = 0
        for number, segment in enumerate(self.segments):
            first += segment.n
            if first <= self.comparison.rows:
                continue
            found = Comparison()
            if cells != (segment.position, segment.offset):
                yield from self._fill(runner, segment)
            yield from self._compare(runner, segment, found, np.random.default_rng(number))
            self.comparison.merge(found)
            cells = segment.position + segment.n, segment.offset
        self.backend.clear()

    def _fill(self, runner: Runner, segment: Segment) -> Iterator[None]:
        """Evaluate the text before the segment."""
        self.backend.clear()
        runner.n_past = 0
        for begin in range(0, segment.position, self.backend.n_batch):
            runner.prefill(self._tokens(segment, begin, min(begin + self.backend.n_batch, segment.position)))
            yield

    def _compare(self, runner: Runner, segment: Segment, found: Comparison, rng: np.random.Generator) -> Iterator[None]:
        """Evaluate the rows in chains first, then alone. The tokens then stay in the KV cache."""
        begin, end = segment.position, segment.position + segment.n
        restore = _checkpoint(self.backend, begin)
        drafted: list[NDArray[np.float32]] = []
        while runner.n_past < end:
            at = runner.n_past
            sizes = [n for n in BATCH_SIZES if n <= min(self.longest + 1, 2 * segment.n, self.backend.n_ctx - at)]
            size = int(rng.choice(sizes)) if sizes else 1
            keep = min(end - at, int(rng.integers(1, size + 1)) if rng.random() < 0.5 else size)
            chain = self._tokens(segment, at, at + size)
            chain[keep:] = rng.choice(self._text, size - keep)
            drafted += [row.copy() for row in runner.evaluate(chain.tolist(), keep)[:keep]]
            yield
        restore()
        runner.n_past = begin
        for at, row in zip(range(begin, end), drafted, strict=True):
            begun = time.perf_counter()
            alone = runner.evaluate(self._tokens(segment, at, at + 1).tolist(), 1)[0]
            self.plain_ms = min(self.plain_ms, 1e3 * (time.perf_counter() - begun))
            found.add(alone, row)
            yield

    def _tokens(self, segment: Segment, begin: int, end: int) -> NDArray[np.int32]:
        """Return a copy of the text at positions [begin, end), int32."""
        places = np.arange(segment.offset + begin, segment.offset + end) % len(self._text)
        tokens: NDArray[np.int32] = self._text[places]
        return tokens


def guarantees_exactness(found: Comparison, rows_needed: int) -> bool:
    """Return True if the comparison suffices for `--exact`: enough rows and no difference."""
    return found.different == 0 and found.rows >= max(rows_needed, LEAST_ROWS)


def _checkpoint(backend: Backend, position: int) -> Callable[[], None]:
    """Return a function that restores the KV cache to its present state at `position`. Recurrent state, which has one
    sequence id, is restored from a copy, because it can be rolled back only within a step.
    """
    state = backend.save(0) if backend.n_branches == 1 and position else b""

    def restore() -> None:
        if backend.n_branches > 1:
            done = remove_tail(backend, position)
        else:
            backend.clear()
            done = not position or backend.restore(0, state)
        if not done:
            raise DecodeFailed(-1, position)

    return restore
