"""A judge of candidates sees the two tokens before each node, and the tree is grown by what it says."""

from __future__ import annotations

import numpy as np
import pytest

from rest_local.drafting.candidates import FEW_CANDIDATES, MOST_CANDIDATES, SourceRows
from rest_local.drafting.drafter import Calibrated, Growth, Merged, PrecedingBigram, draft
from rest_local.drafting.sources import Sources
from rest_local.drafting.tree import ROOT
from rest_local.retrieval.rows import Rows


def source(texts: list[list[int]], newest: PrecedingBigram) -> SourceRows:
    tokens = np.array(texts, np.int32)
    return SourceRows(1, Rows(tokens, np.full(len(texts), 5, np.int32), np.arange(len(texts))), newest=newest)


class Fixed:
    """Says what it was told of each token; notes what it was asked."""

    def __init__(self, said: dict[int, float]) -> None:
        self.said = said
        self.asked: dict[PrecedingBigram, list[int]] = {}

    def __call__(self, behind: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        self.asked[behind] = list(candidates)
        return [(token, self.said[token], (0,)) for token in candidates]


def test_a_tree_grows_by_corrected_probabilities_behind_the_tokens_of_its_path() -> None:
    calibrate = Fixed({1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7})
    rows = source([[1, 2, 3], [2, 4, 1]], (11, 12))
    grown = draft([rows], lambda _: 0.5, lambda p: p > 0.3, 9, 9, calibrate=calibrate)
    assert grown.tree.token == [2, 4]
    assert grown.tree.probability == pytest.approx([0.9, 0.9 * 0.7])
    assert calibrate.asked == {(11, 12): [1, 2], (12, 2): [4], (2, 4): [1]}


def test_judgements_go_as_far_as_the_model_went_along() -> None:
    rows = source([[1, 2, 3], [2, 4, 1]], (11, 12))
    grown = draft([rows], lambda _: 0.5, lambda p: p > 0.3, 9, 9, calibrate=Fixed({1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7}))
    assert grown.calibrations([2, 7]) == [([(1, 0.2, (0,)), (2, 0.9, (0,))], 2), ([(4, 0.7, (0,))], 7)]
    assert grown.calibrations([1]) == [([(1, 0.2, (0,)), (2, 0.9, (0,))], 1)]


@pytest.mark.parametrize(("text", "newest"), [([5, 6, 5], (6, 5)), ([5, 5], (5, 5))])
def test_sources_say_what_their_rows_stand_behind(text: list[int], newest: PrecedingBigram) -> None:
    sources = Sources([], 10)
    sources.restart(text)
    assert [rows.newest for rows in sources.rows()] == [newest]


def test_without_words_few_candidates_are_looked_at() -> None:
    """More of them only pay where something tells them apart."""
    rows = SourceRows(1, Rows(np.arange(30, dtype=np.int32)[:, None], np.full(30, 5, np.int32), np.arange(30)))

    def nothing(behind: PrecedingBigram, merged: Merged) -> list[Calibrated]:
        return []

    for calibrate, expected in ((None, FEW_CANDIDATES), (nothing, MOST_CANDIDATES)):
        growth = Growth([rows], lambda cell: 0.1, 8, 8, calibrate=calibrate)
        assert len(growth.draft.proposals[ROOT].merged) == expected
