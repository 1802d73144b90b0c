"""Make policies by name: `auto`, and those of papers as published to compare it with.

The policies of papers draft whatever it costs, and from text alone: a drafting model is for `auto`. Where the papers
differ from what this program has:

- REST (arXiv 2311.08252) looks up the newest 16 tokens, shortened down to 2 until stored text contains them, takes 10
  tokens at each of at most 5 000 places, and submits the 64 beginnings that most of these places share. Stored text is
  the datastores and, if there is one, the history: REST has one datastore and no other source.
- SAM-Decoding (arXiv 2411.10666) compares the longest match in stored text ("static": datastores and history), less 5
  tokens, with the longest match in the request's own text ("dynamic"). The longer one wins: a chain from the newest
  place in the request, or a tree from stored text, of 8 nodes per depth as there are 8 leaves. Either has
  min(60, 1 + 4 x match) nodes. Matches are compared up to 32 tokens; from 15 on the draft grows no longer.
- ReSpec (arXiv 2511.01282) looks up only where the target is certain (entropy of the newest tokens), scores each place
  in the text by how much of its drafts was accepted, leaves out places below a threshold, drafts more tokens from a
  place with a higher score, and verifies several places as branches of one tree. Its relaxed verification changes the
  output, so only the user turns it on (`--verify relaxed`). The paper gives the entropy rule, the update of the score,
  its start and its threshold. It does not give lambda, alpha, the number of places and the length that a score of 1
  stands for: these values were chosen on answers that no benchmark tests. A position is relative to its datastore, so
  two datastores share the score of equal positions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from rest_local.calibration.cost import CostCurve
from rest_local.drafting.sources import ROWS, SOURCE_NUMBER, SOURCES, Lookup, Members, SourceRows
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning.auto import Auto
from rest_local.planning.policy import NEWEST, NOTHING, Off, Policy, StepContext, StepCost
from rest_local.retrieval.rows import MAX_MATCH

STORED = ("datastore", "history")
REST_NODES, REST_LONGEST, REST_SHORTEST, REST_PLACES, REST_TOKENS = 64, 16, 2, 5000, 10

SAM_NODES, SAM_FACTOR, SAM_STATIC_PENALTY = 60, 4, 5
SAM_SEARCHED = (*STORED, "context")  # SAM-Decoding has no prediction.

RESPEC_CERTAIN, RESPEC_LAMBDA = 1.5, 0.5  # The trigger's threshold in nats, and its lambda.
RESPEC_ALPHA = 0.3  # The weight of the newest step in a score.
RESPEC_START = 0.5  # The score of a new place, and the least score of one that is drafted from.
RESPEC_LONGEST, RESPEC_PLACES = 8, 4  # Tokens of a draft at score 1, and branches.
RESPEC_SEARCHED = SOURCES[: SOURCES.index("edit")]  # The paper searches text as it stands.
_CONTEXT = SOURCE_NUMBER["context"]
_OF_REQUEST = (_CONTEXT, SOURCE_NUMBER["prediction"])  # The text of these belongs to the request.

Path = tuple[int, ...]
Place = tuple[int, int]  # A source, and a position in its text.


class _Timed(Policy):
    """A policy that looks up and drafts at every step with room for a node."""

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Return the tree of this step, with the time that it took."""
        if at.limit < 1:
            return NOTHING
        begun = time.perf_counter()
        tree = self._tree(sources, at)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        """Look up and draft."""
        raise NotImplementedError


class Rest(_Timed):
    """REST: the most frequent beginnings of what followed the longest match in stored text."""

    name = "rest"

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        found = sources.rows(depth=REST_TOKENS, only=STORED)  # It is more only if all share the longest match.
        longest, members = longest_of(found, REST_LONGEST)
        if any(len(numbers) >= ROWS for _, numbers in members):
            longest, members = longest_of(sources.rows(REST_PLACES, REST_TOKENS, STORED), REST_LONGEST)
        if longest < REST_SHORTEST:
            return DraftTree()
        return most_frequent(members, min(REST_NODES, at.limit), at.leaves)


