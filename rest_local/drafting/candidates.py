"""Candidates for the next token below a node of the draft, from the rows that retrieval found.

Contract: rows (continuations with the length of their context match, longest first) go in. The evidence of each
distinct next token comes out: the longest match that predicts it, the number of rows that match at least that long, and
the share of those rows that agree. So shorter matches count too, not only the longest (DESIGN.md section 5). The module
knows nothing about probabilities: evidence is the number of an evidence cell, and `rest_local.planning.acceptance` maps
it to a probability.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from math import inf, sqrt
from typing import Protocol

from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Int64Array, Rows

SOURCES = ("datastore", "context", "history", "prediction", "model", "grammar", "edit")
SOURCE_NUMBER = {name: number for number, name in enumerate(SOURCES)}
MODEL = SOURCE_NUMBER["model"]
GRAMMAR = SOURCE_NUMBER["grammar"]

# Upper bounds of the buckets
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, inf)
ROWS = (1, 2, 4, 8, 16, inf)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9999, inf)
N_LENGTHS, N_ROWS, N_SHARES = len(LENGTHS), len(ROWS), len(SHARES)
CELLS_PER_SOURCE = N_LENGTHS * N_ROWS * N_SHARES
N_CELLS = len(SOURCES) * CELLS_PER_SOURCE
_CONFIDENCES = N_ROWS * N_SHARES  # buckets of a draft model's own probability
# Of forced text, by whether the text before it is split otherwise than the vocabulary does, and by kind, until it was
# counted. In JSON answers the toy model had 0.80, 0.95, 0.91, 0.74, 0.11 and 0.54, 0.42, 0.00, 0.83, 0.52; text
# of Qwen's vocabulary, split as it splits it, 1.00, 1.00, 0.73, 0.70, 0.00.
FORCED_RATES = {False: (0.95, 0.95, 0.75, 0.75, 0.03), True: (0.5, 0.4, 0.1, 0.6, 0.5)}

Members = list[tuple["SourceRows", Sequence[int]]]  # the rows that agree with the path so far, by source
Merged = dict[int, tuple[float, int, Members]]  # by token: probability, source, and the rows that continue with it
NO_CANDIDATE: tuple[float, int, Members] = (0.0, -1, [])

PrecedingBigram = tuple[int, int]  # the two tokens before a candidate, the newest last
NO_BIGRAM: PrecedingBigram = (-1, -1)


def cell_of(source: int, length: int, rows: int, agreeing: int) -> int:
    """The number of an evidence cell: source x match length x number of rows x share of the rows that agree."""
    row = (source * N_LENGTHS + bisect_left(LENGTHS, length)) * N_ROWS + bisect_left(ROWS, rows)
    return row * N_SHARES + bisect_left(SHARES, agreeing / rows)


def model_cell(depth: int, probability: float) -> int:
    """The evidence cell of a draft model's candidate: depth below the root x its own probability, finer towards 1."""
    bucket = min(int(_CONFIDENCES * (1.0 - sqrt(max(0.0, 1.0 - probability)))), _CONFIDENCES - 1)
    share, row = divmod(bucket, N_ROWS)
    return MODEL * CELLS_PER_SOURCE + (min(depth, N_LENGTHS - 1) * N_ROWS + row) * N_SHARES + share


def model_rates() -> list[float]:
    """Prior acceptance rates of the source `model`, by cell: the probability that the cell stands for."""
    rates = [0.0] * CELLS_PER_SOURCE
    for depth in range(N_LENGTHS):
        for bucket in range(_CONFIDENCES):
            probability = 1.0 - (1.0 - (bucket + 0.5) / _CONFIDENCES) ** 2
            rates[model_cell(depth, probability) - MODEL * CELLS_PER_SOURCE] = probability
    return rates


def grammar_cell(kind: int, apart: bool, depth: int) -> int:
    """The evidence cell of forced text: kind of token (`rest_local.grammar.constraint`) x whether the text before it
    was split otherwise than the vocabulary does x tokens below the root."""
    return GRAMMAR * CELLS_PER_SOURCE + (apart * N_ROWS + min(depth, N_ROWS - 1)) * N_SHARES + kind


def grammar_rates() -> list[float]:
    """By cell of the source `grammar`, before anything was counted."""
    rates = [0.5] * CELLS_PER_SOURCE
    for apart, kinds in FORCED_RATES.items():
        for kind, rate in enumerate(kinds):
            for depth in range(N_ROWS):
                rates[grammar_cell(kind, apart, depth) - GRAMMAR * CELLS_PER_SOURCE] = rate
    return rates


_CELLS = [  # by source and length: the first cell
    [(source * N_LENGTHS + bisect_left(LENGTHS, n)) * N_ROWS * N_SHARES for n in range(MAX_MATCH + MAX_DEPTH + 1)]
    for source in range(len(SOURCES))
]


# A possible next token, its evidence cell, and the rows of its source that continue with it. It is a tuple because an
# object costs 0.25 us, thirty times a step.
Candidate = tuple[int, int, Sequence[int]]


