"""Grow the tree: drafted tokens below the root, and how they grow from the proposals of all sources.

`DraftTree` is pure data. Nodes are added parent first (`parent[i] < i`, -1 is the root). `layout` orders them depth
first and the likeliest branch first, so that accepted tokens usually are in neighbouring KV cells (DESIGN.md, section
4).

`Growth` adds the node with the highest joint probability next, as often as `rest_local.planning.plan.grow` asks for
it. It is given the rows of all sources and an estimate of acceptance for each evidence cell. A node is expanded when it
joins the tree. `Draft` keeps the proposals at each expanded node, so that estimates learn from the tokens that the
model then chooses, also if no draft was submitted (DESIGN.md section 6).

A model that drafts is asked in passes, not node by node: each expanded node is open until its answer is there. So a
pass serves all branches of a level (EAGLE-2) and all requests, and text that another source knows is not asked for.
The first answer of a block drafter answers all questions. Where its block ends, text is searched for what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import NamedTuple

from rest_local.drafting.models.drafter import BRANCHES, DraftText, Likely
from rest_local.drafting.prediction import MIN_PROBABILITY
from rest_local.drafting.sources import (
    GRAMMAR,
    MODEL,
    NO_BIGRAM,
    Candidate,
    Members,
    Merged,
    ModelRows,
    PrecedingBigram,
    SourceRows,
)

ROOT = -1
# The probability of a candidate from which a grammar is asked what follows it. JSON answers with lookups take 1 106,
# 1 118 and 1 128 forward passes with 0.2, 0.4 and 0.6.
LIKELY = 0.4

Calibrated = tuple[int, float, tuple[int, ...]]  # A token, its corrected probability, the features that corrected it.
Estimate = Callable[[int], float]  # The probability that a candidate of an evidence cell is accepted if its parent is.
# Corrects the probabilities of the candidates below a node, by the two tokens before them.
Calibrate = Callable[[PrecedingBigram, Merged], list[Calibrated]]
Force = Callable[[Sequence[int]], Sequence[SourceRows]]  # What a grammar allows only one way after a path; 0.1 ms.
Following = Callable[[tuple[int, ...]], Sequence[Likely]]  # What a drafted block has after a path.
Below = Callable[[Sequence[int]], Sequence[SourceRows]]  # The rows of text that goes on after a path.
Promise = Callable[[int], float]  # How often the drafting model's first candidate is right, by depth.

NO_CANDIDATE: tuple[float, int, Members] = (0.0, -1, [])


@dataclass(slots=True)
class DraftTree:
    """A tree of at most `max_leaves` leaves.

    By node: `token`, `parent`, `depth` (1 below the root), `probability` (joint), `source`.
    """

    max_leaves: int = 0
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    root_children: list[int] = field(default_factory=list)
    n_leaves: int = 0

    def __len__(self) -> int:
        return len(self.token)

    def children_of(self, node: int) -> list[int]:
        """Return the children of a node or of `ROOT`."""
        return self.root_children if node == ROOT else self.children[node]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the child of the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token, if there is one."""
        for child in self.children_of(node):
            if self.token[child] == token:
                return child
        return None

    def can_add(self, parent: int) -> bool:
        """Return True if `parent` can get another child. A second child is a new leaf, and a slot has `max_leaves`
        sequence ids for leaves.
        """
        return self.n_leaves < self.max_leaves or (parent != ROOT and not self.children[parent])

    def add(self, token: int, parent: int, probability: float, source: int) -> int:
        """Add a node and return its number."""
        node = len(self.token)
        if parent == ROOT:
            self.n_leaves += 1
            self.root_children.append(node)
            self.depth.append(1)
        else:
            siblings = self.children[parent]
            if siblings:
                self.n_leaves += 1
            siblings.append(node)
            self.depth.append(self.depth[parent] + 1)
        self.token.append(token)
        self.parent.append(parent)
        self.probability.append(probability)
        self.source.append(source)
        self.children.append([])
        return node

    def cut(self, n: int) -> DraftTree:
        """Return the tree of the first n nodes. Parents come first, so every prefix is a tree."""
        if n >= len(self):
            return self
        children = [[child for child in own if child < n] for own in self.children[:n]]
        return DraftTree(
            self.max_leaves,
            self.token[:n],
            self.parent[:n],
            self.depth[:n],
            self.probability[:n],
            self.source[:n],
            children,
            [child for child in self.root_children if child < n],
            children.count([]),
        )

    def layout(self) -> Layout:
        """Order the nodes for a batch. It takes about 1 us for each node; a chain is faster."""
        if self.n_leaves == 1:
            n = len(self.token)
            return Layout(list(range(n)), [0] * n, [1] * n)
        order: list[int] = []
        stack = self.root_children[::-1]
        children = self.children
        low = [0] * len(children)
        count = [0] * len(children)
        leaf = 0
        while stack:
            node = stack.pop()
            order.append(node)
            low[node] = leaf  # The order is depth first, so the next leaf is the first one below.
            if own := children[node]:
                stack += own[::-1]
            else:
                count[node] = 1
                leaf += 1
        parent = self.parent
        for node in range(len(order) - 1, 0, -1):  # Bottom up, because children have higher numbers.
            above = parent[node]
            if above != ROOT:
                count[above] += count[node]
        return Layout(order, low, count)


