"""Grow a draft tree best first from the proposals of all sources.

Contract: given rows of any number of sources and an estimate of acceptance for each evidence cell, the node with the
highest joint probability is added next, until the caller's rule says that a node no longer pays. A node is expanded
when it joins the tree. The proposals at each expanded node are kept, so that the estimate learns from the tokens that
the model then chooses, also if no draft was submitted (DESIGN.md section 6).

`origins_of` names the origin of accepted draft tokens, for display on the server's page: a draft and the tokens of the
step go in; for each token the evidence of its draft comes out. It costs about 5 us for a token, and for stored text it
reads the document up to the match, so it is computed only on request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from rest_local.drafting.candidates import (
    FEW_CANDIDATES,
    GRAMMAR,
    LOGITS,
    MAX_CANDIDATES,
    MODEL,
    NO_BIGRAM,
    SOURCES,
    Candidate,
    PrecedingBigram,
    SourceRows,
    model_cell,
)
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore

MIN_PROBABILITY = 0.02  # a node below this probability paid on no measured cost curve
FORCED_FROM = 0.4  # joint probability of a node of another source from which the grammar is asked what follows. In
# `benchmarks.forced` with lookups 0.2, 0.4 and 0.6 take 1 106, 1 118 and 1 128 forward passes, 1 143 without, and 0.08,
# 0.05 and 0.03 ms a step


Members = list[tuple[SourceRows, Sequence[int]]]  # the rows that agree with the path so far, by source
Merged = dict[int, tuple[float, int, Members]]  # by token: probability, source, and the rows that continue with it
Calibrated = tuple[int, float, tuple[int, ...]]  # a token, its corrected probability, the features that corrected it

_NO_CANDIDATE: tuple[float, int, Members] = (0.0, -1, [])


class Proposal:
    """The proposals below one node: candidates by source, and merged by token. `calibrated`: their corrected
    probabilities. `from_model`: the candidates of a draft model, if it was queried.
    """

    __slots__ = ("by_source", "calibrated", "from_model", "merged")

    def __init__(self, by_source: list[tuple[SourceRows, list[Candidate]]], merged: Merged) -> None:
        self.by_source, self.merged = by_source, merged
        self.calibrated: Sequence[Calibrated] = ()
        self.from_model: Sequence[Candidate] = ()


@dataclass(slots=True)
class Draft:
    """A tree and the proposals at its expanded nodes, which include `ROOT`.

    `lookup_us`: microseconds of the lookups, None without a lookup. The policies of papers look up and grow in one go,
    so theirs include the growth. `growth`: set if the tree will still grow, together with those of other requests.
    """

    tree: DraftTree
    proposals: dict[int, Proposal] = field(default_factory=dict)
    lookup_us: float | None = None
    growth: Growth | None = None
    skipped: bool = False  # the policy decided against a lookup

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """(evidence cell, was it right) of every proposal along the tokens of the model, submitted or not."""
        outcomes: list[tuple[int, bool]] = []
        for proposal, token in self._along(tokens):
            for _, candidates in proposal.by_source:
                outcomes += [(cell, proposed == token) for proposed, cell, _ in candidates]
            outcomes += [(cell, proposed == token) for proposed, cell, _ in proposal.from_model]
        return outcomes

    def calibrations(self, tokens: Sequence[int]) -> list[tuple[Sequence[Calibrated], int]]:
        """The calibrated probabilities at each node along `tokens`, and the token that was right there."""
        return [(proposal.calibrated, token) for proposal, token in self._along(tokens)]

    def hits(self, tokens: Sequence[int]) -> list[bool]:
        """For each query to a draft model along `tokens`: whether its first candidate was right."""
        return [proposal.from_model[0][0] == token for proposal, token in self._along(tokens) if proposal.from_model]

    def _along(self, tokens: Sequence[int]) -> Iterator[tuple[Proposal, int]]:
        """The proposals at the nodes along `tokens`, each with the token that followed it."""
        node: int | None = ROOT
        for token in tokens:
            if node is None or (proposal := self.proposals.get(node)) is None:
                return
            yield proposal, token
            node = self.tree.child(node, token)


Estimate = Callable[[int], float]  # evidence cell -> probability that the candidate is accepted if its parent is
# Corrects the probabilities of the candidates below a node, by the two tokens before them.
Calibrate = Callable[[PrecedingBigram, Merged], list[Calibrated]]
Worth = Callable[[float], bool]  # joint probability of the next best node -> add it?
Force = Callable[[Sequence[int]], Sequence[SourceRows]]  # what a grammar allows only one way after a path; 0.1 ms
# Queries a draft model, or decides against it: a path, its joint probability, and the probability of the likeliest
# token known to follow it -> tokens with probabilities, the likeliest first.
Ask = Callable[[Sequence[int], float, float], Sequence[tuple[int, float]]]


def propose(members: Members, depth: int, estimate: Estimate, most: int = MAX_CANDIDATES) -> Proposal:
    """Candidates below one node, at most `most` from each source. If several sources propose a token, the highest
    estimate counts.
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
            probability, (best, source, below) = estimate(cell), merged.get(token, _NO_CANDIDATE)
            if probability > best:
                best, source = probability, rows.source
            merged[token] = (best, source, [*below, (rows, through)])
    return Proposal(by_source, merged)