class Sam(_Timed):
    """SAM-Decoding: a chain or a tree from the longer of the static and the dynamic match."""

    name = "sam"

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        found = sources.rows(depth=SAM_NODES, only=SAM_SEARCHED)  # The paper's automaton counts all places.
        stored, members = longest_of([rows for rows in found if rows.source != _CONTEXT], MAX_MATCH)
        own = next((rows for rows in found if rows.source == _CONTEXT), None)
        dynamic = own.match[0] if own else 0
        static = stored - SAM_STATIC_PENALTY
        if own and dynamic >= static:
            return _chain(own, min(_sam_nodes(dynamic), at.limit))
        if static > 0:
            return most_frequent(members, min(_sam_nodes(static), at.limit), at.leaves)
        return DraftTree()


def _sam_nodes(match: int) -> int:
    """Return how many nodes a match is worth."""
    return min(SAM_NODES, 1 + SAM_FACTOR * match)


def _chain(rows: SourceRows, length: int) -> DraftTree:
    """Make a chain of the first row, up to the end of its text."""
    tree = DraftTree(1)
    node = ROOT
    for token in rows.continuations[0][:length]:
        if token < 0:
            break
        node = tree.add(token, node, 1.0, rows.source)
    return tree


def longest_of(found: Sequence[SourceRows], cap: int) -> tuple[int, Members]:
    """Return the length of the longest match, at most `cap`, and the rows that have it; (0, []) without rows."""
    longest = min(max((rows.match[0] for rows in found), default=0), cap)
    return longest, [(rows, range(sum(match >= longest for match in rows.match))) for rows in found]


def most_frequent(members: Members, limit: int, leaves: int) -> DraftTree:
    """Make a tree of the `limit` beginnings that most rows share, with at most `leaves` leaves.

    The probability of a node is the share of the rows that pass through it. Every prefix of a frequent beginning is at
    least as frequent, so the most frequent first means parents first.
    """
    tree = DraftTree(leaves)
    total = sum(len(numbers) for _, numbers in members)
    heap: list[tuple[int, int, int, int, int, Members]] = []  # (-rows, arrival, parent, token, source, rows)
    arrivals, node, depth = 0, ROOT, 0
    while len(tree) < limit:
        for token, (count, source, below) in _next(members, depth).items():
            arrivals += 1
            heappush(heap, (-count, arrivals, node, token, source, below))
        while heap and not tree.can_add(heap[0][2]):
            heappop(heap)
        if not heap:
            break
        minus_count, _, parent, token, source, members = heappop(heap)
        node = tree.add(token, parent, -minus_count / total, source)
        depth = tree.depth[node]
    return tree


def _next(members: Members, depth: int) -> dict[int, tuple[int, int, Members]]:
    """Return for each next token the number of rows that contain it there, the first such source, and the rows."""
    found: dict[int, tuple[int, int, Members]] = {}
    for rows, numbers in members:
        if depth >= rows.depth:
            continue
        column = rows.column(depth)
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(column[number], []).append(number)
        groups.pop(-1, None)  # Documents end there.
        for token, own in groups.items():
            count, source, below = found.get(token, (0, rows.source, []))
            found[token] = (count + len(own), source, [*below, (rows, own)])
    return found


class Candidate(NamedTuple):
    """The continuation at one place, and the score of the place."""

    place: Place
    tokens: Sequence[int]
    score: float


