"""The text of MTP layers that are chained: layer i of them predicts the i-th drafted token (llama.cpp's way, too).

Each layer has contents of its own in the cells. So a committed pair is evaluated once for each layer, and a path of
length d by layer d alone, from the root on: root and path are evaluated anew for each further token. A chain has at
most as many tokens as there are layers, and a text has one in a step, without branches. Texts at different depths take
passes of their own, because a decode computes with one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from rest_local.drafting.models.heads import HeadText, Rows


class ChainedText(HeadText):
    """The text of one slot in the cells of chained layers. The pairs below `_done` are there for every layer, and
    nothing after them for more than one, so the root of a step is a waiting pair of the next one.
    """

    def passes(self, path: Sequence[int]) -> int:
        """One for each token of the path that was not evaluated in this step, one for the root, and one more for each
        further layer if pairs are waiting. 0 for a path that is too long, or branches off the chain of this step.
        """
        if not self._is_of_chain(tuple(path)):
            return 0
        catching_up = self._head.n_layers - 1 if self._pending and () not in self._states else 0
        return super().passes(path) + catching_up

    def commit_pending(self) -> None:
        """The pending pairs are in the cells for every layer; the root is for the first one only."""
        self._done = self._seen
        self._pending.clear()

    def place(self, path: tuple[int, ...], batch: Rows) -> None:
        """Add the pending pairs and the root to a pass of the first layer, or the root and the first part of the path
        that is not evaluated to a pass of the layer that answers it. A pass has one layer, and one path of each text.
        """
        if not self.can_ask or not self._is_of_chain(path) or any(text is self for text in batch.texts):
            return
        depth = next((n + 1 for n in range(len(path), -1, -1) if path[:n] in self._states), 0)
        if depth > len(path) or batch.layer not in (None, depth):
            return
        if depth:
            self._place_chain(path[:depth], batch)
        else:
            self._place_root(batch)
        if batch.tokens:
            batch.layer = depth

    def _is_of_chain(self, path: tuple[int, ...]) -> bool:
        chain = max(self._states, key=len, default=())
        return len(path) < self._head.n_layers and all(a == b for a, b in zip(path, chain, strict=False))

    def _place_chain(self, path: tuple[int, ...], batch: Rows) -> None:
        if len(batch.tokens) + 1 + len(path) > self._head.context.max_outputs:
            return
        root = len(self._text) - 1
        self._tips[self.seq] = path
        tokens, last = [int(self._text[root]), *path], len(path)
        hidden = [self._before_root(), *(self._states[path[:n]][1] for n in range(last))]
        for i, (token, state) in enumerate(zip(tokens, hidden, strict=True)):
            batch.add(self, path, token, self._place_of(root + i), self.seq, state, own=i > 0, wanted=i == last)