class SourceRows:
    """The rows of one source, longest match first. `match`: the match length of each row.

    Tokens are decoded depth by depth, when the tree reaches that depth. All data is in plain lists, because Python
    iterates a few dozen rows faster than numpy.
    """

    def __init__(self, source: int, rows: Rows, store: object = None, newest: PrecedingBigram = NO_BIGRAM) -> None:
        """`store`: the origin of the rows, for display. `newest`: the two tokens that the rows continue."""
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
        """The position in the source's text at which each row begins."""
        return self._rows.positions

    @cached_property
    def continuations(self) -> list[list[int]]:
        """All tokens by row and depth; -1 after the end of the document."""
        rows: list[list[int]] = self._rows.continuations.tolist()
        return rows

    def column(self, depth: int) -> list[int]:
        """The token of every row at `depth` (0: directly below the root); -1 if its document ends there."""
        columns = self._columns
        while len(columns) <= depth:
            columns.append(self._rows.column(len(columns)))
        return columns[depth]

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """The distinct tokens at `depth` of the rows `members` (ascending), longest match first.

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
        length = shorter = -1
        for token, rows in groups.items():
            if match[rows[0]] != length:
                length = match[rows[0]]
                shorter = len(match) - bisect_left(self._rising, length)  # the first row with a shorter match
                reaching = bisect_left(members, shorter) - bisect_left(ended, shorter)
                cell = cells[length + depth] + bisect_left(ROWS, reaching) * N_SHARES
            agreeing = bisect_left(rows, shorter) if len(rows) > 1 else 1
            found.append((token, cell + bisect_left(SHARES, agreeing / reaching), rows))
        return found

    def only(self, members: Sequence[int], depth: int) -> Candidate | None:
        """The candidate of a single row, or None if its document ends here. Most nodes below the first have one row."""
        if depth >= self.depth:
            return None
        row = members[0]
        text = self._texts.get(row)
        if text is None:
            text = self._texts[row] = self._rows.row(row)
        token = text[depth]
        if token < 0:
            return None
        return (token, self._cells[self.match[row] + depth] + N_SHARES - 1, members)  # one row, which agrees


class EditRows(SourceRows):
    """Rows of files that the answer edits. Their evidence is the level, how the file was found and is written (`way`),
    what the request's own text proposes (nothing, the same, another token), and whether a line ends at a token:
    there blocks end.
    """

    def __init__(
        self,
        rows: Rows,
        breaks: Sequence[bytes],
        way: int,
        context: Rows | None,
        newest: PrecedingBigram = NO_BIGRAM,
    ) -> None:
        """`breaks`: for each row 1 where a line ends, else 0. `way`: below N_SHARES. `context`: the rows of the source
        `context`.
        """
        super().__init__(SOURCE_NUMBER["edit"], rows, None, newest)
        likely = context.column(0) if context is not None and len(context) else []
        self._kinds = [
            (0 if not likely else 1 if token in likely else 2) * 2 * N_SHARES + way for token in self.column(0)
        ]
        self._breaks = breaks

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """The distinct tokens at `depth`, the likeliest first. 1 us for each row."""
        if depth >= self.depth:
            return []
        groups: dict[int, list[int]] = {}
        for row in members:
            text = self._texts.get(row)
            if text is None:
                text = self._texts[row] = self._rows.row(row)
            token = text[depth]
            if token in groups:
                groups[token].append(row)
            elif token >= 0:
                groups[token] = [row]
        found: list[Candidate] = []
        for token, through in groups.items():
            row = through[0]
            breaks = self._breaks[row]
            ends = depth < len(breaks) and breaks[depth]
            cell = self._cells[self.match[row] + depth] + self._kinds[row] + (N_SHARES if ends else 0)
            found.append((token, cell, through))
        return found


class ForcedText(Protocol):
    """`grammar.constraint.ForcedText`. `at`: a token, its kind, whether the text before it is split otherwise
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

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """The tokens at the place `members[0]`, two at most. 2 us, and 12 us for text that was split in a new way."""
        return [
            (token, grammar_cell(kind, apart, depth), (end,)) for token, kind, apart, end in self._text.at(members[0])
        ]


class ModelRows(SourceRows):
    """What a drafting model answered in one step, by path. The number of a row is the number of a path, 0 the root."""

    def __init__(self) -> None:
        self.source, self.store, self.newest = MODEL, None, NO_BIGRAM
        self.answers: dict[int, Sequence[tuple[int, float]]] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return 1

    def below(self, path: int, token: int) -> int:
        """The number of the path that continues path number `path` with a token."""
        return self._numbers.setdefault((path, token), len(self._numbers) + 1)

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """The tokens after path number `members[0]`; none where the model was not asked."""
        path = members[0]
        return [
            (token, model_cell(depth, probability), (self.below(path, token),))
            for token, probability in self.answers.get(path, ())
        ]
