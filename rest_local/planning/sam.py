"""The policy `sam`: SAM-Decoding's retrieval as published (arXiv 2411.10666), for comparison.

Contract: stored text (datastores and history: "static") and the request's own ("dynamic") are searched for their
longest match, the static one counts 5 less. The longer wins: a chain from the newest place in the request, or a tree of
8 nodes a depth, most frequent branch first, from stored text. Either has min(60, 1 + 4 x match) nodes, at every step,
whatever they cost. Learns nothing. Matches are compared up to 32 tokens; from 15 on the draft grows no longer.
"""

from __future__ import annotations

import time

from rest_local.drafting.candidates import SOURCE_NUMBER, SourceRows
from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.frequency import longest_of, most_frequent
from rest_local.planning.policy import Stateless, StepContext
from rest_local.retrieval.rows import MAX_MATCH

MOST, FACTOR = 60, 4
STATIC_LESS = 5
PER_DEPTH = 8
ROWS = 64  # places of stored text that are counted; the automaton counts all of them
SEARCHED = ("datastore", "history", "context")  # SAM-Decoding knows no prediction
_CONTEXT = SOURCE_NUMBER["context"]


class Sam(Stateless):
    """Stateless."""

    name = "sam"

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Chain or tree from the longer match; empty where there is none."""
        if at.limit < 1:
            return Draft(DraftTree())
        begun = time.perf_counter()
        found = sources.rows(ROWS, MOST, SEARCHED)
        stored, members = longest_of([rows for rows in found if rows.source != _CONTEXT], MAX_MATCH)
        own = next((rows for rows in found if rows.source == _CONTEXT), None)
        dynamic = own.match[0] if own else 0
        static = stored - STATIC_LESS
        tree = DraftTree()
        if own and dynamic >= static:
            tree = _chain(own, min(_length(dynamic), at.limit))
        elif static > 0:
            tree = most_frequent(members, min(_length(static), at.limit), at.leaves, PER_DEPTH)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))


def _length(match: int) -> int:
    return min(MOST, 1 + FACTOR * match)


def _chain(rows: SourceRows, length: int) -> DraftTree:
    """The first row, up to the end of the text."""
    tree = DraftTree(1)
    node = ROOT
    for token in rows.continuations[0][:length]:
        if token < 0:
            break
        node = tree.add(token, node, 1.0, rows.source)
    return tree
