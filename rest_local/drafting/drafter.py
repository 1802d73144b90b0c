"""Grow a draft tree best first over everything the sources propose.

Contract: given rows of any number of sources and an estimate of acceptance for each evidence cell, adds the node with
the highest joint probability next, until the caller's rule says that it no longer pays. Nodes are expanded only when
they join the tree. What was proposed at each expanded node is kept, so that the estimate can learn from what the model
then said, also where nothing was submitted (shadow feedback, DESIGN.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from rest_local.drafting.candidates import (
    FEW_CANDIDATES,
    GRAMMAR,
    MODEL,
    MOST_CANDIDATES,
    NOTHING,
    Candidate,
    PrecedingBigram,
    SourceRows,
    model_cell,
)
from rest_local.drafting.tree import ROOT, DraftTree

FORCED_FROM = 0.4  # joint probability of a node of another source from which the grammar is asked what follows. In
# `benchmarks.forced` with lookups 0.2, 0.4 and 0.6 take 1 106, 1 118 and 1 128 forward passes, 1 143 without, and 0.08,
# 0.05 and 0.03 ms a step
LEAST_PROBABILITY = 0.02  # a node less likely than this never paid on any measured curve


Members = list[tuple[SourceRows, Sequence[int]]]  # rows that agree with the path so far, by source
Merged = dict[int, tuple[float, int, Members]]  # by token: probability, source, and the rows that go on through it
Calibrated = tuple[int, float, tuple[int, ...]]  # a token, its corrected probability, the numbers of what corrected it

_NOBODY: tuple[float, int, Members] = (0.0, -1, [])


class Proposal:
    """What was proposed below one node: by source the candidates, and merged by token. `calibrated`: their corrected
    probabilities; `asked`: what a draft model said, where it was asked.
    """

    __slots__ = ("asked", "by_source", "calibrated", "merged")

    def __init__(self, by_source: list[tuple[SourceRows, list[Candidate]]], merged: Merged) -> None:
        self.by_source, self.merged = by_source, merged
        self.calibrated: Sequence[Calibrated] = ()
        self.asked: Sequence[Candidate] = ()


@dataclass(slots=True)
class Draft:
    """A tree and the proposals at its expanded nodes (`ROOT` always among them).

    `lookup_us`: microseconds that asking the sources took, None where nobody was asked; of the papers' policies with
    the growth of the tree, which they do in one. `growth`: the tree is still to grow, beside those of others.
    """

    tree: DraftTree
    proposals: dict[int, Proposal] = field(default_factory=dict)
    lookup_us: float | None = None
    growth: Growth | None = None
    skipped: bool = False  # the policy chose not to look anything up

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """(evidence cell, was it right) for every proposal along the tokens the model gave, submitted or not."""
        outcomes: list[tuple[int, bool]] = []
        for proposal, token in self._along(tokens):
            for _, candidates in proposal.by_source:
                outcomes += [(cell, proposed == token) for proposed, cell, _ in candidates]
            outcomes += [(cell, proposed == token) for proposed, cell, _ in proposal.asked]
        return outcomes

    def calibrations(self, tokens: Sequence[int]) -> list[tuple[Sequence[Calibrated], int]]:
        """What was judged at each node along `tokens`, and the token that was right there."""
        return [(proposal.calibrated, token) for proposal, token in self._along(tokens)]

    def hits(self, tokens: Sequence[int]) -> list[bool]:
        """Whether a draft model's first candidate was right, wherever it was asked along `tokens`."""
        return [proposal.asked[0][0] == token for proposal, token in self._along(tokens) if proposal.asked]

    def _along(self, tokens: Sequence[int]) -> Iterator[tuple[Proposal, int]]:
        """The proposals at the nodes of `tokens`, as far as the tree goes along, and the token behind each."""
        node = ROOT
        for token in tokens:
            proposal = self.proposals.get(node)
            if proposal is None:
                return
            yield proposal, token
            child = next((c for c in self.tree.children_of(node) if self.tree.token[c] == token), None)
            if child is None:
                return
            node = child


Estimate = Callable[[int], float]  # evidence cell -> probability that the candidate is accepted, given its parent was
# Corrects the probabilities of the candidates below a node, by what they stand behind.
Calibrate = Callable[[PrecedingBigram, Merged], list[Calibrated]]
Worth = Callable[[float], bool]  # joint probability of the next best node -> add it?
Force = Callable[[Sequence[int]], Sequence[SourceRows]]  # what a grammar allows only one way after a path; 0.1 ms
# Asks a draft model what follows a path, or not: the path, its joint probability, and that of the likeliest token known
# to follow it -> tokens with probabilities, the likeliest first.
Ask = Callable[[Sequence[int], float, float], Sequence[tuple[int, float]]]


def propose(members: Members, depth: int, estimate: Estimate, most: int = MOST_CANDIDATES) -> Proposal:
    """Candidates of all sources below one node, `most` of each; a token that several propose takes the most confident
    estimate.
    """
    by_source = []
    merged: Merged = {}
    for rows, numbers in members:
        candidates = rows.candidates(numbers, depth, most)
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


