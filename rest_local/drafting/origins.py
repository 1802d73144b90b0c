"""Say where accepted draft tokens come from, for display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rest_local.drafting.sources import GRAMMAR, MODEL, SOURCES
from rest_local.drafting.tree import ROOT, Draft
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore

PLACELESS = (GRAMMAR, MODEL)  # Drafts of these sources are in no text.
log = logging.getLogger("rest_local.drafting")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Origin:
    """The evidence of a draft token that was accepted.

    Attributes:
        source: the name of the source that proposed it
        probability: the joint one that the planner estimated
        match: how many tokens of the context agree
        file, line: the place of the longest match, if it is in stored text; lines count from 1
    """

    source: str
    probability: float
    match: int
    file: str | None = None
    line: int | None = None


def origins_of(draft: Draft, tokens: Sequence[int], decode: Decode) -> list[Origin | None]:
    """Return the origin of each token, None from the first token that was not drafted.

    It takes about 5 us for a token, and for stored text reads the document up to the match.
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
    """Return the origin of a node, without a place if the policy keeps no evidence."""
    tree = draft.tree
    source, probability = tree.source[node], tree.probability[node]
    proposal = draft.proposals.get(parent)
    members = proposal.merged[tree.token[node]][2] if proposal and tree.token[node] in proposal.merged else []
    of_source = [(rows, numbers[0]) for rows, numbers in members if rows.source == source and source not in PLACELESS]
    if not of_source:
        return Origin(SOURCES[source], probability, 0)
    rows, first = max(of_source, key=lambda found: found[0].match[found[1]])  # The better one of several datastores.
    depth -= rows.begin
    match, name, line = rows.match[first] + depth, None, None
    if isinstance(rows.store, Datastore):
        try:
            name, line, _ = rows.store.place(int(rows.positions[first]) + depth, decode)
        except (DatastoreError, OSError, ValueError, IndexError) as error:  # A damaged table must not end the answer.
            log.warning("datastore %s: the origin of a draft is unknown (%s)", rows.store.path, error)
    return Origin(SOURCES[source], probability, match, name, line)
