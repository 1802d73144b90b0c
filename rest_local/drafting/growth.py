"""Grow a draft tree best first from the proposals of all sources.

Contract: given rows of any number of sources and an estimate of acceptance for each evidence cell, `Growth` adds the
node with the highest joint probability next, as often as its caller (`rest_local.planning.plan.grow`) asks for it. A
node is expanded when it joins the tree. The proposals at each expanded node are kept, so that the estimate learns from
the tokens that the model then chooses, also if no draft was submitted (DESIGN.md section 6).

A model that drafts is asked in passes, not node by node: each expanded node is open until its answer is there. So a
pass serves all branches of a level (EAGLE-2) and all requests, and text that another source knows is not asked for.

`origins_of` says where accepted draft tokens come from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import Any, NamedTuple

from rest_local.drafting.candidates import (
    GRAMMAR,
    MODEL,
    NO_BIGRAM,
    NO_CANDIDATE,
    SOURCES,
    Candidate,
    Members,
    Merged,
    ModelRows,
    PrecedingBigram,
    SourceRows,
)
from rest_local.drafting.models.drafter import BRANCHES, DraftText
from rest_local.drafting.tree import MIN_PROBABILITY, ROOT, DraftTree
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore

# The probability of a candidate from which a grammar is asked what follows it. JSON answers with lookups take 1 106,
# 1 118 and 1 128 forward passes with 0.2, 0.4 and 0.6.
LIKELY = 0.4

Calibrated = tuple[int, float, tuple[int, ...]]  # a token, its corrected probability, the features that corrected it


class OpenNode(NamedTuple):
    """What follows a path? `number`: of the path, in the growth's `ModelRows`. `joint`: its probability. `known`: the
    probability of the likeliest token that is known to follow it.
    """

    number: int
    path: tuple[int, ...]
    joint: float
    known: float


class Proposal:
    """The proposals below one node: candidates by source, and merged by token. `calibrated`: their corrected
    probabilities.
    """

    __slots__ = ("by_source", "calibrated", "merged")

    def __init__(self, by_source: list[tuple[SourceRows, list[Candidate]]], merged: Merged) -> None:
        self.by_source, self.merged = by_source, merged
        self.calibrated: Sequence[Calibrated] = ()

    @property
    def best(self) -> float:
        """The probability of the likeliest candidate; 0 without any."""
        return max((probability for probability, _, _ in self.merged.values()), default=0.0)


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
    model_budget: DraftModelBudget | None = None  # set with `growth` if a drafting model can be asked
    skipped: bool = False  # the policy decided against a lookup

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """(evidence cell, was it right) of every proposal along the tokens of the model, submitted or not."""
        outcomes: list[tuple[int, bool]] = []
        for proposal, token in self._along(tokens):
            for _, candidates in proposal.by_source:
                outcomes += [(cell, proposed == token) for proposed, cell, _ in candidates]
        return outcomes

    def calibrations(self, tokens: Sequence[int]) -> list[tuple[Sequence[Calibrated], int]]:
        """The calibrated probabilities at each node along `tokens`, and the token that was right there."""
        return [(proposal.calibrated, token) for proposal, token in self._along(tokens)]

    def confidences(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """For each answer of a drafting model along `tokens`: tokens below the root, and the probability of its first
        candidate."""
        return [
            (depth, proposal.merged[candidates[0][0]][0])
            for depth, (proposal, _) in enumerate(self._along(tokens))
            for rows, candidates in proposal.by_source
            if rows.source == MODEL
        ]

    def added(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` were drafted because a drafting model alone proposed them."""
        count = 0
        node = ROOT
        for proposal, token in self._along(tokens):
            child = self.tree.child(node, token)
            if child is None:
                break
            count += all(rows.source == MODEL for rows, _ in proposal.merged[token][2])
            node = child
        return count

    def _along(self, tokens: Sequence[int]) -> Iterator[tuple[Proposal, int]]:
        """The proposals at the nodes along `tokens`, each with the token that followed it."""
        node: int | None = ROOT
        for token in tokens:
            if node is None or (proposal := self.proposals.get(node)) is None:
                return
            yield proposal, token
            node = self.tree.child(node, token)


def likely_outcome(draft: Draft, tree: DraftTree, least: float) -> list[int]:
    """The tokens that a step with `tree`, which is `draft` or its first nodes, is likeliest to give: a branch, and the
    likeliest token after it. Nothing where none is proposed there, or all together are less likely than `least`.
    """
    node, tokens = ROOT, []
    while children := tree.children_of(node):
        node = max(children, key=tree.probability.__getitem__)
        tokens.append(tree.token[node])
    proposal = draft.proposals.get(node)
    if proposal is None or not proposal.merged:
        return []
    token, (probability, _, _) = max(proposal.merged.items(), key=lambda found: found[1][0])
    joint = probability * (1.0 if node == ROOT else tree.probability[node])
    return [*tokens, token] if joint >= least else []


