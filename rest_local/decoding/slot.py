"""One sequence in the memory cells: its committed tokens, and the sequence ids of its branches.

Contract: every branch id stays attached to the whole committed prefix; after a step only the tail is touched
(DESIGN.md section 4: full-range copies cost 10 ms at 7 000 cells, tails 0.1 ms). A failed removal is never ignored: the
cells are cleared and the tokens evaluated again at the next use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.backend import Backend, remove_tail
from rest_local.drafting.tree import DraftTree, Layout

Int32 = NDArray[np.int32]


class Slot:
    """`tokens` are evaluated and in the cells; `len(tokens)` is the position of the next token."""

    def __init__(self, backend: Backend, first_id: int = 0, n_branches: int | None = None) -> None:
        self.backend = backend
        self.first_id = first_id
        self.n_branches = n_branches or backend.n_branches
        self.tokens: list[int] = []

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def keep_prefix(self, prompt: Sequence[int]) -> int:
        """Keep what the cells share with `prompt`, drop the rest; return how many tokens are kept."""
        limit = min(len(prompt), len(self.tokens))
        own = np.asarray(self.tokens[:limit], np.int64)
        differ = np.flatnonzero(own != np.asarray(prompt[:limit], np.int64))
        kept = int(differ[0]) if len(differ) else limit
        self.rewind(kept)  # also where nothing differs: an interrupt may have left cells that nobody committed
        return self.n_past

    def rewind(self, n_past: int) -> None:
        """Forget everything from position `n_past` on, drafts included. Where the model cannot, start from nothing."""
        del self.tokens[n_past:]
        if not self._remove_all(n_past):
            self.clear()

    def clear(self) -> None:
        """Free this slot's cells."""
        self.tokens.clear()
        if not self._remove_all(0):
            self.backend.clear()

    def fill_prompt(self, tokens: Sequence[int]) -> None:
        """Load the next committed tokens into the batch, without logits."""
        n_past = self.n_past
        positions = np.arange(n_past, n_past + len(tokens))
        self.backend.batch.fill(tokens, positions, self.first_id, self.n_branches, 0)

    def fill_step(self, root: int, tree: DraftTree, layout: Layout | None) -> None:
        """Load the root and its draft into the batch, with the logits of every node."""
        batch = self.backend.batch
        if layout is None:
            batch.fill([root], self.n_past, self.first_id, self.n_branches, 1)
            return
        token, depth, low, count = layout.table(root, self.n_branches, tree)
        batch.fill(token, self.n_past + depth, self.first_id + low, count, 1)

    def accept(self, root: int, tree: DraftTree, layout: Layout | None, path: Sequence[int]) -> bool:
        """Commit the root and the accepted nodes, free the others. False: the cells were lost and must be rebuilt."""
        start = self.n_past
        end = start + 1 + len(path)
        self.tokens.append(root)
        self.tokens.extend(tree.token[node] for node in path)
        if layout is None:
            return True
        if len(path) < len(tree) and not self._remove_all(end):
            return False
        if tree.n_leaves > 1 and path:
            return self._attach_branches(start, end, tree, layout, path)
        # without an accepted node, or in a chain, all branches agree up to `end`
        return True

    def _attach_branches(self, start: int, end: int, tree: DraftTree, layout: Layout, path: Sequence[int]) -> bool:
        """Give every branch the accepted tail, from where it left the accepted path on."""
        leader = self.first_id + layout.low[path[-1]]
        diverged = [0] * self.n_branches  # by branch: how many accepted nodes it went along with
        for depth, node in enumerate(path, 1):
            for branch in range(layout.low[node], layout.low[node] + layout.count[node]):
                diverged[branch] = depth
        for branch, along in enumerate(diverged):
            if along == len(path):
                continue
            position = start + 1 + along
            if not self.backend.remove(self.first_id + branch, position, -1):
                return False
            self.backend.copy(leader, self.first_id + branch, position, end)
        return True

    def _remove_all(self, p0: int) -> bool:
        if self.n_branches == self.backend.n_branches:
            return remove_tail(self.backend, p0)
        ids = range(self.first_id, self.first_id + self.n_branches)
        removed = [self.backend.remove(seq, p0, -1) for seq in ids]  # every one, also behind one that failed
        return all(removed)
