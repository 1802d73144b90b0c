"""A tree grows alike with and without a draft model that says nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import SourceRows
from rest_local.drafting.drafter import Calibrate, Calibrated, Draft, Growth, Merged, PrecedingBigram, draft
from rest_local.retrieval.rows import Rows

TOKENS = 6
DEPTH = 5
Texts = st.lists(st.lists(st.integers(-1, TOKENS - 1), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=7)


def _rows(number: int, texts: list[list[int]], matches: list[int]) -> SourceRows:
    match = np.array(sorted(matches, reverse=True)[: len(texts)], np.int32)
    return SourceRows(number, Rows(np.array(texts, np.int32), match, np.arange(len(texts)), limit=TOKENS))


def _estimate(cell: int) -> float:
    return 0.05 + 0.9 * (cell * 37 % 101) / 101


def _calibrate(behind: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
    """By the words alone, so that every node has its own answer."""
    return [(token, 0.05 + 0.9 * ((7 * token + 3 * behind[0] + behind[1]) % 11) / 11, (token,)) for token in candidates]


def _slow(sources: list[SourceRows], least: float, most: int, leaves: int, calibrate: Calibrate | None) -> Draft:
    """Node by node, and with a draft model that says nothing."""
    growth = Growth(sources, _estimate, most, leaves, lambda path, joint, known: (), calibrate)
    while growth.best >= least:
        growth.grow()
    return growth.draft


def _told(drafted: Draft) -> list[object]:
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
    assert _told(quick) == _told(_slow(sources, least, most, leaves, calibrate))
    paths = [quick.tree.path(node) for node in range(len(quick.tree))]
    for path in paths[-3:]:
        slow = _slow(sources, least, most, leaves, calibrate)
        assert quick.outcomes([*path, 0]) == slow.outcomes([*path, 0])
        assert [(list(j), t) for j, t in quick.calibrations(path)] == [(list(j), t) for j, t in slow.calibrations(path)]


def test_a_calibrator_that_corrects_nothing_changes_nothing() -> None:
    rows = _rows(1, [[1, 2, 3, 4, 5]], [9] * 7)
    drafts = [
        draft([rows], _estimate, lambda p: p > 0.03, 9, 8, calibrate=calibrate) for calibrate in (None, lambda b, m: [])
    ]
    assert drafts[0].tree.token == drafts[1].tree.token != []
    assert drafts[0].tree.probability == drafts[1].tree.probability
