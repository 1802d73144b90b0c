"""Grow a draft tree best first over everything the sources propose.

Contract: given rows of any number of sources and an estimate of acceptance for each evidence cell, adds the node with
the highest joint probability next, until the caller's rule says that it no longer pays. Nodes are expanded only when
they join the tree. What was proposed at each expanded node is kept, so that the estimate can learn from what the model
then said, also where nothing was submitted (shadow feedback, DESIGN.md section 6).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rest_local.drafting.candidates import Candidate, SourceRows
from rest_local.drafting.tree import ROOT, DraftTree

LEAST_PROBABILITY = 0.02  # a node less likely than this never paid on any measured curve


@dataclass
class Proposal:
    """What was proposed below one node: by source the candidates, and the merged (token -> probability, source)."""

    by_source: list[tuple[SourceRows, list[Candidate]]]
    merged: dict[int, tuple[float, int]]


@dataclass
class Draft:
    """A tree and the proposals at its expanded nodes (`ROOT` always among them).

    `lookup_us`: microseconds that asking the sources took, None where nobody was asked.
    """

    tree: DraftTree
    proposals: dict[int, Proposal] = field(default_factory=dict)
    lookup_us: float | None = None

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """(evidence cell, was it right) for every proposal along the tokens the model gave, submitted or not."""
        outcomes: list[tuple[int, bool]] = []
        node = ROOT
        for token in tokens:
            proposal = self.proposals.get(node)
            if proposal is None:
                break
            for _, candidates in proposal.by_source:
                outcomes.extend((candidate.cell, candidate.token == token) for candidate in candidates)
            child = next((c for c in self.tree.children_of(node) if self.tree.token[c] == token), None)
            if child is None:
                break
            node = child
        return outcomes


Estimate = Callable[[int], float]  # evidence cell -> probability that the candidate is accepted, given its parent was
Worth = Callable[[float], bool]  # joint probability of the next best node -> add it?


def propose(members: Sequence[tuple[SourceRows, Sequence[int]]], depth: int, estimate: Estimate) -> Proposal:
    """Candidates of all sources below one node; a token that several propose takes the most confident estimate."""
    by_source = []
    merged: dict[int, tuple[float, int]] = {}
    for rows, numbers in members:
        candidates = rows.candidates(numbers, depth)
        if not candidates:
            continue
        by_source.append((rows, candidates))
        for candidate in candidates:
            probability = estimate(candidate.cell)
            if candidate.token not in merged or probability > merged[candidate.token][0]:
                merged[candidate.token] = (probability, rows.source)
    return Proposal(by_source, merged)


def draft(sources: Sequence[SourceRows], estimate: Estimate, worth: Worth, limit: int, leaves: int) -> Draft:
    """Grow a tree of at most `limit` nodes and `leaves` leaves. About 40 us, and 8 us a node.

    `worth` is asked before each addition with the joint probability of the best open candidate; candidates come in
    falling order, so the first no ends the growth.
    """
    result = Draft(DraftTree(leaves))
    tree = result.tree
    heap: list[tuple[float, int, int, int, int]] = []  # (-joint, order of arrival, parent, token, source)
    arrivals = 0

    def expand(node: int, joint: float, members: Sequence[tuple[SourceRows, Sequence[int]]], depth: int) -> None:
        nonlocal arrivals
        proposal = result.proposals[node] = propose(members, depth, estimate)
        for token, (probability, source) in proposal.merged.items():
            if joint * probability >= LEAST_PROBABILITY:
                arrivals += 1
                heapq.heappush(heap, (-joint * probability, arrivals, node, token, source))

    expand(ROOT, 1.0, [(rows, range(len(rows))) for rows in sources], 0)
    while heap and len(tree) < limit:
        minus_joint, _, parent, token, source = heapq.heappop(heap)
        if not tree.can_add(parent):
            continue
        if not worth(-minus_joint):
            break
        node = tree.add(token, parent, -minus_joint, source)
        members = [
            (rows, candidate.rows)
            for rows, candidates in result.proposals[parent].by_source
            for candidate in candidates
            if candidate.token == token
        ]
        expand(node, -minus_joint, members, tree.depth[node])
    return result
