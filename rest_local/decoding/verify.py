"""Walk a verified tree from the root: how far the model's own tokens go along it.

Contract: rows of logits by node go in through `choose`, the accepted nodes and the model's next token come out. Each
visited node is sampled once, in order, and nothing else is: so a seeded run sees the draws of plain decoding, and the
cost is accepted + 1 rows. For drafts without probabilities of their own, accepting where the sampled token is a child
is
exact (DESIGN.md section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rest_local.drafting.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Verdict:
    """`path`: accepted nodes from the root down; `tokens`: theirs and then the model's own, len(path) + 1."""

    path: list[int]
    tokens: list[int]


def verify(tree: DraftTree, choose: Callable[[int], int], ends: Callable[[int], bool]) -> Verdict:
    """`choose(node)` samples the token after a node (`ROOT` first); `ends(token)`: nothing follows this token."""
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    while True:
        token = choose(node)
        tokens.append(token)
        child = next((c for c in tree.children_of(node) if tree.token[c] == token), None)
        if child is None or ends(token):
            return Verdict(path, tokens)
        path.append(child)
        node = child
