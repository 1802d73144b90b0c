"""The policies `rest`, `sam` and `respec`: the retrieval of REST, SAM-Decoding and ReSpec as published, for comparison.

`rest` and `sam`:

- They draft at every step, whatever it costs, and learn nothing.
- They submit the beginnings that most rows of the longest match share, as a tree (`most_frequent`).
- REST (arXiv 2311.08252) looks up the newest 16 tokens, shortened down to 2 until stored text contains them, takes 10
  tokens at each of at most 5 000 places, and submits the 64 most frequent beginnings. Stored text is the datastores
  and, if there is one, the history: REST has one datastore and no other source.
- SAM-Decoding (arXiv 2411.10666) compares the longest match in stored text ("static": datastores and history), less 5
  tokens, with the longest match in the request's own text ("dynamic"). The longer one wins: a chain from the newest
  place in the request, or a tree of at most 8 nodes per depth from stored text. Either has min(60, 1 + 4 x match)
  nodes. Matches are compared up to 32 tokens; from 15 on the draft grows no longer.

`respec` is ReSpec's retrieval (arXiv 2511.01282). Each of its parts can be left out:

- `trigger` makes a lookup only if the target is certain (entropy of the newest tokens).
- `feedback` scores each place in the text by how much of its drafts was accepted, leaves out places below the
  threshold, and drafts more tokens from a place with a higher score.
- `candidates` places are verified at the same time as branches of one tree.
- The paper's fourth part, relaxed verification, changes the output. Only the user turns it on (`--verify relaxed`),
  never a policy.

The paper reports the entropy rule, the update of the score, its start and threshold, and one score "per match
position". It does not publish lambda, alpha, the number of candidates and the length that a score of 1 stands for: the
values below were chosen on answers that no benchmark tests. Taken literally, a position is a place in the text, and few
places are met twice: `by="match"` keeps one score for each source and match length instead, which learns soon what does
not pay. A position is relative to its datastore, so two datastores share the score of equal positions.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.candidates import SOURCE_NUMBER, PrecedingBigram, SourceRows
from rest_local.drafting.growth import Answers, Asker, Draft, refuse
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.policy import NEWEST, Stateless, StepContext, StepCost
from rest_local.retrieval.rows import MAX_MATCH

STORED = ("datastore", "history")
REST_NODES = 64
REST_LONGEST, REST_SHORTEST = 16, 2  # tokens of a match
REST_PLACES = 5000
REST_TOKENS = 10
REST_FIRST_ROWS = 64  # rows of a first, cheap lookup; more are fetched only if all of these share the longest match

SAM_NODES, SAM_FACTOR = 60, 4
SAM_STATIC_PENALTY = 5
SAM_PER_DEPTH = 8
SAM_ROWS = 64  # places of stored text that are counted; the paper's automaton counts all of them
SAM_SEARCHED = (*STORED, "context")  # SAM-Decoding has no prediction
_CONTEXT = SOURCE_NUMBER["context"]

Members = list[tuple[SourceRows, Sequence[int]]]  # for each source, the rows that agree so far


class _EveryStep(Stateless, ABC):
    """A policy that looks up and drafts at every step with room for a node."""

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree of this step, with the time that it took."""
        if at.limit < 1:
            return Draft(DraftTree())
        begun = time.perf_counter()
        tree = self._tree(sources, at)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))

    @abstractmethod
    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree: ...


class Rest(_EveryStep):
    """REST: the most frequent beginnings of what followed the longest match in stored text."""

    name = "rest"

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        found = sources.rows(REST_FIRST_ROWS, REST_TOKENS, STORED)
        longest, members = longest_of(found, REST_LONGEST)
        if any(len(numbers) >= REST_FIRST_ROWS for _, numbers in members):
            longest, members = longest_of(sources.rows(REST_PLACES, REST_TOKENS, STORED), REST_LONGEST)
        if longest < REST_SHORTEST:
            return DraftTree()
        return most_frequent(members, min(REST_NODES, at.limit), at.leaves)


