"""The tree of what most rows say: REST's trie and SAM-Decoding's branches.

Contract: rows go in, a tree of their most frequent beginnings comes out, within a number of nodes, of leaves and of
nodes at one depth. A node's probability is the share of the rows that go through it. Nothing is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from rest_local.drafting.candidates import SourceRows
from rest_local.drafting.tree import ROOT, DraftTree

Members = list[tuple[SourceRows, Sequence[int]]]  # rows that agree so far, by source


def longest_of(found: Sequence[SourceRows], cap: int) -> tuple[int, Members]:
    """The longest match, counted up to `cap`, and the rows that have it; 0 and none where there is none."""
    longest = min(max((rows.match[0] for rows in found), default=0), cap)
    return longest, [(rows, range(sum(match >= longest for match in rows.match))) for rows in found]


def most_frequent(members: Members, limit: int, leaves: int, per_depth: int | None = None) -> DraftTree:
    """The `limit` beginnings that most rows share, as a tree of at most `leaves` leaves.

    Every beginning of a frequent one is at least as frequent, so the most frequent first is parents first.
    """
    tree = DraftTree(leaves)
    total = sum(len(numbers) for _, numbers in members)
    heap: list[tuple[int, int, int, int, int, Members]] = []  # (-rows, arrival, parent, token, source, rows)
    at_depth: dict[int, int] = {}
    arrivals, node, depth = 0, ROOT, 0
    while len(tree) < limit:
        for token, (count, source, below) in _next(members, depth).items():
            arrivals += 1
            heappush(heap, (-count, arrivals, node, token, source, below))
        while heap and not _fits(tree, heap[0][2], at_depth, per_depth):
            heappop(heap)
        if not heap:
            break
        minus_count, _, parent, token, source, members = heappop(heap)
        node = tree.add(token, parent, -minus_count / total, source)
        depth = tree.depth[node]
        at_depth[depth] = at_depth.get(depth, 0) + 1
    return tree


def _fits(tree: DraftTree, parent: int, at_depth: dict[int, int], per_depth: int | None) -> bool:
    depth = 1 if parent == ROOT else tree.depth[parent] + 1
    return tree.can_add(parent) and (per_depth is None or at_depth.get(depth, 0) < per_depth)


def _next(members: Members, depth: int) -> dict[int, tuple[int, int, Members]]:
    """By token that follows: how many rows say it, the first source that does, and the rows."""
    found: dict[int, tuple[int, int, Members]] = {}
    for rows, numbers in members:
        if depth >= rows.depth:
            continue
        column = rows.column(depth)
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(column[number], []).append(number)
        groups.pop(-1, None)  # where a document ends
        for token, own in groups.items():
            count, source, below = found.get(token, (0, rows.source, []))
            found[token] = (count + len(own), source, [*below, (rows, own)])
    return found
