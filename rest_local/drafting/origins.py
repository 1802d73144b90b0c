"""The origin of accepted draft tokens, for display on the server's page.

Contract: a draft and the tokens of the step go in; for each token the evidence of its draft comes out. It costs about
5 us for a token, and for stored text it reads the document up to the match, so it is computed only on request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.drafting.candidates import GRAMMAR, LOGITS, MODEL, SOURCES
from rest_local.drafting.growth import Draft
from rest_local.drafting.tree import ROOT
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore

PLACELESS = (GRAMMAR, LOGITS, MODEL)  # sources whose drafts are in no text
log = logging.getLogger("rest_local.drafting")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Origin:
    """`probability`: joint, as the planner estimated it. `match`: number of context tokens that agree. `file` and
    `line` (from 1): the place of the longest match, if it is in stored text.
    """

    source: str
    probability: float
    match: int
    file: str | None = None
    line: int | None = None


def origins_of(draft: Draft, tokens: Sequence[int], decode: Decode) -> list[Origin | None]:
    """The origin of each token; None from the first token that was not drafted."""
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