class Growth:
    """A tree that grows by its likeliest open candidate, one node at a time. 25 us for the first candidates, then 5 us
    for each node.

    `draft`: the tree so far. `most`: the maximum of nodes. `ask`: queries a draft model. `calibrate`: corrects the
    probabilities of the sources' candidates. `force`: what a grammar adds below nodes of other sources.
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
        self._candidates = FEW_CANDIDATES if calibrate is None else MAX_CANDIDATES
        self._newest = sources[0].newest if sources else NO_BIGRAM
        self._recycled = next((rows for rows in sources if rows.source == LOGITS), None)
        self._heap: list[tuple[float, int, int, int, int, Members]] = []  # (-joint, arrival, parent, token, source, ..)
        self._arrivals = 0
        self._expand(ROOT, 1.0, 0, [(rows, range(len(rows))) for rows in sources])

    @property
    def best(self) -> float:
        """Joint probability of the likeliest node that can be added; 0 if there is none."""
        heap, tree = self._heap, self.draft.tree
        if len(tree.token) >= self.most:
            return 0.0
        while heap and not tree.can_add(heap[0][2]):
            heappop(heap)
        return -heap[0][0] if heap else 0.0

    def grow(self) -> None:
        """Add that node. Call it only while `best` is not 0."""
        minus_joint, _, parent, token, source, members = heappop(self._heap)
        tree = self.draft.tree
        node = tree.add(token, parent, -minus_joint, source)
        self._expand(node, -minus_joint, tree.depth[node], members)

    def _expand(self, node: int, joint: float, depth: int, members: Members) -> None:
        if self._force is not None and node != ROOT and joint >= FORCED_FROM:
            members = self._with_forced(self._force, node, members)
        if self._recycled is not None:  # it continues the nodes of all sources
            others = [each for each in members if each[0] is not self._recycled]
            members = [*others, (self._recycled, self._preceding_bigram(node))]
        proposal = self.draft.proposals[node] = propose(members, depth, self._estimate, self._candidates)
        merged = proposal.merged
        if self._calibrate is not None and merged:
            proposal.calibrated = self._calibrate(self._preceding_bigram(node), merged)
            for token, probability, _ in proposal.calibrated:
                _, source, below = merged[token]
                merged[token] = (probability, source, below)
        if self._ask is not None and len(self.draft.tree) < self.most:
            proposal.from_model = self._query_model(self._ask, node, joint, depth, merged)
        for token, (probability, source, below) in merged.items():
            if joint * probability >= MIN_PROBABILITY:
                self._arrivals += 1
                heappush(self._heap, (-joint * probability, self._arrivals, node, token, source, below))

    def _with_forced(self, force: Force, node: int, members: Members) -> Members:
        """With what the grammar forces below a node that forced text has not led to."""
        if any(rows.source == GRAMMAR for rows, _ in members):
            return members
        return [*members, *((rows, range(1)) for rows in force(self.draft.tree.path(node)))]

    def _preceding_bigram(self, node: int) -> PrecedingBigram:
        """The last two tokens of the path to a node."""
        if node == ROOT:
            return self._newest
        tree = self.draft.tree
        parent = tree.parent[node]
        return (self._newest[1] if parent == ROOT else tree.token[parent], tree.token[node])

    def _query_model(self, ask: Ask, node: int, joint: float, depth: int, merged: Merged) -> list[Candidate]:
        """The candidates of a draft model below a node. They are added to `merged`."""
        found: list[Candidate] = []
        known = max((best for best, _, _ in merged.values()), default=0.0)
        for token, own in ask(self.draft.tree.path(node), joint, known):
            cell = model_cell(depth, own)
            found.append((token, cell, ()))
            probability, (best, source, below) = self._estimate(cell), merged.get(token, _NO_CANDIDATE)
            if probability > best:
                best, source = probability, MODEL
            merged[token] = (best, source, below)
        return found


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

    `worth` is called before each addition with the joint probability of the best open candidate. Candidates come in
    descending order, so the first False ends the growth.
    """
    growth = Growth(sources, estimate, limit, leaves, ask, calibrate, force)
    while (best := growth.best) and worth(best):
        growth.grow()
    return growth.draft