class ReSpec(_Timed):
    """ReSpec. Scores of stored text are kept from one request to the next."""

    name = "respec"

    def __init__(self, *, trigger: bool = True) -> None:
        """Begin without scores. With `trigger`, lookups are left out where the target is uncertain."""
        self.watches_entropy = trigger
        self._scores: dict[Place, float] = {}
        self._request_scores: dict[Place, float] = {}  # Scores of places in the request's own text.
        self._proposed: list[tuple[Candidate, int]] = []  # With the number of its tokens that were submitted.

    def fork(self) -> ReSpec:
        """Make the policy of another request; forks share the scores of stored text."""
        other = copy.copy(self)
        other._proposed, other._request_scores = [], {}
        return other

    def begin(self, n_ctx: int) -> None:
        """Start a new request, and drop the scores of the previous request's text."""
        self._request_scores.clear()
        if len(self._scores) > 100_000:
            self._scores.clear()

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Return the chosen places as branches of one tree, or no tree and no lookup if the target is uncertain."""
        self._proposed = []
        if at.limit and self.watches_entropy and not certain(at.entropies):
            return Draft(DraftTree(at.leaves), skipped=True)
        return super().draft(sources, at)

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        tree = DraftTree(at.leaves)
        for candidate in self._choose(sources.rows(only=RESPEC_SEARCHED)):
            submitted = _add(tree, candidate, at.limit) if candidate.score >= RESPEC_START else 0
            self._proposed.append((candidate, submitted))
        return tree

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Score each place: S <- (1 - alpha) S + alpha x accepted/proposed. One that was not submitted is scored by the
        tokens that are known.
        """
        for (place, continuation, score), submitted in self._proposed:
            pairs = enumerate(zip(continuation, tokens, strict=False))
            known = min(len(continuation), len(tokens))
            accepted = next((n for n, (drafted_token, token) in pairs if drafted_token != token), known)
            share = accepted / max(1, submitted, known)
            self._of(place)[place] = (1 - RESPEC_ALPHA) * score + RESPEC_ALPHA * share

    def _of(self, place: Place) -> dict[Place, float]:
        """Return the scores that hold `place`: those of the request's own text are kept apart."""
        return self._request_scores if place[0] in _OF_REQUEST else self._scores

    def _choose(self, found: Sequence[SourceRows]) -> Iterator[Candidate]:
        """Yield the longest matches, of equal ones the better score first; each continuation once."""
        ranked: list[tuple[int, float, int, Place, list[int]]] = []
        for rows in found:
            for number, (match, position) in enumerate(zip(rows.match, rows.positions.tolist(), strict=True)):
                place = (rows.source, position)
                score = self._of(place).get(place, RESPEC_START)
                ranked.append((-match, -score, len(ranked), place, rows.continuations[number]))
        seen: set[Path] = set()
        for _, minus_score, _, place, continuation in sorted(ranked):
            length = max(1, round(-minus_score * RESPEC_LONGEST))
            end = continuation.index(-1) if -1 in continuation else len(continuation)
            tokens = tuple(continuation[: min(length, end)])
            if tokens and tokens not in seen:
                seen.add(tokens)
                yield Candidate(place, tokens, -minus_score)
                if len(seen) >= RESPEC_PLACES:
                    return


def certain(entropies: Sequence[float]) -> bool:
    """Return True if the entropies of the newest tokens (newest last) allow a lookup, or none is known."""
    means = [sum(entropies[-k:]) / k for k in range(1, min(NEWEST, len(entropies)) + 1)]
    if not means:
        return True
    _, mean = min((mean + RESPEC_LAMBDA / k, mean) for k, mean in enumerate(means, 1))
    return mean <= RESPEC_CERTAIN


def _add(tree: DraftTree, candidate: Candidate, limit: int) -> int:
    """Add the candidate to the tree, sharing existing nodes. Returns how many of its tokens there is room for."""
    node = ROOT
    for depth, token in enumerate(candidate.tokens):
        child = tree.child(node, token)
        if child is None:
            if len(tree) >= limit or not tree.can_add(node):
                return depth
            child = tree.add(token, node, candidate.score, candidate.place[0])
        node = child
    return len(candidate.tokens)


_MAKERS: dict[str, Callable[[CostCurve], Policy]] = {
    "off": lambda curve: Off(),
    "auto": Auto,
    "rest": lambda curve: Rest(),
    "sam": lambda curve: Sam(),
    "respec": lambda curve: ReSpec(),
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, curve: CostCurve) -> Policy:
    """Make a policy over a cost curve. Raises KeyError if `name` is not in POLICIES."""
    return _MAKERS[name](curve)