@dataclass(frozen=True, slots=True)
class Layout:
    """`order[k]` is the node at index k of the batch after the root. A node has the leaf ids low..low+count-1."""

    order: list[int]
    low: list[int]
    count: list[int]


class OpenNode(NamedTuple):
    """A question to a drafting model: what follows `path`?

    `number` is that of the path in the growth's `ModelRows`, `joint` its probability, and `known` the probability of
    the likeliest token that is known to follow it.
    """

    number: int
    path: tuple[int, ...]
    joint: float
    known: float


class DraftModelBudget(NamedTuple):
    """One request of a step: its tree, its text in the drafting model, and the milliseconds it may lose to passes."""

    growth: Growth
    text: DraftText
    most_ms: float


class Proposal:
    """The proposals below one node: candidates by source, merged by token, and their corrected probabilities."""

    __slots__ = ("by_source", "calibrated", "merged")

    def __init__(self, by_source: list[tuple[SourceRows, list[Candidate]]], merged: Merged) -> None:
        self.by_source, self.merged = by_source, merged
        self.calibrated: Sequence[Calibrated] = ()


@dataclass(slots=True)
class Draft:
    """A tree and the proposals at its expanded nodes, which include `ROOT`.

    `lookup_us` has the microseconds of the lookups, None without a lookup. The policies of papers look up and grow in
    one go, so theirs include the growth. `growth` is set if the tree will still grow, together with those of other
    requests, and `model_budget` with it if a drafting model can be asked.
    """

    tree: DraftTree
    proposals: dict[int, Proposal] = field(default_factory=dict)
    lookup_us: float | None = None
    growth: Growth | None = None
    model_budget: DraftModelBudget | None = None
    skipped: bool = False  # The policy decided against a lookup.
    saving: float = 0.0  # Milliseconds that the tree of a lookup is expected to save.
    looked_below: int = 0  # Lookups for text that goes on after a block.

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Return (evidence cell, was it right) of every proposal along the tokens of the model, submitted or not."""
        outcomes: list[tuple[int, bool]] = []
        for proposal, token in self._along(tokens):
            for _, candidates in proposal.by_source:
                outcomes += [(cell, proposed == token) for proposed, cell, _ in candidates]
        return outcomes

    def calibrations(self, tokens: Sequence[int]) -> list[tuple[Sequence[Calibrated], int]]:
        """Return the calibrated probabilities at each node along `tokens`, and the token that was right there."""
        return [(proposal.calibrated, token) for proposal, token in self._along(tokens)]

    def confidences(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """Return (tokens below the root, probability of the first candidate) for each answer of a drafting model along
        `tokens`.
        """
        return [
            (depth, proposal.merged[candidates[0][0]][0])
            for depth, (proposal, _) in enumerate(self._along(tokens))
            for rows, candidates in proposal.by_source
            if rows.source == MODEL
        ]

    def added(self, tokens: Sequence[int]) -> int:
        """Count the `tokens` that were drafted because a drafting model alone proposed them."""
        count = 0
        node = ROOT
        for proposal, token in self._along(tokens):
            child = self.tree.child(node, token)
            if child is None:
                break
            count += all(rows.source == MODEL for rows, _ in proposal.merged[token][2])
            node = child
        return count

    def likely_outcome(self, tree: DraftTree, least: float) -> list[int]:
        """Return the tokens that a step with `tree`, which is this draft's or its first nodes, is likeliest to give: a
        branch, and the likeliest token after it. There are none where none is proposed there, or where all together
        are less likely than `least`.
        """
        node, tokens = ROOT, []
        while children := tree.children_of(node):
            node = max(children, key=tree.probability.__getitem__)
            tokens.append(tree.token[node])
        proposal = self.proposals.get(node)
        if proposal is None or not proposal.merged:
            return []
        token, (probability, _, _) = max(proposal.merged.items(), key=lambda found: found[1][0])
        joint = probability * (1.0 if node == ROOT else tree.probability[node])
        return [*tokens, token] if joint >= least else []

    def _along(self, tokens: Sequence[int]) -> Iterator[tuple[Proposal, int]]:
        """Yield the proposals at the nodes along `tokens`, each with the token that followed it."""
        node: int | None = ROOT
        for token in tokens:
            if node is None or (proposal := self.proposals.get(node)) is None:
                return
            yield proposal, token
            node = self.tree.child(node, token)


def propose(members: Members, depth: int, estimate: Estimate) -> Proposal:
    """Propose candidates below one node. If several sources propose a token, the highest estimate counts."""
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
    """Correct probabilities where a drafting model proposes one token and text another.

    At most one of them is right. The model has read the text and contradicts it all the same, so its own probability
    stands, and text gets the rest. What a grammar forces stands against the model, which does not know the grammar.

    With an MTP layer, chat and HumanEval lose 2 to 4% where text keeps its probability, and 1 to 2% where both are
    lowered as if they knew nothing of each other (`benchmarks.simulated_drafters`, on an RTX 4090).
    """
    computed = {token for token, (_, _, below) in merged.items() if any(rows.source == MODEL for rows, _ in below)}
    best = max((merged[token][0] for token in computed), default=0.0)
    forced = max((merged[token][0] for token in merged if merged[token][1] == GRAMMAR), default=0.0)
    for token, (probability, source, below) in merged.items():
        if source != GRAMMAR:
            merged[token] = (probability * (1.0 - (forced if token in computed else best)), source, below)


class Growth:
    """A tree that grows by its likeliest open candidate, one node at a time.

    `draft` holds the tree so far. The first candidates take 25 us, then each node 5 us.
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
        below: Below | None = None,
        least: float = 0.0,
    ) -> None:
        """Begin with the rows of `sources`, for at most `most` nodes and `leaves` leaves.

        `calibrate` corrects the probabilities of the candidates. `force` is what a grammar adds below nodes of other
        sources. `promise` is given if a drafting model can be asked. `newest` are the two tokens before the first.
        `below` finds text after a block, which is searched if the block is at least as likely as `least`.
        """
        self.draft = Draft(DraftTree(leaves))
        self.most = most
        self._estimate, self._calibrate, self._force, self._promise = estimate, calibrate, force, promise
        self._newest, self._below, self._least = newest, below, least
        # (-joint probability, arrival, parent, token, source, rows, proposal)
        self._heap: list[tuple[float, int, int, int, int, Members, Proposal]] = []
        self._arrivals = 0
        self._counted = 0  # Nodes that count as grown; more are in the tree after `rewind`.
        self._model = ModelRows()
        self._number = {ROOT: 0}  # The number of the path to a node, in `_model`.
        self._following: Following | None = None
        self._open: dict[int, tuple[float, Members]] = {}  # Joint probability and rows of nodes with an open question.
        self._expand(ROOT, 1.0, 0, [(rows, range(len(rows))) for rows in sources])

    @property
    def best(self) -> float:
        """Return the joint probability of the likeliest node that can be added; 0 if there is none."""
        heap, tree, counted = self._heap, self.draft.tree, self._counted
        if counted >= self.most:
            return 0.0
        if counted < len(tree.token):
            return tree.probability[counted]
        while heap and not self._is_current(heap[0]):
            heappop(heap)
        return -heap[0][0] if heap else 0.0

    def _is_current(self, entry: tuple[float, int, int, int, int, Members, Proposal]) -> bool:
        """Return True if a candidate can be added: there is room, and no answer has changed its probability."""
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
        """Add the same nodes after `rewind` while they are worth it. Return True if all were, so that others may be."""
        for probability in self.draft.tree.probability[: self.most]:
            if not worth(probability):
                return False
            self._counted += 1
        return True

    # Questions to a drafting model

    @property
    def promised(self) -> float:
        """Return the joint probability that the best answer to an open question is likely to have; 0 without any."""
        if not self._open or len(self.draft.tree) >= self.most:
            return 0.0
        assert self._promise is not None
        depth = self.draft.tree.depth
        return max(joint * self._promise(0 if node == ROOT else depth[node]) for node, (joint, _) in self._open.items())

    def open_nodes(self) -> list[OpenNode]:
        """Return the open questions, likeliest first, and after them BRANCHES candidates that are not in the tree."""
        tree, proposals = self.draft.tree, self.draft.proposals
        asked: list[OpenNode] = []
        for node, (joint, _) in sorted(self._open.items(), key=lambda each: -each[1][0]):
            known = max((probability for probability, _, _ in proposals[node].merged.values()), default=0.0)
            asked.append(OpenNode(self._number[node], tuple(tree.path(node)), joint, known))
        for entry in nsmallest(BRANCHES, self._heap):
            if self._is_current(entry):
                parent, token = entry[2], entry[3]
                number = self._model.below(self._number[parent], token)
                if number not in self._model.answers:
                    asked.append(OpenNode(number, (*tree.path(parent), token), -entry[0], 0.0))
        return asked

    def answered(self, number: int, likely: Sequence[Likely], following: Following | None = None) -> None:
        """Take the answer to a question, and what a block has `following` all others. It changes the candidates of
        nodes that are in the tree already.
        """
        self._model.answers[number] = likely
        self._following = following
        depth = self.draft.tree.depth
        for node, (joint, members) in list(self._open.items()):
            if self._is_answered(node):
                del self._open[node]
                if self._model.answers[self._number[node]]:
                    self._propose(node, joint, 0 if node == ROOT else depth[node], members)

    def _is_answered(self, node: int) -> bool:
        """Return True if it is known what the drafting model says after a node."""
        number = self._number[node]
        if number not in self._model.answers and self._following is not None:
            self._model.answers[number] = self._following(tuple(self.draft.tree.path(node)))
        return number in self._model.answers

    def decline(self) -> None:
        """Leave the open questions without an answer."""
        self._open.clear()

    # Below a node

    def _expand(self, node: int, joint: float, depth: int, members: Members) -> None:
        """Propose what follows a node that has joined the tree, and open a question about it."""
        if (
            self._force is not None
            and node != ROOT
            and joint >= LIKELY
            and all(rows.source != GRAMMAR for rows, _ in members)  # Forced text has not led here.
        ):
            members = [*members, *((rows, range(1)) for rows in self._force(self.draft.tree.path(node)))]
        if self._promise is not None:
            members = [each for each in members if each[0] is not self._model]
            if not self._is_answered(node):
                if len(self.draft.tree) < self.most:
                    self._open[node] = joint, members
            elif (
                self._below is not None
                and self._following is not None
                and not members
                and not self._model.answers[self._number[node]]
                and joint >= self._least
            ):
                self.draft.looked_below += 1
                members = [(rows, range(len(rows))) for rows in self._below(self.draft.tree.path(node))]
        self._propose(node, joint, depth, members)

    def _propose(self, node: int, joint: float, depth: int, members: Members) -> None:
        """Make the candidates below a node, and offer those that are likely enough."""
        if self._promise is not None and self._model.answers.get(self._number[node]):
            members = [*members, (self._model, (self._number[node],))]
        proposal = self.draft.proposals[node] = propose(members, depth, self._estimate)
        merged = proposal.merged
        if self._calibrate is not None and merged:
            tree, preceding = self.draft.tree, self._newest
            if node != ROOT:
                parent = tree.parent[node]
                preceding = (preceding[1] if parent == ROOT else tree.token[parent], tree.token[node])
            proposal.calibrated = self._calibrate(preceding, merged)
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