class Growth:
    """A tree that grows by its likeliest open candidate, a node at a time. 25 us for the first candidates, 5 us a node.

    `draft`: what has grown so far. `most`: nodes it may have. `ask`: what else can be known about a node. `calibrate`:
    what to make of the sources' candidates. `force`: what a grammar adds below nodes of other sources.
    """

    def __init__(
        self,
        sources: Sequence[SourceRows],
        estimate: Estimate,
        most: int,
        leaves: int,
        ask: Ask | None = None,
        calibrate: Calibrate | None = None,
        force: Force | None = None,
    ) -> None:
        self.draft = Draft(DraftTree(leaves))
        self.most = most
        self._estimate, self._ask, self._calibrate, self._force = estimate, ask, calibrate, force
        self._candidates = FEW_CANDIDATES if calibrate is None else MOST_CANDIDATES
        self._newest = sources[0].newest if sources else NOTHING
        self._heap: list[tuple[float, int, int, int, int, Members]] = []  # (-joint, arrival, parent, token, source, ..)
        self._arrivals = 0
        self._expand(ROOT, 1.0, 0, [(rows, range(len(rows))) for rows in sources])

    @property
    def best(self) -> float:
        """Joint probability of the likeliest node that can be added; 0 if none can."""
        heap, tree = self._heap, self.draft.tree
        if len(tree.token) >= self.most:
            return 0.0
        while heap and not tree.can_add(heap[0][2]):
            heappop(heap)
        return -heap[0][0] if heap else 0.0

    def grow(self) -> None:
        """Add that node. Only where `best` is not 0."""
        minus_joint, _, parent, token, source, members = heappop(self._heap)
        tree = self.draft.tree
        node = tree.add(token, parent, -minus_joint, source)
        self._expand(node, -minus_joint, tree.depth[node], members)

    def _expand(self, node: int, joint: float, depth: int, members: Members) -> None:
        if self._force is not None and node != ROOT and joint >= FORCED_FROM:
            members = self._with_forced(self._force, node, members)
        proposal = self.draft.proposals[node] = propose(members, depth, self._estimate, self._candidates)
        merged = proposal.merged
        if self._calibrate is not None and merged:
            proposal.calibrated = self._calibrate(self._behind(node), merged)
            for token, probability, _ in proposal.calibrated:
                _, source, below = merged[token]
                merged[token] = (probability, source, below)
        if self._ask is not None and len(self.draft.tree) < self.most:
            proposal.asked = self._asked(self._ask, node, joint, depth, merged)
        for token, (probability, source, below) in merged.items():
            if joint * probability >= LEAST_PROBABILITY:
                self._arrivals += 1
                heappush(self._heap, (-joint * probability, self._arrivals, node, token, source, below))

    def _with_forced(self, force: Force, node: int, members: Members) -> Members:
        """With what the grammar forces below a node that forced text has not led to."""
        if any(rows.source == GRAMMAR for rows, _ in members):
            return members
        return [*members, *((rows, range(1)) for rows in force(self.draft.tree.path(node)))]

    def _behind(self, node: int) -> PrecedingBigram:
        """The last two tokens of the path to a node."""
        if node == ROOT:
            return self._newest
        tree = self.draft.tree
        parent = tree.parent[node]
        return (self._newest[1] if parent == ROOT else tree.token[parent], tree.token[node])

    def _asked(self, ask: Ask, node: int, joint: float, depth: int, merged: Merged) -> list[Candidate]:
        """What a draft model says about a node, which joins `merged`."""
        asked: list[Candidate] = []
        known = max((best for best, _, _ in merged.values()), default=0.0)
        for token, own in ask(self.draft.tree.path(node), joint, known):
            cell = model_cell(depth, own)
            asked.append((token, cell, ()))
            probability, (best, source, below) = self._estimate(cell), merged.get(token, _NOBODY)
            if probability > best:
                best, source = probability, MODEL
            merged[token] = (best, source, below)
        return asked


def draft(
    sources: Sequence[SourceRows],
    estimate: Estimate,
    worth: Worth,
    limit: int,
    leaves: int,
    ask: Ask | None = None,
    calibrate: Calibrate | None = None,
    force: Force | None = None,
) -> Draft:
    """Grow a tree of at most `limit` nodes and `leaves` leaves.

    `worth` is asked before each addition with the joint probability of the best open candidate; candidates come in
    falling order, so the first no ends the growth.
    """
    growth = Growth(sources, estimate, limit, leaves, ask, calibrate, force)
    while (best := growth.best) and worth(best):
        growth.grow()
    return growth.draft


class Growing(Protocol):
    """`Growth`, or somebody's."""

    @property
    def best(self) -> float: ...
    def grow(self) -> None: ...


def grow_together(growths: Sequence[Growing], worth: Worth, limit: int) -> list[int]:
    """Grow many trees, the likeliest node of all of them next, to `limit` nodes in all; by node the tree it went to.

    `worth` as for `draft`: since candidates come in falling order over all trees, the first no ends the growth.
    """
    order: list[int] = []
    heap = [(-best, number) for number, growth in enumerate(growths) if (best := growth.best)]
    heapify(heap)
    while heap and len(order) < limit and worth(-heap[0][0]):
        number = heap[0][1]
        growths[number].grow()
        order.append(number)
        if best := growths[number].best:
            heapreplace(heap, (-best, number))
        else:
            heappop(heap)
    return order
