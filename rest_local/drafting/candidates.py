"""Candidates for the next token below a node of the draft, from the rows that retrieval found.

Contract: rows (continuations with the length of their context match, longest first) go in; for each distinct next token
its evidence comes out: the longest match that predicts it, how many rows match at least that long, and what share of
those agree. Lengths are thereby blended, not cut at the longest (DESIGN.md section 5). Knows nothing about
probabilities: evidence is a small cell number, which `rest_local.planning.acceptance` maps to one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from math import sqrt
from typing import Protocol

from rest_local.retrieval.rows import Int64Array, Rows

SOURCES = ("datastore", "context", "history", "prediction", "model", "grammar")
SOURCE_NUMBER = {name: number for number, name in enumerate(SOURCES)}
MODEL = SOURCE_NUMBER["model"]
GRAMMAR = SOURCE_NUMBER["grammar"]

# Upper ends of the buckets; the last bucket is open.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
ROWS = (1, 2, 4, 8, 16)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9999)
N_LENGTHS, N_ROWS, N_SHARES = len(LENGTHS) + 1, len(ROWS) + 1, len(SHARES) + 1
CELLS_PER_SOURCE = N_LENGTHS * N_ROWS * N_SHARES
N_CELLS = len(SOURCES) * CELLS_PER_SOURCE
_SURENESS = N_ROWS * N_SHARES  # buckets of a draft model's own probability
MOST_CANDIDATES = 24  # per source and node: HumanEval 1.79, 1.81 and 1.82 at 6.5 nodes with 8, 16 and 24 of them,
FEW_CANDIDATES = 8  # and without what words say about them no difference
# Of forced text, by whether the text before it is split otherwise than the vocabulary does, and by kind, until it was
# counted. In `benchmarks.forced` the demo model had 0.80, 0.95, 0.91, 0.74, 0.11 and 0.54, 0.42, 0.00, 0.83, 0.52; text
# of Qwen's vocabulary, split as it splits it, 1.00, 1.00, 0.73, 0.70, 0.00.
FORCED_RATES = {False: (0.95, 0.95, 0.75, 0.75, 0.03), True: (0.5, 0.4, 0.1, 0.6, 0.5)}

PrecedingBigram = tuple[int, int]  # the two newest tokens before a place, the newest last
NOTHING: PrecedingBigram = (-1, -1)

_MANY = 256  # rows and lengths beyond are in the last bucket

_length_cell = [
    next((i for i, top in enumerate(LENGTHS) if n <= top), N_LENGTHS - 1) * N_ROWS * N_SHARES for n in range(_MANY)
]
_rows_cell = [next((i for i, top in enumerate(ROWS) if n <= top), N_ROWS - 1) * N_SHARES for n in range(_MANY)]


def cell_of(source: int, length: int, rows: int, agreeing: int) -> int:
    """Number of the evidence cell: source x match length x rows x share of them that agree."""
    return source * CELLS_PER_SOURCE + _length_cell[min(length, _MANY - 1)] + _cell_of_rows(rows, agreeing)


def _cell_of_rows(rows: int, agreeing: int) -> int:
    share = N_SHARES - 1 if agreeing == rows else bisect_left(SHARES, agreeing / rows)
    return share + (_rows_cell[rows] if rows < _MANY else _rows_cell[-1])


def model_cell(depth: int, probability: float) -> int:
    """The evidence cell of a draft model's candidate: tokens below the root x its own probability, finer towards 1."""
    bucket = min(int(_SURENESS * (1.0 - sqrt(max(0.0, 1.0 - probability)))), _SURENESS - 1)
    share, row = divmod(bucket, N_ROWS)
    return MODEL * CELLS_PER_SOURCE + (min(depth, N_LENGTHS - 1) * N_ROWS + row) * N_SHARES + share


def model_rates() -> list[float]:
    """By cell of the source `model`, before anything was counted: the probability that it stands for itself."""
    rates = [0.0] * CELLS_PER_SOURCE
    for depth in range(N_LENGTHS):
        for bucket in range(_SURENESS):
            probability = 1.0 - (1.0 - (bucket + 0.5) / _SURENESS) ** 2
            rates[model_cell(depth, probability) - MODEL * CELLS_PER_SOURCE] = probability
    return rates


def grammar_cell(kind: int, apart: bool, depth: int) -> int:
    """The evidence cell of forced text: kind of token (`rest_local.grammar.forced`) x whether the text before it was
    split otherwise than the vocabulary does x tokens below the root."""
    return GRAMMAR * CELLS_PER_SOURCE + (apart * N_ROWS + min(depth, N_ROWS - 1)) * N_SHARES + kind


