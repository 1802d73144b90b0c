"""A draft tree grows best first, by calibrated probabilities, and shares the budget of a pass with other trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import Merged, PrecedingBigram, SourceRows
from rest_local.drafting.growth import (
    Calibrate,
    Calibrated,
    Draft,
    Growth,
)
from rest_local.drafting.sources import Sources
from rest_local.planning.plan import draft, grow
from rest_local.retrieval.rows import Rows

TOKENS = 6
DEPTH = 5
Texts = st.lists(st.lists(st.integers(-1, TOKENS - 1), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=7)


def _rows(number: int, texts: list[list[int]], matches: list[int]) -> SourceRows:
    match = np.array(sorted(matches, reverse=True)[: len(texts)], np.int32)
    return SourceRows(number, Rows(np.array(texts, np.int32), match, np.arange(len(texts)), limit=TOKENS))


def _estimate(cell: int) -> float:
    return 0.05 + 0.9 * (cell * 37 % 101) / 101


def _calibrate(before: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
    """Depends only on the tokens, so that every node gets another result."""
    return [(token, 0.05 + 0.9 * ((7 * token + 3 * before[0] + before[1]) % 11) / 11, (token,)) for token in candidates]


def _slow(sources: list[SourceRows], least: float, most: int, leaves: int, calibrate: Calibrate | None) -> Draft:
    """The same tree, node by node, with a draft model that proposes nothing."""
    growth = Growth(sources, _estimate, most, leaves, calibrate, promise=lambda depth: 0.6)
    while growth.promised > growth.best or growth.best >= least:
        if growth.promised > growth.best:
            for question in growth.open_nodes():
                growth.answered(question.number, ())
        else:
            growth.grow()
    return growth.draft


def _content(drafted: Draft) -> list[object]:
    tree = drafted.tree
    proposals = [
        ([(rows.source, [c[:2] for c in found]) for rows, found in p.by_source], list(p.merged), list(p.calibrated))
        for _, p in sorted(drafted.proposals.items())
    ]
    return [tree.token, tree.parent, tree.depth, tree.probability, tree.source, tree.children, tree.n_leaves, proposals]


@given(
    st.lists(st.tuples(Texts, st.lists(st.integers(1, 30), min_size=7, max_size=7)), min_size=1, max_size=3),
    st.floats(0.03, 0.6),
    st.integers(1, 20),
    st.integers(1, 8),
    st.booleans(),
)
def test_a_silent_draft_model_changes_nothing(
    found: list[tuple[list[list[int]], list[int]]], least: float, most: int, leaves: int, calibrated: bool
) -> None:
    sources = [_rows(number, texts, matches) for number, (texts, matches) in enumerate(found)]
    calibrate = _calibrate if calibrated else None
    quick = draft(sources, _estimate, lambda probability: probability >= least, most, leaves, calibrate=calibrate)
    assert _content(quick) == _content(_slow(sources, least, most, leaves, calibrate))
    paths = [quick.tree.path(node) for node in range(len(quick.tree))]
    for path in paths[-3:]:
        slow = _slow(sources, least, most, leaves, calibrate)
        assert quick.outcomes([*path, 0]) == slow.outcomes([*path, 0])
        assert [(list(j), t) for j, t in quick.calibrations(path)] == [(list(j), t) for j, t in slow.calibrations(path)]


def source(texts: list[list[int]], newest: PrecedingBigram) -> SourceRows:
    tokens = np.array(texts, np.int32)
    return SourceRows(1, Rows(tokens, np.full(len(texts), 5, np.int32), np.arange(len(texts))), newest=newest)


class Fixed:
    """A calibrator with a fixed probability for each token. Records its calls."""

    def __init__(self, probability: dict[int, float]) -> None:
        self.probability = probability
        self.calls: dict[PrecedingBigram, list[int]] = {}

    def __call__(self, before: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        self.calls[before] = list(candidates)
        return [(token, self.probability[token], (0,)) for token in candidates]


def test_a_tree_grows_by_calibrated_probabilities() -> None:
    calibrate = Fixed({1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7})
    rows = source([[1, 2, 3], [2, 4, 1]], (11, 12))
    grown = draft([rows], lambda _: 0.5, lambda p: p > 0.3, 9, 9, calibrate=calibrate)
    assert grown.tree.token == [2, 4]
    assert grown.tree.probability == pytest.approx([0.9, 0.9 * 0.7])
    assert calibrate.calls == {(11, 12): [1, 2], (12, 2): [4], (2, 4): [1]}


def test_calibrations_end_where_the_model_leaves_the_tree() -> None:
    rows = source([[1, 2, 3], [2, 4, 1]], (11, 12))
    grown = draft([rows], lambda _: 0.5, lambda p: p > 0.3, 9, 9, calibrate=Fixed({1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7}))
    assert grown.calibrations([2, 7]) == [([(1, 0.2, (0,)), (2, 0.9, (0,))], 2), ([(4, 0.7, (0,))], 7)]
    assert grown.calibrations([1]) == [([(1, 0.2, (0,)), (2, 0.9, (0,))], 1)]


@pytest.mark.parametrize(("text", "newest"), [([5, 6, 5], (6, 5)), ([5, 5], (5, 5))])
def test_sources_give_the_two_tokens_before_their_rows(text: list[int], newest: PrecedingBigram) -> None:
    sources = Sources([], 10)
    sources.restart(text)
    assert [rows.newest for rows in sources.rows()] == [newest]


Probabilities = st.lists(st.floats(0.01, 1.0), max_size=8).map(
    lambda probabilities: sorted(probabilities, reverse=True)
)


class Scripted:
    """A tree whose next nodes have these probabilities."""

    def __init__(self, probabilities: list[float]) -> None:
        self._left = list(probabilities)

    promised = 0.0

    @property
    def best(self) -> float:
        return self._left[0] if self._left else 0.0

    def grow(self) -> None:
        self._left.pop(0)


@given(st.lists(Probabilities, max_size=6), st.integers(0, 30), st.floats(0, 1))
def test_nodes_come_in_descending_order_over_all_trees(trees: list[list[float]], limit: int, least: float) -> None:
    """The same as to sort all nodes of all trees."""
    growths: Any = [Scripted(probabilities) for probabilities in trees]
    order = grow(growths, lambda probability: probability >= least, limit)
    naive = sorted(
        (probability for probabilities in trees for probability in probabilities if probability >= least), reverse=True
    )[:limit]
    taken = [0] * len(trees)
    given_out = []
    for number in order:
        given_out.append(trees[number][taken[number]])
        taken[number] += 1
    assert given_out == naive
