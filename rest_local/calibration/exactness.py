"""Measure whether the logits are bit-identical with drafting on and off on this machine (docs/DESIGN.md section 4).

Real text is evaluated one token at a time (n = 1) and in batches, with and without rejected drafts between them, and
every logit is compared bit by bit. llama.cpp chooses kernels by batch size, so a row can differ between the two by
about 1% of its norm; then the arg-max flips at near-ties. The result is a rate and a largest gap, or "exact".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
NEIGHBOUR_PROMPT = 24  # less than a block of the attention, and not a power of two
NEIGHBOUR_LONGEST = 40  # tokens after which it starts again; the next sequence reuses the cells that it frees


@dataclass
class Comparison:
    """Rows compared with n = 1.

    - `different`, `flips`: rows that differ in any bit, and in their arg-max.
    - `largest_gap`: largest difference between the two best logits of a row whose arg-max flips.
    - `largest_change`: largest change of a logit, relative to the norm of its row.
    """

    rows: int = 0
    different: int = 0
    flips: int = 0
    largest_gap: float = 0.0
    largest_change: float = 0.0

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
        """Add the counts of another comparison."""
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
    """Evaluates chains on one sequence in all sequence ids."""

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
        """Evaluate `tokens` at the current position, and keep the first `keep` in the KV cache. Returns their logits, a
        float32 [n, n_vocab] view. Raises DecodeFailed.
        """
        backend = self.backend
        positions = np.arange(self.n_past, self.n_past + len(tokens))
        backend.batch.fill(tokens, positions, 0, backend.n_branches, 1)
        code = backend.decode()
        if code:
            raise DecodeFailed(code, len(tokens))
        self.n_past += keep
        if keep < len(tokens) and not remove_tail(backend, self.n_past):
            raise DecodeFailed(-1, len(tokens))
        return backend.logits(len(tokens))


def compare_chains(backend: Backend, text: Sequence[int], longest: int, prefix: Sequence[int] = ()) -> Comparison:
    """Compare n = 1 with chains of every size in BATCH_SIZES up to `longest` + 1, accepted whole or with a rejected
    tail.

    `text`: real token ids, evaluated twice after `prefix`; attention works in blocks, so a longer context needs a test
    too. Rejected tails are tokens from elsewhere in the text, so that later tokens reuse their cells. Clears the KV
    cache before and after.
    """
    result = Comparison()
    longest = min(longest, backend.max_outputs - 1)
    rng = np.random.default_rng(7)
    try:
        backend.clear()
        alone = Runner(backend)
        alone.prefill(prefix)
        reference = np.stack([alone.evaluate([token], 1)[0].copy() for token in text])
        backend.clear()
        runner = Runner(backend)
        runner.prefill(prefix)
        for size in _sizes(len(text), longest, rng):
            begin = runner.n_past - len(prefix)
            keep = int(rng.integers(1, size + 1)) if rng.random() < 0.5 else size
            chain = list(text[begin : begin + size])
            chain[keep:] = [int(text[i]) for i in rng.integers(0, len(text), size - keep)]
            rows = runner.evaluate(chain, keep)
            for k in range(keep):
                result.add(reference[begin + k], rows[k])
    finally:
        backend.clear()
    return result


def compare_trees(backend: Backend, text: Sequence[int], longest: int) -> Comparison:
    """Compare n = 1 with steps of random trees. One branch follows the text and is accepted as far as it does."""
    return compare_drafts(backend, text, rows_alone(backend, text), "trees", longest)


def rows_alone(backend: Backend, text: Sequence[int]) -> Logits:
    """The logits of the tokens of the text, evaluated one at a time: float32 [n, n_vocab].

    Clears the KV cache before and after.
    """
    try:
        backend.clear()
        alone = Runner(backend)
        return np.stack([alone.evaluate([token], 1)[0].copy() for token in text])
    finally:
        backend.clear()


def compare_drafts(
    backend: Backend, text: Sequence[int], reference: Logits, drafts: Drafts, longest: int, neighbour: bool = False
) -> Comparison:
    """Compare `reference` (`rows_alone` of the text) with steps of random drafts, each accepted as far as it follows
    the text. `neighbour`: a second sequence occupies cells before this one's, takes more between its steps, and
    sometimes frees them all; the backend needs at least two slots. Clears the KV cache before and after.
    """
    result = Comparison()
    longest = min(longest, backend.max_outputs - 1)
    if longest < 1:
        return result
    rng = np.random.default_rng(11)
    slot = Slot(backend)
    slot.tokens = list(text)
    other = _Neighbour(backend, text, rng) if neighbour else None
    make = _random_tree if drafts == "trees" else _random_chain
    try:
        backend.clear()
        while slot.n_past < len(text) - 1:
            if other:
                other.step()
            begin = slot.n_past
            tree, path = make(text, begin, longest, backend.n_branches, rng)
            layout = tree.layout()
            slot.fill_step(tree, layout)
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


class _Neighbour:
    """A second sequence in the second slot, whose logits are not compared."""

    def __init__(self, backend: Backend, text: Sequence[int], rng: np.random.Generator) -> None:
        self._slot = Slot(backend, backend.n_branches)
        self._backend, self._text, self._rng = backend, text, rng

    def step(self) -> None:
        """Evaluate NEIGHBOUR_PROMPT tokens at first, then one to three; start again after NEIGHBOUR_LONGEST tokens."""
        slot = self._slot
        if slot.n_past > NEIGHBOUR_LONGEST:
            slot.clear()
            slot.tokens = []
        n = int(self._rng.integers(1, 4)) if slot.n_past else NEIGHBOUR_PROMPT
        tokens = [int(self._text[i]) for i in self._rng.integers(0, len(self._text), n)]
        batch = BatchBuilder()
        slot.add_prompt(batch, tokens)
        batch.load(self._backend.batch)
        if code := self._backend.decode():
            raise DecodeFailed(code, n)
        slot.tokens += tokens
        slot.n_past += n


def _random_chain(
    text: Sequence[int], begin: int, longest: int, leaves: int, rng: np.random.Generator
) -> tuple[DraftTree, list[int]]:
    """A chain below text[begin], right or with a wrong tail, and its nodes that follow the text."""
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
    """A tree below text[begin], and its nodes that follow the text."""
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


def _sizes(total: int, longest: int, rng: np.random.Generator) -> Iterator[int]:
    """Random batch sizes whose sum is at most `total`, so that the text suffices even if every chain is kept whole."""
    choices = [n for n in BATCH_SIZES if n <= longest + 1]
    left = total
    while choices:
        size = int(rng.choice(choices))
        if size > left:
            choices = [n for n in choices if n <= left]
            continue
        left -= size
        yield size
