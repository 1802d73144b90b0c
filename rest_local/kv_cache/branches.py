"""The sequence ids of a slot: one for each leaf of a tree, attached to the cells of its text.

- The first id is attached to the whole committed text. Another one is brought up to it when a tree has a leaf for it.
- Every `remove` and `copy` passes over all cells of the context, those of other slots too (12 us at 23 000 cells). So a
  step makes one for each leaf, not for each id. A copy covers what an id missed (all of 7 000 cells take 0.6 ms).

It knows positions, not tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from rest_local.drafting.tree import DraftTree, Layout
from rest_local.kv_cache.backend import Backend, remove_tail


class Branches:
    """The sequence ids of one slot: `n` from `first_id` on, one for each leaf of a draft.

    The first `n_attached` of them are attached to all cells of the text.
    """

    def __init__(self, backend: Backend, first_id: int, n: int) -> None:
        self._backend, self.first_id, self.n = backend, first_id, n
        self.n_attached = n
        self._attached_upto = [0] * n  # positions, of the ids that are not attached to all cells
        # One call removes from all ids where the context has no others.
        self._is_alone = n == backend.n_branches * backend.n_slots

    @property
    def spare(self) -> int:
        """Return an id that holds nothing after `release`."""
        return self.first_id + 1

    def attach(self, n: int, end: int) -> None:
        """Attach the first `n` ids to all cells before position `end`."""
        for branch in range(self.n_attached, n):
            if self._attached_upto[branch] < end:
                self._backend.copy(self.first_id, self.first_id + branch, self._attached_upto[branch], end)
        self.n_attached = n

    def attach_first(self) -> None:
        """Note that cells were restored or copied to the first id alone."""
        self.n_attached, self._attached_upto = 1, [0] * self.n

    def release(self) -> bool:
        """Detach every id but the first, and return whether that changes anything. The next tree attaches them.

        A sliding window drops old cells id by id, so that an id that was not brought up to the newest tokens can come
        to hold others than the first. llama.cpp then refuses a token that has both ids (-1).
        """
        if self.n_attached == 1 and not any(self._attached_upto[1:]):
            return False
        released = [self._backend.remove(self.first_id + branch, 0, -1) for branch in range(1, self.n)]
        self.attach_first()
        return all(released)

    def remove(self, p0: int) -> bool:
        """Remove the cells from position `p0` on from every id. From an id that is not attached to all cells, remove
        also what an interrupted `copy` may have left.
        """
        starts = [p0 if b < self.n_attached else min(upto, p0) for b, upto in enumerate(self._attached_upto)]
        self._attached_upto = starts
        if self._is_alone:
            if not remove_tail(self._backend, p0):
                return False
            starts = starts[self.n_attached :]
        ids = range(self.first_id + self.n - len(starts), self.first_id + self.n)
        removed = [self._backend.remove(seq, start, -1) for seq, start in zip(ids, starts, strict=True)]
        return all(removed)  # every id is tried, also after one that failed

    def clear(self) -> bool:
        """Remove all cells. Then every id is attached to all that there are."""
        self.n_attached = self.n
        return self.remove(0)

    def accept(self, begin: int, tree: DraftTree, layout: Layout, path: Sequence[int]) -> bool:
        """Free the cells of rejected nodes of a tree whose first level is at position `begin`, and return whether that
        worked.
        """
        along = [0] * tree.n_leaves  # how many accepted nodes lie on the way to each leaf
        for depth, node in enumerate(path, 1):
            for leaf in range(layout.low[node], layout.low[node] + layout.count[node]):
                along[leaf] = depth
        accepted = len(path)
        if accepted < len(tree):
            below = bool(tree.children[path[-1]] if path else tree.root_children)  # rejected, below the last accepted
            if below and self._is_alone and not remove_tail(self._backend, begin + accepted):
                return False
            for leaf, depth in enumerate(along):
                wrong = depth < accepted or (below and not self._is_alone)
                if wrong and not self._backend.remove(self.first_id + leaf, begin + depth, -1):
                    return False
        if path:
            self._follow(begin, along, accepted, layout.low[path[-1]])
        return True

    def _follow(self, begin: int, along: Sequence[int], accepted: int, leader: int) -> None:
        """Note which ids hold the accepted tokens. The first one always does."""
        if along[0] < accepted:
            self._backend.copy(self.first_id + leader, self.first_id, begin + along[0], begin + accepted)
        for branch in range(1, self.n_attached):
            self._attached_upto[branch] = begin + (along[branch] if branch < len(along) else 0)
        end = begin + accepted
        behind = (b for b in range(1, self.n_attached) if self._attached_upto[b] < end)
        self.n_attached = next(behind, self.n_attached)
