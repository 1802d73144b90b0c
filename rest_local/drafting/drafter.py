"""Grow a draft tree best first over everything the sources propose.

Contract: given rows of any number of sources and an estimate of acceptance for each evidence cell, adds the node with
the highest joint probability next, until the caller's rule says that it no longer pays. Nodes are expanded only when
they join the tree. What was proposed at each expanded node is kept, so that the estimate can learn from what the model
then said, also where nothing was submitted (shadow feedback, DESIGN.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rest_local.drafting.candidates import Candidate, SourceRows
from rest_local.drafting.tree import ROOT, DraftTree

LEAST_PROBABILITY = 0.02  # a node less likely than this never paid on any measured curve


Members = list[tuple[SourceRows, Sequence[int]]]  # rows that agree with the path so far, by source


_NOBODY: tuple[float, int, Members] = (0.0, -1, [])


@dataclass
class Proposal:
    """What was proposed below one node: by source the candidates, and merged by token: probability, source, and the
    rows of every source that go on through it.
    """

    by_source: list[tuple[SourceRows, list[Candidate]]]
    merged: dict[int, tuple[float, int, Members]]


@dataclass
class Draft:
    """A tree and the proposals at its expanded nodes (`ROOT` always among them).

    `lookup_us`: microseconds that asking the sources took, None where nobody was asked; of the papers' policies with
    the growth of the tree, which they do in one.
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
                outcomes += [(cell, proposed == token) for proposed, cell, _ in candidates]
            child = next((c for c in self.tree.children_of(node) if self.tree.token[c] == token), None)
            if child is None:
                break
            node = child
        return outcomes


Estimate = Callable[[int], float]  # evidence cell -> probability that the candidate is accepted, given its parent was
Worth = Callable[[float], bool]  # joint probability of the next best node -> add it?


def propose(members: Members, depth: int, estimate: Estimate) -> Proposal:
    """Candidates of all sources below one node; a token that several propose takes the most confident estimate."""
    by_source = []
    merged: dict[int, tuple[float, int, Members]] = {}
    for rows, numbers in members:
        candidates = rows.candidates(numbers, depth)
        if not candidates:
            continue
        by_source.append((rows, candidates))
        if not merged:
            for token, cell, through in candidates:
                merged[token] = (estimate(cell), rows.source, [(rows, through)])
            continue
        for token, cell, through in candidates:
            probability, (best, source, below) = estimate(cell), merged.get(token, _NOBODY)
            if probability > best:
                best, source = probability, rows.source
            merged[token] = (best, source, [*below, (rows, through)])
    return Proposal(by_source, merged)


def draft(sources: Sequence[SourceRows], estimate: Estimate, worth: Worth, limit: int, leaves: int) -> Draft:
    """Grow a tree of at most `limit` nodes and `leaves` leaves. About 25 us, and 5 us a node.

    `worth` is asked before each addition with the joint probability of the best open candidate; candidates come in
    falling order, so the first no ends the growth.
    """
    result = Draft(DraftTree(leaves))
    tree, proposals = result.tree, result.proposals
    heap: list[tuple[float, int, int, int, int, Members]] = []  # (-joint, arrival, parent, token, source, rows)
    arrivals = 0
    node, joint, depth = ROOT, 1.0, 0
    members: Members = [(rows, range(len(rows))) for rows in sources]
    while True:
        proposal = proposals[node] = propose(members, depth, estimate)
        for token, (probability, source, below) in proposal.merged.items():
            if joint * probability >= LEAST_PROBABILITY:
                arrivals += 1
                heappush(heap, (-joint * probability, arrivals, node, token, source, below))
        if len(tree) >= limit:
            return result
        while heap and not tree.can_add(heap[0][2]):
            heappop(heap)
        if not heap or not worth(-heap[0][0]):
            return result
        minus_joint, _, parent, token, source, members = heappop(heap)
        joint = -minus_joint
        node = tree.add(token, parent, joint, source)
        depth = tree.depth[node]
