"""Where accepted tokens were drafted from: for people who want to see it (the page of the server).

Contract: a draft and the tokens that came of it go in, for each token the evidence that it was drafted on. Costs some
5 us a token, and for stored text reading the document up to there, so it is asked for, not always done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.drafting.candidates import GRAMMAR, SOURCES
from rest_local.drafting.drafter import Draft
from rest_local.drafting.tree import ROOT
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore

log = logging.getLogger("rest_local.drafting")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Origin:
    """`probability`: joint, as the planner estimated it; `match`: tokens of context that agreed; `file` and `line`
    (from 1): of the longest match, where it is stored text.
    """

    source: str
    probability: float
    match: int
    file: str | None = None
    line: int | None = None


def origins_of(draft: Draft, tokens: Sequence[int], decode: Decode) -> list[Origin | None]:
    """By token; None for what nobody drafted, and all behind it."""
    found: list[Origin | None] = []
    node = ROOT
    for depth, token in enumerate(tokens):
        child = next((c for c in draft.tree.children_of(node) if draft.tree.token[c] == token), None)
        if child is None:
            break
        found.append(_origin(draft, node, child, depth, decode))
        node = child
    return found + [None] * (len(tokens) - len(found))


def _origin(draft: Draft, parent: int, node: int, depth: int, decode: Decode) -> Origin:
    tree = draft.tree
    source, probability = tree.source[node], tree.probability[node]
    proposal = draft.proposals.get(parent)
    if proposal is None or tree.token[node] not in proposal.merged:  # of a policy that keeps no evidence
        return Origin(SOURCES[source], probability, 0)
    members = proposal.merged[tree.token[node]][2]
    rows, numbers = next(((rows, numbers) for rows, numbers in members if rows.source == source), (None, ()))
    if rows is None or source == GRAMMAR:  # said by a draft model, or forced: there is no text to point to
        return Origin(SOURCES[source], probability, 0)
    first = numbers[0]
    name, line = _place(rows.store, int(rows.positions[first]) + depth, decode)
    return Origin(SOURCES[source], probability, rows.match[first] + depth, name, line)


def _place(store: Any, position: int, decode: Decode) -> tuple[str | None, int | None]:
    if not isinstance(store, Datastore):
        return None, None
    try:
        name, line, _ = store.place(position, decode)
        return name, line
    except (DatastoreError, OSError, ValueError, IndexError) as error:  # a damaged table costs no answer
        log.warning("datastore %s: cannot say where a draft comes from (%s)", store.path, error)
        return None, None