class Sam(_EveryStep):
    """SAM-Decoding: a chain or a tree from the longer of the static and the dynamic match."""

    name = "sam"

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        found = sources.rows(SAM_ROWS, SAM_NODES, SAM_SEARCHED)
        stored, members = longest_of([rows for rows in found if rows.source != _CONTEXT], MAX_MATCH)
        own = next((rows for rows in found if rows.source == _CONTEXT), None)
        dynamic = own.match[0] if own else 0
        static = stored - SAM_STATIC_PENALTY
        if own and dynamic >= static:
            return _chain(own, min(_sam_nodes(dynamic), at.limit))
        if static > 0:
            return most_frequent(members, min(_sam_nodes(static), at.limit), at.leaves, SAM_PER_DEPTH)
        return DraftTree()


def _sam_nodes(match: int) -> int:
    return min(SAM_NODES, 1 + SAM_FACTOR * match)


def _chain(rows: SourceRows, length: int) -> DraftTree:
    """The first row, up to the end of its text."""
    tree = DraftTree(1)
    node = ROOT
    for token in rows.continuations[0][:length]:
        if token < 0:
            break
        node = tree.add(token, node, 1.0, rows.source)
    return tree


def longest_of(found: Sequence[SourceRows], cap: int) -> tuple[int, Members]:
    """The length of the longest match, at most `cap`, and the rows that have it; (0, []) without rows."""
    longest = min(max((rows.match[0] for rows in found), default=0), cap)
    return longest, [(rows, range(sum(match >= longest for match in rows.match))) for rows in found]