def grammar_rates() -> list[float]:
    """By cell of the source `grammar`, before anything was counted."""
    rates = [0.5] * CELLS_PER_SOURCE
    for apart, kinds in FORCED_RATES.items():
        for kind, rate in enumerate(kinds):
            for depth in range(N_ROWS):
                rates[grammar_cell(kind, apart, depth) - GRAMMAR * CELLS_PER_SOURCE] = rate
    return rates


_ALONE = _cell_of_rows(1, 1)
_CELLS = [[source * CELLS_PER_SOURCE + cell for cell in _length_cell] for source in range(len(SOURCES))]


# One possible next token, its evidence cell, and the rows of its source that go on through it. Not a class: making one
# of a class costs a quarter of a microsecond, thirty times a step.
Candidate = tuple[int, int, Sequence[int]]


class SourceRows:
    """The rows of one source, longest match first: `match` by row, and the tokens, by depth as growth gets there.

    Plain lists: walking a few dozen rows is faster in Python than in numpy.
    """

    def __init__(self, source: int, rows: Rows, store: object = None, newest: PrecedingBigram = NOTHING) -> None:
        """`store`: whose they are, to say later where they come from; `newest`: the tokens they go on behind."""
        self.source, self.store, self.newest = source, store, newest
        self.match = rows.matches()
        self.depth = rows.depth
        self._rising = self.match[::-1]
        self._rows = rows
        self._columns: list[list[int]] = []
        self._texts: dict[int, list[int]] = {}
        self._cells = _CELLS[source]

    def __len__(self) -> int:
        return len(self.match)

    @property
    def positions(self) -> Int64Array:
        """Where in the source's text each row begins."""
        return self._rows.positions

    @cached_property
    def continuations(self) -> list[list[int]]:
        """All tokens by row and depth, -1 from the document's end on."""
        rows: list[list[int]] = self._rows.continuations.tolist()
        return rows

    def column(self, depth: int) -> list[int]:
        """The token of every row at `depth` (0: directly below the root), -1 where its document ends there."""
        columns = self._columns
        while len(columns) <= depth:
            columns.append(self._rows.column(len(columns)))
        return columns[depth]

    def candidates(self, members: Sequence[int], depth: int, most: int = MOST_CANDIDATES) -> list[Candidate]:
        """Distinct tokens at `depth` among the rows `members` (ascending), longest match first, `most` of them.

        O(len(members)); 10 us for 64 rows, 1 us for one.
        """
        if depth >= self.depth:
            return []
        if len(members) == 1:
            candidate = self.only(members, depth)
            return [] if candidate is None else [candidate]
        column, match, cells = self.column(depth), self.match, self._cells
        groups: dict[int, list[int]] = {}
        for row in members:
            token = column[row]
            if token in groups:
                groups[token].append(row)
            else:
                groups[token] = [row]
        ended = groups.pop(-1, ())
        found: list[Candidate] = []
        length = beyond = -1
        for token, rows in groups.items():
            if match[rows[0]] != length:
                length = match[rows[0]]
                beyond = len(match) - bisect_left(self._rising, length)  # the first row with a shorter match
                reaching = bisect_left(members, beyond) - bisect_left(ended, beyond)
            agreeing = bisect_left(rows, beyond) if len(rows) > 1 else 1
            found.append((token, cells[length + depth] + _cell_of_rows(reaching, agreeing), rows))
            if len(found) == most:
                break
        return found

    def only(self, members: Sequence[int], depth: int) -> Candidate | None:
        """The candidate of a single row, as at most nodes below the first: one text goes on, or ends here."""
        if depth >= self.depth:
            return None
        row = members[0]
        text = self._texts.get(row)
        if text is None:
            text = self._texts[row] = self._rows.row(row)
        token = text[depth]
        if token < 0:
            return None
        return (token, self._cells[self.match[row] + depth] + _ALONE, members)


class ForcedText(Protocol):
    """`rest_local.grammar.forced.ForcedText`. `at`: a token, its kind, whether the text before it is split otherwise
    than the vocabulary does, and the place after it."""

    def __len__(self) -> int: ...
    def at(self, place: int) -> Sequence[tuple[int, int, bool, int]]: ...


class ForcedRows(SourceRows):
    """What a grammar allows only one way. The number of a row is a place in the text."""

    def __init__(self, text: ForcedText, newest: PrecedingBigram) -> None:
        self.source, self.store, self.newest = GRAMMAR, None, newest
        self._text = text

    def __len__(self) -> int:
        return 1

    def candidates(self, members: Sequence[int], depth: int, most: int = MOST_CANDIDATES) -> list[Candidate]:
        """The tokens at the place `members[0]`, two at most. 2 us, and 12 us for text that was split in a new way."""
        return [
            (token, grammar_cell(kind, apart, depth), (end,)) for token, kind, apart, end in self._text.at(members[0])
        ]