Estimate = Callable[[int], float]  # evidence cell -> probability that the candidate is accepted if its parent is
# Corrects the probabilities of the candidates below a node, by the two tokens before them.
Calibrate = Callable[[PrecedingBigram, Merged], list[Calibrated]]
Force = Callable[[Sequence[int]], Sequence[SourceRows]]  # what a grammar allows only one way after a path; 0.1 ms
Promise = Callable[[int], float]  # depth -> how often the drafting model's first candidate is right


def propose(members: Members, depth: int, estimate: Estimate) -> Proposal:
    """Candidates below one node. If several sources propose a token, the highest estimate counts."""
    by_source = []
    merged: Merged = {}
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
            probability, (best, source, below) = estimate(cell), merged.get(token, NO_CANDIDATE)
            if probability > best:
                best, source = probability, rows.source
            merged[token] = (best, source, [*below, (rows, through)])
    return Proposal(by_source, merged)


def _settle_conflict(merged: Merged) -> None:
    """Where a drafting model proposes one token and text another, at most one of them is right: their probabilities,
    given that not both are. Without it, text that a confident model contradicts costs HumanEval on an RTX 4090 8% with
    an MTP layer of acceptance 0.9 (`benchmarks.simulated_drafters`).
    """
    computed = {token for token, (_, _, below) in merged.items() if any(rows.source == MODEL for rows, _ in below)}
    best = max((merged[token][0] for token in computed), default=0.0)
    other = max((found[0] for token, found in merged.items() if token not in computed), default=0.0)
    if best and other:
        for token, (probability, source, below) in merged.items():
            wrong = min(other if token in computed else best, 0.999)
            merged[token] = (probability * (1.0 - wrong) / (1.0 - probability * wrong), source, below)


