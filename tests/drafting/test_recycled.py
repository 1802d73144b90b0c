"""Recycled logits: the top k of a row, the table of successors, what it adds to other sources, and its budgets."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import CELLS_PER_SOURCE, LOGITS, N_CELLS, SOURCE_NUMBER, SourceRows
from rest_local.drafting.growth import Draft
from rest_local.drafting.recycled import (
    SLOTS,
    LogitsRow,
    RecycledRows,
    SuccessorTable,
    likeliest,
    logits_cell,
    logits_rates,
)
from rest_local.planning.plan import draft
from rest_local.retrieval.rows import Rows

CONTEXT = SOURCE_NUMBER["context"]
INF = float("inf")


def row_of(n: int, **likely: float) -> np.ndarray:
    """float32 [n]: 0, and the given logits of the tokens `t5=7.0`."""
    row = np.zeros(n, np.float32)
    for name, logit in likely.items():
        row[int(name[1:])] = logit
    return row


# The top k of a row

SIZES = st.sampled_from([1, 3, 127, 128, 129, 1000, 1024, 1500, 4096, 16_383, 16_384, 17_000, 40_001])
VALUES = st.sampled_from([0.0, 1.0, -INF, 3e38, -3e38, 2.5])


@given(
    SIZES, st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans(), st.lists(st.tuples(st.floats(0, 1), VALUES))
)
def test_likeliest_are_those_of_a_full_sort(
    n: int, k: int, seed: int, coarse: bool, special: list[tuple[float, float]]
) -> None:
    row = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    if coarse:
        row = row.round()  # many equal logits
    for place, value in special:
        row[int(place * (n - 1))] = value
    before = row.copy()
    found = likeliest(row, k)
    wanted = np.sort(row)[::-1][:k]
    assert row[found].tolist() == wanted[wanted > -INF].tolist()
    assert len(set(found.tolist())) == len(found)
    assert np.array_equal(row, before)


@pytest.mark.parametrize("n", [100, 4096, 20_000])
@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("place", [0, 57, -1])
def test_a_row_that_is_damaged_has_no_likeliest_or_right_ones(n: int, value: float, place: int) -> None:
    row = row_of(n, t3=5.0, t9=4.0)
    row[place] = value
    found = likeliest(row, 2).tolist()
    assert found in ([], [3, 9])
    assert value != INF or not found


# The table


def test_pairs_that_share_a_slot_are_not_mixed_up() -> None:
    table = SuccessorTable(50_000)
    place = table._place(1, 2)
    other = next(
        (before, token) for before in range(3, 400) for token in range(3, 2000) if table._place(before, token) == place
    )
    table.read((1, 2), row_of(50_000, t5=9.0))
    assert [kind for *_, kind in table.successors((1, 2))] == [True]
    table.read(other, row_of(50_000, t6=9.0))
    assert [(token, kind) for token, _, _, kind in table.successors((1, 2))] == [(5, False)]
    assert [(token, kind) for token, _, _, kind in table.successors(other)] == [(6, True)]


def test_memory_is_bounded_and_taken_by_the_first_row() -> None:
    table = SuccessorTable(152_000)
    assert table.nbytes == 0
    table.read((0, 0), row_of(152_000, t1=5.0))
    size = table.nbytes
    assert size < 20e6
    for token in range(0, 152_000, 997):
        table.read((token // 2, token), row_of(152_000, t7=5.0))
    assert table.nbytes == size
    assert len(table._pair) == SLOTS


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 9), st.integers(0, 2**16)), max_size=40))
def test_the_table_is_a_dictionary_of_newest_rows(reads: list[tuple[int, int, int]]) -> None:
    """The oracle has no slots and sorts; ten tokens never share a slot."""
    table = SuccessorTable(10, kept=4)
    single: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for before, token, seed in reads:
        row = np.random.default_rng(seed).standard_normal(10).astype(np.float32)
        table.read((before, token), row)
        best = np.sort(row)[-4:].astype(np.float64)
        share = np.exp(best - best.max())
        count = int((share >= 0.03 * share.sum()).sum())
        single[token] = np.argsort(-row)[:count].tolist()
        if before >= 0:
            pairs[before, token] = single[token]
    for before in range(10):
        for token in range(10):
            paired = pairs.get((before, token), [])
            alone = [each for each in single.get(token, []) if each not in paired]
            assert [each for each, *_ in table.successors((before, token))] == paired + alone


class Clocked(SuccessorTable):
    """Each row takes `ms`."""

    ms = 0.04

    def _now(self) -> float:
        return 1e-3 * self.ms * self.rows_read


def rows(n: int) -> Iterator[LogitsRow]:
    for number in range(n):
        yield (0, number), row_of(50, t3=4.0)


@pytest.mark.parametrize(("most_ms", "read"), [(0.15, 3), (0.04, 1), (0.039, 0), (0.0, 0), (10.0, 6)])
def test_rows_are_read_while_there_is_time(most_ms: float, read: int) -> None:
    table = Clocked(50)
    table.row_ms = 0.04
    assert table.refresh(rows(6), most_ms + 1e-9) == pytest.approx(0.04 * read)
    assert table.rows_read == read


# As a source


def context(*continuations: list[int], newest: tuple[int, int] = (1, 2)) -> SourceRows:
    width = max(map(len, continuations))
    table = np.array([row + [-1] * (width - len(row)) for row in continuations], np.int32)
    match = np.full(len(continuations), 9, np.int32)
    return SourceRows(CONTEXT, Rows(table, match, np.arange(len(continuations))), newest=newest)


def grow(*sources: SourceRows, logits: float = 0.5, least: float = 0.1) -> Draft:
    return draft(
        sources, lambda cell: logits if cell // CELLS_PER_SOURCE == LOGITS else 0.6, lambda p: p >= least, 20, 8
    )


def filled() -> SuccessorTable:
    table = SuccessorTable(100)
    for before, token, likely in ((1, 2, 5), (2, 5, 6), (5, 6, 7), (2, 9, 10)):
        table.read((before, token), row_of(100, **{f"t{likely}": 20.0}))
    return table


def paths(drafted: Draft) -> list[list[int]]:
    return sorted(drafted.tree.path(node) for node in range(len(drafted.tree)))


def test_nodes_of_other_sources_are_continued() -> None:
    drafted = grow(context([9]), RecycledRows(filled(), (1, 2)))
    assert [9, 10] in paths(drafted)
    node = next(node for node in range(len(drafted.tree)) if drafted.tree.path(node) == [9, 10])
    assert drafted.tree.source[node] == LOGITS


def test_evidence_says_what_other_sources_propose() -> None:
    def cells(*sources: SourceRows, estimate: float = 0.6) -> list[int]:
        drafted = draft(sources, lambda cell: estimate, lambda p: False, 20, 8)
        return [
            cell for rows, found in drafted.proposals[-1].by_source if rows.source == LOGITS for _, cell, _ in found
        ]

    def cell(rivals: int, agreed: bool) -> int:
        return logits_cell(0, 9, True, rivals, agreed)

    rows = RecycledRows(filled(), (1, 2))
    assert cells(rows) == [cell(0, False)]
    assert cells(context([9]), rows, estimate=0.1) == [cell(1, False)]
    assert cells(context([9]), rows) == [cell(2, False)]
    assert cells(context([5]), rows) == [cell(2, True)]


def test_cells_are_distinct_and_rates_are_probabilities() -> None:
    cells = [
        logits_cell(rank, level, paired, rivals, agreed)
        for rank in (0, 1, 2) for level in range(10) for paired in (False, True)
        for rivals in range(3) for agreed in (False, True)
    ]  # fmt: skip
    assert len({*cells}) == len(cells)
    assert LOGITS * CELLS_PER_SOURCE <= min(cells) <= max(cells) < N_CELLS
    assert logits_cell(2, 0, False, 0, False) == logits_cell(7, 0, False, 0, False)
    rates = logits_rates()
    assert len(rates) == CELLS_PER_SOURCE
    assert all(0 < rate < 1 for rate in rates)
    rate = {cell: rates[cell - LOGITS * CELLS_PER_SOURCE] for cell in cells}
    assert rate[logits_cell(0, 9, True, 2, True)] > rate[logits_cell(0, 9, True, 0, False)] > 0.4
    assert rate[logits_cell(0, 9, False, 2, False)] < 0.1
