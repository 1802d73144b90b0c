"""The policy `respec`: ReSpec (arXiv 2511.01282) as published, for comparison with `auto`.

Each part of its retrieval can be left out:

- `trigger` makes a lookup only if the target is certain (entropy of the newest tokens).
- `feedback` scores each place in the text by how much of its drafts was accepted, leaves out places below the
  threshold, and drafts more tokens from a place with a higher score.
- `candidates` places are verified at the same time as branches of one tree.
- The paper's fourth part, relaxed verification, changes the output. Only the user turns it on (`--verify relaxed`),
  never a policy.

With a drafting model it is the paper's hybrid: the model drafts, as EAGLE-2 does (`rest_local.planning.eagle2`), where
the trigger does not fire or no candidate passes the threshold. That a step has the drafts of the text or of the model
and never both is our reading.

The paper reports the entropy rule, the update of the score, its start and threshold, and one score "per match
position". It does not publish lambda, alpha, the number of candidates and the length that a score of 1 stands for: the
values below were chosen on answers that no benchmark tests. Taken literally, a position is a place in the text, and few
places are met twice: `by="match"` keeps one score for each source and match length instead, which learns soon what does
not pay. A position is relative to its datastore, so two datastores share the score of equal positions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rest_local.drafting.candidates import SOURCE_NUMBER, SOURCES, SourceRows
from rest_local.drafting.growth import Answers, Asker, Draft, refuse
from rest_local.drafting.recycled import LogitsRow
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.eagle2 import ModelTime, eagle2_tree
from rest_local.planning.policy import NEWEST, StepContext, StepCost

CERTAIN = 1.5  # nats
LAMBDA = 0.5

ALPHA = 0.3
START, THRESHOLD = 0.5, 0.5
LONGEST = 8  # tokens of a draft at score 1
CANDIDATES = 4
_OF_REQUEST = (SOURCE_NUMBER["context"], SOURCE_NUMBER["prediction"])  # their text belongs to the request

SEARCHED = SOURCES[: SOURCES.index("edit")]  # the paper searches text as it stands

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
        """Ask no model about grown trees: this policy draws its own (`eagle2_tree`)."""
        return refuse

    def begin(self, n_ctx: int) -> None:
        """Start a new request, and drop the scores of the previous request's text."""
        if self._by == "position":
            self._own.clear()
        if len(self._scores) > MAX_SCORES:
            self._scores.clear()

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The chosen candidates as branches of one tree; without a lookup if the target is uncertain. The tree of a
        drafting model, if there is one and there are no such candidates.
        """
        self._proposed = []
        if at.limit < 1:
            return Draft(DraftTree())
        if self._trigger and not certain(at.entropies):
            return Draft(eagle2_tree(sources, at), skipped=True)
        begun, model_time = time.perf_counter(), ModelTime(sources)
        tree = DraftTree(at.leaves)
        for candidate in self._choose(sources.rows(only=SEARCHED)):
            submitted = _add(tree, candidate, at.limit) if candidate.score >= THRESHOLD else 0
            self._proposed.append((candidate, submitted))
        if not len(tree):
            tree = eagle2_tree(sources, at)
        return Draft(tree, lookup_us=max(0.0, 1e6 * (time.perf_counter() - begun) - 1e3 * model_time.ms))

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Update the scores of the places. A place that was not submitted is scored by the tokens that are known."""
        if not self._feedback:
            return
        for candidate, submitted in self._proposed:
            accepted = _agreeing(candidate.tokens, tokens)
            proposed = max(1, submitted, min(len(candidate.tokens), len(tokens)))
            self._of(candidate.place)[candidate.place] = follow(candidate.score, accepted, proposed)

    def learn_logits(self, rows: Iterable[LogitsRow]) -> None:
        """Do nothing: it has no use for them."""

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