class Growth:
    """A tree that grows by its likeliest open candidate, one node at a time. 25 us for the first candidates, then 5 us
    for each node.

    `draft`: the tree so far. `most`: the maximum of nodes. `calibrate`: corrects the probabilities of the candidates.
    `force`: what a grammar adds below nodes of other sources. `promise`: set if a drafting model can be asked.
    `newest`: the two tokens before the root, for the case that there are no rows.
    """

    def __init__(
        self,
        sources: Sequence[SourceRows],
        estimate: Estimate,
        most: int,
        leaves: int,
        calibrate: Calibrate | None = None,
        force: Force | None = None,
        promise: Promise | None = None,
        newest: PrecedingBigram = NO_BIGRAM,
    ) -> None:
        self.draft = Draft(DraftTree(leaves))
        self.most = most
        self._estimate, self._calibrate, self._force, self._promise = estimate, calibrate, force, promise
        self._newest = sources[0].newest if sources else newest
        self._heap: list[
            tuple[float, int, int, int, int, Members, Proposal]
        ] = []  # (-joint, arrival, parent, token, ..)
        self._arrivals = 0
        self._counted = 0  # nodes that count as grown; more are in the tree after `rewind`
        self._model = ModelRows()
        self._number = {ROOT: 0}  # of the path to a node, in `_model`
        self._members: dict[int, Members] = {}  # of the nodes whose question is open, without `_model`
        self._open: dict[int, float] = {}  # by node: its joint probability
        self._expand(ROOT, 1.0, 0, [(rows, range(len(rows))) for rows in sources])

    @property
    def best(self) -> float:
        """Joint probability of the likeliest node that can be added; 0 if there is none."""
        heap, tree, counted = self._heap, self.draft.tree, self._counted
        if counted >= self.most:
            return 0.0
        if counted < len(tree.token):
            return tree.probability[counted]
        while heap and not self._is_current(heap[0]):
            heappop(heap)
        return -heap[0][0] if heap else 0.0

    def _is_current(self, entry: tuple[float, int, int, int, int, Members, Proposal]) -> bool:
        """Whether a candidate can still be added: there is room, and no answer has changed its probability."""
        _, _, parent, token, _, _, proposal = entry
        tree = self.draft.tree
        if self._promise is not None and (
            self.draft.proposals[parent] is not proposal or tree.child(parent, token) is not None
        ):
            return False
        return tree.can_add(parent)

    def grow(self) -> None:
        """Add that node. Call it only while `best` is not 0."""
        tree = self.draft.tree
        self._counted += 1
        if self._counted <= len(tree.token):
            return
        minus_joint, _, parent, token, source, members, _ = heappop(self._heap)
        node = tree.add(token, parent, -minus_joint, source)
        if self._promise is not None:
            self._number[node] = self._model.below(self._number[parent], token)
        self._expand(node, -minus_joint, tree.depth[node], members)

    def rewind(self, most: int) -> None:
        """Begin again: `grow` will add the same nodes in the same order, at no cost, and then others. So a tree can be
        grown before it is known how many nodes are worth their price. Not with a drafting model.
        """
        self._counted, self.most = 0, most

    def grow_again(self, worth: Callable[[float], bool]) -> bool:
        """After `rewind`: add the same nodes while they are worth it; whether all were, so that others may be."""
        for probability in self.draft.tree.probability[: self.most]:
            if not worth(probability):
                return False
            self._counted += 1
        return True

    def end(self) -> None:
        """Drop the nodes that were not added again."""
        self.draft.tree = self.draft.tree.cut(self._counted)

    # Questions to a drafting model

    @property
    def promised(self) -> float:
        """Joint probability that the best answer to an open question is likely to have; 0 without open questions."""
        if not self._open or len(self.draft.tree) >= self.most:
            return 0.0
        assert self._promise is not None
        depth = self.draft.tree.depth
        return max(joint * self._promise(0 if node == ROOT else depth[node]) for node, joint in self._open.items())

    def open_nodes(self) -> list[OpenNode]:
        """The open questions, the likeliest first, and after them BRANCHES candidates that are not in the tree."""
        tree, proposals = self.draft.tree, self.draft.proposals
        asked = [
            OpenNode(self._number[node], tuple(tree.path(node)), joint, proposals[node].best)
            for node, joint in sorted(self._open.items(), key=lambda each: -each[1])
        ]
        for entry in nsmallest(BRANCHES, self._heap):
            if self._is_current(entry):
                parent, token = entry[2], entry[3]
                number = self._model.below(self._number[parent], token)
                if number not in self._model.answers:
                    asked.append(OpenNode(number, (*tree.path(parent), token), -entry[0], 0.0))
        return asked

    def answered(self, number: int, likely: Sequence[tuple[int, float]]) -> None:
        """Take the answer to a question. It changes the candidates of a node that is in the tree already."""
        self._model.answers[number] = likely
        tree = self.draft.tree
        for node, joint in self._open.items():
            if self._number[node] == number:
                del self._open[node]
                if likely:
                    self._propose(node, joint, 0 if node == ROOT else tree.depth[node], self._members.pop(node))
                return

    def decline(self) -> None:
        """Leave the open questions without an answer."""
        self._open.clear()
        self._members.clear()

    def _expand(self, node: int, joint: float, depth: int, members: Members) -> None:
        if self._force is not None and node != ROOT and joint >= LIKELY:
            members = self._with_forced(self._force, node, members)
        if self._promise is not None:
            members = [each for each in members if each[0] is not self._model]
            if self._number[node] not in self._model.answers and len(self.draft.tree) < self.most:
                self._open[node], self._members[node] = joint, members
        self._propose(node, joint, depth, members)

    def _propose(self, node: int, joint: float, depth: int, members: Members) -> None:
        if self._promise is not None and self._number[node] in self._model.answers:
            members = [*members, (self._model, (self._number[node],))]
        proposal = self.draft.proposals[node] = propose(members, depth, self._estimate)
        merged = proposal.merged
        if self._calibrate is not None and merged:
            proposal.calibrated = self._calibrate(self._preceding_bigram(node), merged)
            for token, probability, _ in proposal.calibrated:
                _, source, below = merged[token]
                merged[token] = (probability, source, below)
        if len(proposal.by_source) > 1 and members[-1][0] is self._model:
            _settle_conflict(merged)
        for token, (probability, source, below) in merged.items():
            if joint * probability >= MIN_PROBABILITY:
                self._arrivals += 1
                entry = (-joint * probability, self._arrivals, node, token, source, below, proposal)
                heappush(self._heap, entry)

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


class DraftModelBudget(NamedTuple):
    """One request of a step: its tree, its text in the drafting model, and the milliseconds it may lose to passes."""

    growth: Growth
    text: DraftText
    most_ms: float


PLACELESS = (GRAMMAR, MODEL)  # sources whose drafts are in no text
log = logging.getLogger("rest_local.drafting")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Origin:
    """The evidence of a draft token that was accepted, for display.

    `probability`: joint, as the planner estimated it. `match`: number of context tokens that agree. `file` and
    `line` (from 1): the place of the longest match, if it is in stored text.
    """

    source: str
    probability: float
    match: int
    file: str | None = None
    line: int | None = None


def origins_of(draft: Draft, tokens: Sequence[int], decode: Decode) -> list[Origin | None]:
    """The origin of each token; None from the first token that was not drafted. Takes about 5 us for a token, and for
    stored text reads the document up to the match.
    """
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
    if source in PLACELESS:
        return Origin(SOURCES[source], probability, 0)
    of_source = [(rows, numbers[0]) for rows, numbers in members if rows.source == source]
    if not of_source:
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
