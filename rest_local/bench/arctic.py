"""ArcticInference's suffix decoding as a peer, by its own code, where its package is installed.

Contract: `available` says why not, else `Arctic` is a `Peer`. The local tree holds the request, the global one the
earlier answers that the other side has too, and nothing else: the answers under test are taken out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rest_local.bench.peers import Peer
from rest_local.drafting.candidates import SOURCE_NUMBER
from rest_local.drafting.tree import DraftTree

MODULE = "arctic_inference.suffix_decoding"
REQUEST = -1  # the name of the request under test
# Its default, and its tree at three lengths: the points that DESIGN.md section 5 compares with.
VARIANTS: tuple[dict[str, Any], ...] = ({}, *({"factor": factor, "tree": True} for factor in (1.0, 2.0, 4.0)))


def available() -> str | None:
    """None where the package can be used, else the reason why not."""
    try:
        import_module(MODULE)
    except ImportError as error:
        return f"ArcticInference cannot be imported ({error}); pip install arctic-inference"
    return None


class Arctic(Peer):
    """`factor`: drafts are at most this many times as long as the match. `least`: probability a token must have."""

    def __init__(
        self, history: Sequence[Sequence[int]] = (), *, factor: float = 1.0, least: float = 0.1, tree: bool = False
    ) -> None:
        super().__init__(history)
        self.name = f"arctic-{'tree' if tree else 'chain'}-{factor:g}x-{least:g}"
        self._options: dict[str, Any] = {"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": tree}
        self._cache = import_module(MODULE).SuffixDecodingCache()
        for number, answer in enumerate(history):
            self._cache.start_request(number, [])
            self._cache.add_active_response(number, list(answer))
            self._cache.stop_request(number)

    def restart(self, tokens: Sequence[int]) -> None:
        if REQUEST in self._cache.active_requests:
            self._cache.stop_request(REQUEST)
            self._cache.evict_cached_response(REQUEST)
        self._cache.start_request(REQUEST, list(tokens))
        self.tokens = list(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self._cache.add_active_response(REQUEST, list(tokens))

    def propose(self, limit: int) -> DraftTree:
        context = self.tokens[-self._cache.max_tree_depth :]
        found = self._cache.speculate(REQUEST, context, max_spec_tokens=limit, **self._options)
        tree = DraftTree(max_leaves=max(len(found.token_ids), 1))
        for token, parent, probability in zip(found.token_ids, found.parents, found.probs, strict=True):
            tree.add(token, parent, probability, SOURCE_NUMBER["context"])
        return tree
