"""The policy `rest`: REST as published (arXiv 2311.08252), for comparison.

Contract: the newest 16 tokens, shortened to 2 until they are found in stored text; at most 5 000 places, 10 tokens of
each; the 64 most frequent beginnings are submitted at every step, whatever they cost. Stored text is the datastores
and, where there is one, the history: REST has one datastore and no other source. Learns nothing.
"""

from __future__ import annotations

import time

from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.frequency import longest_of, most_frequent
from rest_local.planning.policy import Stateless, StepContext

STORED = ("datastore", "history")
NODES = 64
LONGEST, SHORTEST = 16, 2
MATCHES = 5000
TOKENS = 10
FEW = 64  # rows of a first, cheap look: only where all of them share the longest match are there more to fetch


class Rest(Stateless):
    """Stateless."""

    name = "rest"

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The most frequent beginnings of what followed the longest match; empty where stored text has none."""
        if at.limit < 1:
            return Draft(DraftTree())
        begun = time.perf_counter()
        found = sources.rows(FEW, TOKENS, STORED)
        longest, members = longest_of(found, LONGEST)
        if any(len(numbers) >= FEW for _, numbers in members):
            longest, members = longest_of(sources.rows(MATCHES, TOKENS, STORED), LONGEST)
        tree = DraftTree()
        if longest >= SHORTEST:
            tree = most_frequent(members, min(NODES, at.limit), at.leaves)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))
