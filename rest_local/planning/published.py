"""The policies `rest` and `sam`: REST and SAM-Decoding as published, for comparison with `auto`.

- They draft at every step, whatever it costs, and learn nothing.
- They submit the beginnings that most rows of the longest match share, as a tree (`most_frequent`).
- REST (arXiv 2311.08252) looks up the newest 16 tokens, shortened down to 2 until stored text contains them, takes 10
  tokens at each of at most 5 000 places, and submits the 64 most frequent beginnings. Stored text is the datastores
  and, if there is one, the history: REST has one datastore and no other source. It has no drafting model either.
- SAM-Decoding (arXiv 2411.10666) compares the longest match in stored text ("static": datastores and history), less 5
  tokens, with the longest match in the request's own text ("dynamic"). The longer one wins: a chain from the newest
  place in the request, or a tree of at most 8 nodes per depth from stored text. Either has min(60, 1 + 4 x match)
  nodes. Matches are compared up to 32 tokens; from 15 on the draft grows no longer.
- With a drafting model, `sam` is the paper's hybrid: where the winning match has at least 5 tokens, it drafts 40 tokens
  from there; otherwise the model drafts, as EAGLE-2 does (`rest_local.planning.eagle2`). The paper gives both numbers;
  that the draft is a chain from stored text, too, is what its published program does. Of several places in stored text
  it takes the first one: that is our reading. Where the model gives nothing (it failed, its context is full, it still
  evaluates the prompt), `sam` drafts as without one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush

from rest_local.drafting.candidates import SOURCE_NUMBER, SourceRows
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.eagle2 import ModelTime, can_draft, eagle2_tree
from rest_local.planning.policy import Stateless, StepContext
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
SAM_THRESHOLD, SAM_CHAIN = 5, 40  # with a drafting model: least match, and tokens of a draft from text
SAM_SEARCHED = (*STORED, "context")  # SAM-Decoding has no prediction
_CONTEXT = SOURCE_NUMBER["context"]

Members = list[tuple[SourceRows, Sequence[int]]]  # for each source, the rows that agree so far


class _EveryStep(Stateless, ABC):
    """A policy that looks up and drafts at every step with room for a node."""

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree of this step, with the time that it took without the passes of a drafting model."""
        if at.limit < 1:
            return Draft(DraftTree())
        begun, model_time = time.perf_counter(), ModelTime(sources)
        tree = self._tree(sources, at)
        return Draft(tree, lookup_us=max(0.0, 1e6 * (time.perf_counter() - begun) - 1e3 * model_time.ms))

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
    """SAM-Decoding: a chain or a tree from the longer of the static and the dynamic match, or from a drafting model."""

    name = "sam"

    def _tree(self, sources: Lookup, at: StepContext) -> DraftTree:
        found = sources.rows(SAM_ROWS, SAM_NODES, SAM_SEARCHED)
        stored, members = longest_of([rows for rows in found if rows.source != _CONTEXT], MAX_MATCH)
        own = next((rows for rows in found if rows.source == _CONTEXT), None)
        dynamic = own.match[0] if own else 0
        static = stored - SAM_STATIC_PENALTY
        if can_draft(sources):
            if max(dynamic, static) >= SAM_THRESHOLD:
                rows = own if own and dynamic >= static else _of_match(members, stored)
                return _chain(rows, min(SAM_CHAIN, at.limit))
            if len(tree := eagle2_tree(sources, at)):
                return tree
        if own and dynamic >= static:
            return _chain(own, min(_sam_nodes(dynamic), at.limit))
        if static > 0:
            return most_frequent(members, min(_sam_nodes(static), at.limit), at.leaves, SAM_PER_DEPTH)
        return DraftTree()


def _sam_nodes(match: int) -> int:
    return min(SAM_NODES, 1 + SAM_FACTOR * match)


def _of_match(members: Members, match: int) -> SourceRows:
    """The first source with a match of this length."""
    return next(rows for rows, _ in members if rows.match[0] >= match)


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