def most_frequent(members: Members, limit: int, leaves: int, per_depth: int | None = None) -> DraftTree:
    """The `limit` beginnings that most rows share, as a tree of at most `leaves` leaves and `per_depth` nodes at each
    depth. The probability of a node is the share of the rows that pass through it.

    Every prefix of a frequent beginning is at least as frequent, so the most frequent first means parents first.
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
    """For each next token: the number of rows that contain it there, the first such source, and the rows."""
    found: dict[int, tuple[int, int, Members]] = {}
    for rows, numbers in members:
        if depth >= rows.depth:
            continue
        column = rows.column(depth)
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(column[number], []).append(number)
        groups.pop(-1, None)  # the end of a document
        for token, own in groups.items():
            count, source, below = found.get(token, (0, rows.source, []))
            found[token] = (count + len(own), source, [*below, (rows, own)])
    return found


CERTAIN = 1.5  # nats
LAMBDA = 0.5

ALPHA = 0.3
START, THRESHOLD = 0.5, 0.5
LONGEST = 8  # tokens of a draft at score 1
CANDIDATES = 4
_OF_REQUEST = (SOURCE_NUMBER["context"], SOURCE_NUMBER["prediction"])  # their text belongs to the request

MAX_SCORES = 100_000  # places with a score; beyond, all scores are dropped

Place = tuple[int, int]  # source, and position in its text or length of the match
By = Literal["position", "match"]


@dataclass(frozen=True)
class Candidate:
    """The continuation at one place, and the score of the place."""

    place: Place
    tokens: Sequence[int]
    score: float


class ReSpec:
    """The policy `respec`. Scores of stored text are kept from one request to the next."""

    name = "respec"
    logits_ms = 0.0

    def __init__(
        self, *, trigger: bool = True, feedback: bool = True, candidates: int = CANDIDATES, by: By = "position"
    ) -> None:
        self.watches_entropy = trigger
        self._by = by
        self._trigger, self._feedback, self._most = trigger, feedback, candidates
        self._scores: dict[Place, float] = {}
        self._own: dict[Place, float] = {}  # scores of places in the request's own text
        self._proposed: list[tuple[Candidate, int]] = []  # with the number of its tokens that were submitted

    def fork(self) -> ReSpec:
        """Make the policy of another request; forks share the scores of stored text."""
        other = copy.copy(self)
        other._proposed, other._own = [], {}
        return other

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> None:
        """Submit every node that fits."""

    def answers(self, plan: object, askers: Sequence[Asker]) -> Answers:
        """Ask no model."""
        return refuse

    def begin(self, n_ctx: int) -> None:
        """Start a new request, and drop the scores of the previous request's text."""
        if self._by == "position":
            self._own.clear()
        if len(self._scores) > MAX_SCORES:
            self._scores.clear()

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The chosen candidates as branches of one tree; without a lookup if the target is uncertain."""
        self._proposed = []
        if at.limit < 1:
            return Draft(DraftTree())
        if self._trigger and not certain(at.entropies):
            return Draft(DraftTree(), skipped=True)
        begun = time.perf_counter()
        tree = DraftTree(at.leaves)
        for candidate in self._choose(sources.rows()):
            submitted = _add(tree, candidate, at.limit) if candidate.score >= THRESHOLD else 0
            self._proposed.append((candidate, submitted))
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Update the scores of the places. A place that was not submitted is scored by the tokens that are known."""
        if not self._feedback:
            return
        for candidate, submitted in self._proposed:
            accepted = _agreeing(candidate.tokens, tokens)
            proposed = max(1, submitted, min(len(candidate.tokens), len(tokens)))
            self._of(candidate.place)[candidate.place] = follow(candidate.score, accepted, proposed)

    def learn_logits(self, rows: Iterable[tuple[PrecedingBigram, NDArray[np.float32]]]) -> None:
        """Learn nothing."""

    def catch_up(self) -> None:
        """Do nothing: `learn` updates the scores."""

    def _score(self, place: Place) -> float:
        return self._of(place).get(place, START)

    def _of(self, place: Place) -> dict[Place, float]:
        """The scores that hold `place`: positions in the request's own text are kept apart, match lengths are not."""
        return self._own if self._by == "position" and place[0] in _OF_REQUEST else self._scores

    def _choose(self, found: Sequence[SourceRows]) -> Iterator[Candidate]:
        """The longest matches, of equal ones the better score first; each continuation once."""
        ranked: list[tuple[int, float, int, Place, list[int]]] = []
        for rows in found:
            for number, (match, position) in enumerate(zip(rows.match, rows.positions.tolist(), strict=True)):
                place = (rows.source, position if self._by == "position" else match)
                ranked.append((-match, -self._score(place), len(ranked), place, rows.continuations[number]))
        seen: set[tuple[int, ...]] = set()
        for _, minus_score, _, place, continuation in sorted(ranked):
            length = max(1, round(-minus_score * LONGEST))
            end = continuation.index(-1) if -1 in continuation else len(continuation)
            tokens = tuple(continuation[: min(length, end)])
            if not tokens or tokens in seen:
                continue
            seen.add(tokens)
            yield Candidate(place, tokens, -minus_score)
            if len(seen) >= self._most:
                return


def certain(entropies: Sequence[float]) -> bool:
    """Whether to make a lookup, by the entropies of the newest tokens (newest last); yes if none is known."""
    means = [sum(entropies[-k:]) / k for k in range(1, min(NEWEST, len(entropies)) + 1)]
    if not means:
        return True
    _, mean = min((mean + LAMBDA / k, mean) for k, mean in enumerate(means, 1))
    return mean <= CERTAIN


def follow(score: float, accepted: int, proposed: int) -> float:
    """S <- (1 - alpha) S + alpha x accepted/proposed."""
    return (1 - ALPHA) * score + ALPHA * accepted / proposed


def _agreeing(candidate: Sequence[int], tokens: Sequence[int]) -> int:
    pairs = enumerate(zip(candidate, tokens, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(candidate), len(tokens)))


def _add(tree: DraftTree, candidate: Candidate, limit: int) -> int:
    """Add the candidate to the tree, sharing existing nodes. Returns how many of its tokens there is room for."""
    node = ROOT
    for depth, token in enumerate(candidate.tokens):
        child = next((c for c in tree.children_of(node) if tree.token[c] == token), None)
        if child is None:
            if len(tree) >= limit or not tree.can_add(node):
                return depth
            child = tree.add(token, node, candidate.score, candidate.place[0])
        node = child
    return len(candidate.tokens)
