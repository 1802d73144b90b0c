"""Candidates for the next token below a node of the draft, from the rows that retrieval found.

Contract: rows (continuations with the length of their context match, longest first) go in; for each distinct next token
its evidence comes out: the longest match that predicts it, how many rows match at least that long, and what share of
those agree. Lengths are thereby blended, not cut at the longest (DESIGN.md section 5). Knows nothing about
probabilities: evidence is a small cell number, which `rest_local.planning.acceptance` maps to one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from rest_local.retrieval.rows import Rows

SOURCES = ("datastore", "context", "history", "prediction", "model")
SOURCE_NUMBER = {name: number for number, name in enumerate(SOURCES)}

# Upper ends of the buckets; the last bucket is open.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
ROWS = (1, 2, 4, 8, 16)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9999)
N_LENGTHS, N_ROWS, N_SHARES = len(LENGTHS) + 1, len(ROWS) + 1, len(SHARES) + 1
CELLS_PER_SOURCE = N_LENGTHS * N_ROWS * N_SHARES
N_CELLS = len(SOURCES) * CELLS_PER_SOURCE
MOST_CANDIDATES = 8  # per source and node: later ones have never paid for their place in a batch

_length_bucket = [next((i for i, top in enumerate(LENGTHS) if n <= top), N_LENGTHS - 1) for n in range(256)]
_rows_bucket = [next((i for i, top in enumerate(ROWS) if n <= top), N_ROWS - 1) for n in range(256)]


def cell_of(source: int, length: int, rows: int, agreeing: int) -> int:
    """Number of the evidence cell: source x match length x rows x share of them that agree."""
    share = N_SHARES - 1 if agreeing == rows else bisect_left(SHARES, agreeing / rows)
    place = (source * N_LENGTHS + _length_bucket[min(length, 255)]) * N_ROWS + _rows_bucket[min(rows, 255)]
    return place * N_SHARES + share


class Candidate(NamedTuple):
    """One possible next token: its evidence cell, and the rows of its source that go on through it."""

    token: int
    cell: int
    rows: Sequence[int]


class SourceRows:
    """The rows of one source, as plain lists: walking a few dozen rows is faster in Python than in numpy."""

    def __init__(self, source: int, rows: Rows) -> None:
        self.source = source
        self.continuations: list[list[int]] = rows.continuations.tolist()
        self.match: list[int] = rows.match.tolist()
        self.depth = rows.continuations.shape[1]

    def __len__(self) -> int:
        return len(self.match)

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """Distinct tokens at `depth` (0: directly below the root) among the rows `members`, longest match first.

        O(len(members)); about 10 us for 64 rows.
        """
        if depth >= self.depth:
            return []
        if len(members) == 1:  # most nodes below the first: one text goes on
            token, length = self.continuations[members[0]][depth], self.match[members[0]]
            return [Candidate(token, cell_of(self.source, length + depth, 1, 1), members)] if token >= 0 else []
        groups: dict[int, list[int]] = {}
        alive: list[int] = []  # matches of the rows that go on, longest first
        for row in members:
            token = self.continuations[row][depth]
            if token < 0:
                continue
            alive.append(-self.match[row])
            groups.setdefault(token, []).append(row)
        found = []
        for token, rows in groups.items():
            length = self.match[rows[0]]
            reaching = bisect_right(alive, -length)  # rows that match at least as long
            agreeing = bisect_right(rows, -length, key=lambda r: -self.match[r]) if len(rows) > 1 else 1
            found.append(Candidate(token, cell_of(self.source, length + depth, reaching, agreeing), rows))
            if len(found) == MOST_CANDIDATES:
                break
        return found
