"""Forced text as rows of a draft: evidence by kind, two ways of splitting, other sources that go along."""

from collections.abc import Sequence

import numpy as np
from support.fake_sources import grown

from rest_local.drafting.sources import (
    CELLS_PER_SOURCE,
    GRAMMAR,
    N_CELLS,
    SOURCE_NUMBER,
    ForcedRows,
    SourceRows,
    grammar_cell,
)
from rest_local.drafting.tree import Draft
from rest_local.grammar.constraint import CERTAIN, CHARACTER, LAST, N_KINDS
from rest_local.planning.acceptance import grammar_rates
from rest_local.retrieval.rows import Rows

CONTEXT = SOURCE_NUMBER["context"]
KEY = {0: [(50, CERTAIN, False, 4), (1, CHARACTER, False, 1)], 1: [(51, CERTAIN, True, 4)], 4: [(60, LAST, False, 6)]}


class Text:
    """`name":`, of which the first token can also be `n`."""

    def __len__(self) -> int:
        return 6

    def at(self, place: int) -> list[tuple[int, int, bool, int]]:
        return KEY.get(place, [])


def context(*rows: list[int]) -> SourceRows:
    width = max(map(len, rows))
    table = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
    return SourceRows(CONTEXT, Rows(table, np.full(len(rows), 9, np.int32), np.arange(len(rows))))


def grow(*sources: SourceRows, least: float = 0.0) -> Draft:
    forced = {
        grammar_cell(kind, apart, depth) for kind in range(N_KINDS) for apart in (False, True) for depth in range(9)
    }
    return grown(sources, lambda cell: 0.9 if cell in forced else 0.6, lambda p: p >= least, 20, 8)


def test_cells_are_distinct_and_rates_begin_near_one() -> None:
    cells = [
        grammar_cell(kind, apart, depth) for kind in range(N_KINDS) for apart in (False, True) for depth in range(6)
    ]
    assert len({*cells}) == len(cells)
    assert GRAMMAR * CELLS_PER_SOURCE <= min(cells) <= max(cells) < N_CELLS
    assert grammar_cell(CERTAIN, False, 99) == grammar_cell(CERTAIN, False, 5)
    rates = grammar_rates()
    assert len(rates) == CELLS_PER_SOURCE
    assert all(0.0 < rate < 1.0 for rate in rates)
    assert min(rates[grammar_cell(CERTAIN, False, depth) - GRAMMAR * CELLS_PER_SOURCE] for depth in range(6)) >= 0.95
    assert rates[grammar_cell(CHARACTER, False, 0) - GRAMMAR * CELLS_PER_SOURCE] < 0.1


def test_both_ways_of_splitting_meet_again() -> None:
    tree = grow(ForcedRows(Text())).tree
    assert sorted(tree.path(node) for node in range(len(tree))) == [[1], [1, 51], [1, 51, 60], [50], [50, 60]]
    assert {*tree.source} == {GRAMMAR}


def test_rows_that_agree_go_on_where_the_forced_text_ends() -> None:
    tree = grow(context([50, 60, 70, 71], [50, 99]), ForcedRows(Text()), least=0.3).tree
    paths = {tuple(tree.path(node)): tree.source[node] for node in range(len(tree))}
    assert paths[50, 60] == GRAMMAR
    assert paths[50, 60, 70] == CONTEXT
    assert paths[50, 99] == CONTEXT


def test_every_proposal_is_counted_also_where_nothing_was_submitted() -> None:
    drafted = grow(ForcedRows(Text()), least=2.0)
    assert not len(drafted.tree)
    first, character = grammar_cell(CERTAIN, False, 0), grammar_cell(CHARACTER, False, 0)
    assert drafted.outcomes([1]) == [(first, False), (character, True)]
    assert drafted.outcomes([5]) == [(first, False), (character, False)]


def test_the_grammar_is_asked_below_likely_nodes_of_other_sources_only() -> None:
    """Once for each node that forced text has not led to; what it says there continues the path."""
    asked: list[tuple[int, ...]] = []

    def force(path: Sequence[int]) -> list[SourceRows]:
        asked.append(tuple(path))
        return [ForcedRows(Text())] if path[-1] == 42 else []

    estimates = {CONTEXT: 0.7, GRAMMAR: 0.9}
    rows = context([41, 42, 43, 44], [41, 9])
    tree = grown([rows], lambda cell: estimates[cell // CELLS_PER_SOURCE], lambda p: p > 0.1, 20, 8, force=force).tree
    paths = {tuple(tree.path(node)): node for node in range(len(tree))}
    assert asked == [(41,), (41, 42), (41, 9)]  # 0.7 and 0.49; 43 is below 0.4
    assert tree.source[paths[41, 42, 50, 60]] == GRAMMAR
    assert tree.source[paths[41, 42, 43]] == CONTEXT
