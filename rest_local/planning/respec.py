"""The policy `respec`: ReSpec's retrieval (arXiv 2511.01282), for comparison; each part can be left out.

Contract: `trigger` looks something up only where the target is certain (entropy at the newest tokens); `feedback`
scores each place of the text that drafts come from by how much of them was accepted, leaves out those below the
threshold and makes drafts as long as the score is high; `candidates` places are verified side by side as branches of
one tree. The fourth part, relaxed verification, changes the output and is therefore the user's to ask for (`--verify
relaxed`), never a policy's to decide.

Reported are the entropy rule, the score's update, start and threshold, one score "per match position". Not published
are lambda, alpha, the number of candidates and the length that the score is a share of: those below were chosen on
answers that no benchmark tests. Read as written, a position is a place of the text, and few places are met twice:
`by="match"` keeps one score for each source and match length instead, which learns at once what does not pay.
Positions are those of one datastore: two of them share scores where their positions coincide.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rest_local.drafting.candidates import SOURCE_NUMBER, SourceRows
from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.policy import NEWEST, StepContext, StepCost

CERTAIN = 1.5  # nats
LAMBDA = 0.5

ALPHA = 0.3
START, THRESHOLD = 0.5, 0.5
LONGEST = 8  # tokens of a draft at score 1
CANDIDATES = 4
_OF_REQUEST = (SOURCE_NUMBER["context"], SOURCE_NUMBER["prediction"])  # whose text ends with the request

MOST_SCORES = 100_000  # places remembered; then from the start

Place = tuple[int, int]  # source, and position in its text or length of the match
By = Literal["position", "match"]


@dataclass(frozen=True)
class Candidate:
    """What one place says, and its score."""

    place: Place
    tokens: Sequence[int]
    score: float


class ReSpec:
    """Scores of stored text outlast a request."""

    name = "respec"

    def __init__(
        self, *, trigger: bool = True, feedback: bool = True, candidates: int = CANDIDATES, by: By = "position"
    ) -> None:
        self.watches_entropy = trigger
        self._by = by
        self._trigger, self._feedback, self._most = trigger, feedback, candidates
        self._scores: dict[Place, float] = {}
        self._own: dict[Place, float] = {}  # of places in the request's own text
        self._proposed: list[tuple[Candidate, int]] = []  # and how many of its tokens were submitted

    def fork(self) -> ReSpec:
        """One for another request: scores of stored text are shared."""
        other = copy.copy(self)
        other._proposed, other._own = [], {}
        return other

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> None:
        """No rule but the room."""

    def begin(self, n_ctx: int) -> None:
        """A new request: its own text is another."""
        if self._by == "position":
            self._own.clear()
        if len(self._scores) > MOST_SCORES:
            self._scores.clear()

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The chosen candidates as branches of one tree; nobody is asked where the target is uncertain."""
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
        """Score the places by what the model said; one that was not submitted by as much as can be known."""
        if not self._feedback:
            return
        for candidate, submitted in self._proposed:
            accepted = _agreeing(candidate.tokens, tokens)
            proposed = max(1, submitted, min(len(candidate.tokens), len(tokens)))
            self._of(candidate.place)[candidate.place] = follow(candidate.score, accepted, proposed)

    def catch_up(self) -> None:
        """Scores are kept as they come."""

    def _score(self, place: Place) -> float:
        return self._of(place).get(place, START)

    def _of(self, place: Place) -> dict[Place, float]:
        """A place of the request's own text is gone with it; a match length of it is not."""
        return self._own if self._by == "position" and place[0] in _OF_REQUEST else self._scores

    def _choose(self, found: Sequence[SourceRows]) -> Iterator[Candidate]:
        """The longest matches, the better score first among equals; each continuation once."""
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
    """Whether to retrieve, from the entropies of the newest tokens (newest last); yes where none are known."""
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
    """Walk the candidate down the tree and add what is not there yet; how many of its tokens there was room for."""
    node = ROOT
    for depth, token in enumerate(candidate.tokens):
        child = next((c for c in tree.children_of(node) if tree.token[c] == token), None)
        if child is None:
            if len(tree) >= limit or not tree.can_add(node):
                return depth
            child = tree.add(token, node, candidate.score, candidate.place[0])
        node = child
    return len(candidate.tokens)
