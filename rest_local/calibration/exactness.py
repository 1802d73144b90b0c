"""Test whether the logits are bit-identical with drafting on and off on this machine (docs/DESIGN.md section 4).

Real text is evaluated one token at a time (n = 1) and in steps with random drafts, right and wrong ones, and every
logit is compared bit by bit. llama.cpp chooses kernels by batch size, so a row can differ between the two by about 1%
of its norm; then the arg-max flips at near-ties. The result is a rate and a largest gap, or "exact".

`self_test` is the test of `--exact`, which runs once, when a model is loaded for the first time. The guarantee needs
every row of its plan, at least LEAST_ROWS, without a difference.

Both clear the KV cache. The module knows nothing about models and files.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.errors import DecodeFailed
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.slot import BatchBuilder, Slot

Logits = NDArray[np.float32]
Drafts = Literal["chains", "trees"]
BATCH_SIZES = (2, 3, 4, 8, 16, 32, 64)
# Rows that the guarantee needs. In settings that are not exact, 1% to 30% of the rows differ (docs/LOG.md). 32 rows
# miss a difference of 1% in three of four runs, 256 rows in one of 13.
LEAST_ROWS = 256
FIRST = 4  # These rows are compared first; they reveal unsuitable settings after about 8 plain steps.
N_CTX = 1024  # tokens of context that the plan needs; the text is as long
DEPTH = N_CTX - LEAST_ROWS  # attention works in blocks, so half as many rows from here on are compared too


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


def rows_alone(backend: Backend, text: Sequence[int], begin: int = 0) -> Logits:
    """Return the logits of single tokens of the text from token `begin` on: float32 [n, n_vocab]. Clears the KV cache
    before. Raises DecodeFailed.
    """
    slot = _slot_at(backend, text, begin, 0)
    return np.stack([_step(slot, DraftTree(), [])[0].copy() for _ in range(begin, len(text))])


def compare_drafts(backend: Backend, text: Sequence[int], drafts: Drafts, longest: int, begin: int = 0) -> Comparison:
    """Compare the logits of single tokens of the text from token `begin` on with those of steps with random drafts of
    at most `longest` tokens, each accepted as far as it follows the text. Clears the KV cache before and after. Raises
    DecodeFailed.
    """
    result = Comparison()
    longest = min(longest, backend.max_outputs - 1)
    if longest < 1:
        return result
    rng = np.random.default_rng(11)
    sizes = itertools.cycle([n for n in BATCH_SIZES if n <= longest + 1])
    make = _random_tree if drafts == "trees" else _random_chain
    try:
        alone = rows_alone(backend, text, begin)
        slot = _slot_at(backend, text, begin, longest)
        while (at := slot.n_past) < len(text):
            n_nodes = min(next(sizes), backend.n_ctx - at) - 1
            tree, path = make(text, at, n_nodes, backend.n_branches, rng) if n_nodes else (DraftTree(), [])
            for place, row in enumerate(_step(slot, tree, path), at - begin):
                result.add(alone[place], row)
    finally:
        backend.clear()
    return result


def _slot_at(backend: Backend, text: Sequence[int], begin: int, longest: int) -> Slot:
    """Clear the KV cache, and evaluate the text before token `begin`. Drafts of `longest` tokens can be taken back."""
    backend.clear()
    slot = Slot(backend, checkpoints=backend.rollback < longest)
    slot.tokens = list(text)
    while slot.n_past < begin:
        part = slot.tokens[slot.n_past : min(begin, slot.n_past + backend.n_batch)]
        batch = BatchBuilder()
        batch.add_prompt(slot, part)
        _decode(backend, batch)
        slot.commit(len(part))
    return slot


def _step(slot: Slot, tree: DraftTree, path: list[int]) -> list[Logits]:
    """Do one step, and return the logits of the root and of the nodes of `path`, which are accepted: views of float32
    [n_vocab]. Raises DecodeFailed.
    """
    layout = tree.layout() if len(tree) else None
    slot.checkpoints.protect(len(tree), slot.n_past, slot.n_again)
    batch = BatchBuilder()
    batch.add_step(slot, tree, layout)
    _decode(slot.backend, batch)
    rows = slot.backend.logits(1 + len(tree))
    place = {node: row for row, node in enumerate(layout.order, 1)} if layout else {}
    if not slot.accept(tree, layout, path):
        raise DecodeFailed(-1, 1 + len(tree))
    return [rows[0], *(rows[place[node]] for node in path)]


def _decode(backend: Backend, batch: BatchBuilder) -> None:
    batch.load(backend.batch)
    if code := backend.decode():
        raise DecodeFailed(code, len(batch.token))


def _random_chain(
    text: Sequence[int], begin: int, n_nodes: int, leaves: int, rng: np.random.Generator
) -> tuple[DraftTree, list[int]]:
    """Make a chain below text[begin], right or with a wrong tail. Return it and its nodes that follow the text."""
    truth = text[begin + 1 : begin + 1 + n_nodes]
    keep = int(rng.integers(0, len(truth) + 1)) if rng.random() < 0.5 else len(truth)
    tree = DraftTree(1)
    node = ROOT
    for k in range(n_nodes):
        token = truth[k] if k < keep else text[int(rng.integers(0, len(text)))]
        node = tree.add(int(token), node, 1.0, 0)
    return tree, list(range(keep))


def _random_tree(
    text: Sequence[int], begin: int, n_nodes: int, leaves: int, rng: np.random.Generator
) -> tuple[DraftTree, list[int]]:
    """Make a tree of up to `n_nodes` nodes below text[begin]. Return it and its nodes that follow the text."""
    tree = DraftTree(leaves)
    path: list[int] = []
    truth = text[begin + 1 : begin + 1 + int(rng.integers(0, 5))]
    for _ in range(n_nodes):
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


def self_test_parts(n_ctx: int, longest: int) -> list[tuple[int, int, int]]:
    """Return the parts of the text to compare in a context of `n_ctx` tokens: (the token that the context begins with,
    the first and the end of the rows in the context).

    There are FIRST rows, LEAST_ROWS rows at the start of the context, in a short context in several rounds over
    different text, and half as many from DEPTH on if a chain of `longest` tokens fits after them.
    """
    usable = min(LEAST_ROWS, max(n_ctx // 2, 1))
    rounds = [(offset, 0, min(usable, LEAST_ROWS - offset)) for offset in range(0, LEAST_ROWS, usable)]
    end = DEPTH + LEAST_ROWS // 2
    return [(0, 0, min(FIRST, usable)), *rounds, *([(0, DEPTH, end)] if n_ctx > end + longest + 1 else [])]


def self_test(
    backend: Backend, text: Sequence[int], longest: int, announce: Callable[[int, float], None] = lambda *_: None
) -> Comparison:
    """Compare chains of up to `longest` drafted tokens with plain decoding, until a part of the plan differs. `text`
    has real token ids, which repeat if they are too few. After the first rows, `announce` gets how many further rows
    there are, and about how many seconds they take. The logits of 256 rows are kept: 156 MB for a vocabulary of 152k.
    Raises DecodeFailed.
    """
    first, *others = self_test_parts(backend.n_ctx, longest)
    tokens = np.resize(np.asarray(text, np.int32), N_CTX).tolist()
    begun = time.perf_counter()
    result = compare_drafts(backend, tokens[: first[2]], "chains", longest)
    if result.exact:
        left = sum(end - begin for _, begin, end in others)
        announce(left, left * (time.perf_counter() - begun) / result.rows)
    for offset, begin, end in others if result.exact else ():
        result.merge(compare_drafts(backend, tokens[offset : offset + end], "chains", longest, begin))
        if result.different:
            break
    return result


def guarantees_exactness(found: Comparison) -> bool:
    """Return True if the comparison suffices for `--exact`: enough rows and no difference."""
    return found.different == 0 and found.rows >= LEAST_ROWS