class Growable(Protocol):
    """`Growth`, or a fake in tests."""

    @property
    def best(self) -> float: ...
    def grow(self) -> None: ...


def grow_together(growths: Sequence[Growable], worth: Worth, limit: int) -> list[int]:
    """Grow several trees, always by the likeliest node of all, to `limit` nodes in total. Returns the number of the
    tree that each node was added to.

    `worth` as for `draft`: candidates come in descending order over all trees, so the first False ends the growth.
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


log = logging.getLogger("rest_local.drafting")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Origin:
    """`probability`: joint, as the planner estimated it. `match`: number of context tokens that agree. `file` and
    `line` (from 1): the place of the longest match, if it is in stored text.
    """

    source: str
    probability: float
    match: int
    file: str | None = None
    line: int | None = None


def origins_of(draft: Draft, tokens: Sequence[int], decode: Decode) -> list[Origin | None]:
    """The origin of each token; None from the first token that was not drafted."""
    found: list[Origin | None] = []
    node = ROOT
    for depth, token in enumerate(tokens):
        child = draft.tree.child(node, token)
        if child is None:
            break
        found.append(_origin(draft, node, child, depth, decode))
        node = child
    return found + [None] * (len(tokens) - len(found))


def _origin(draft: Draft, parent: int, node: int, depth: int, decode: Decode) -> Origin:
    tree = draft.tree
    source, probability = tree.source[node], tree.probability[node]
    proposal = draft.proposals.get(parent)
    if proposal is None or tree.token[node] not in proposal.merged:  # the policy keeps no evidence
        return Origin(SOURCES[source], probability, 0)
    members = proposal.merged[tree.token[node]][2]
    of_source = [(rows, numbers[0]) for rows, numbers in members if rows.source == source]
    if not of_source or source in (GRAMMAR, LOGITS):  # drafted by a draft model or forced by a grammar: it has no place in a text
        return Origin(SOURCES[source], probability, 0)
    rows, first = max(of_source, key=lambda found: found[0].match[found[1]])  # of several datastores the better one
    name, line = _place(rows.store, int(rows.positions[first]) + depth, decode)
    return Origin(SOURCES[source], probability, rows.match[first] + depth, name, line)


def _place(store: Any, position: int, decode: Decode) -> tuple[str | None, int | None]:
    if not isinstance(store, Datastore):
        return None, None
    try:
        name, line, _ = store.place(position, decode)
        return name, line
    except (DatastoreError, OSError, ValueError, IndexError) as error:  # a damaged table must not end the answer
        log.warning("datastore %s: the origin of a draft is unknown (%s)", store.path, error)
        return None, None
