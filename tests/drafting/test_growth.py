"""A draft tree grows best first, by calibrated probabilities, and shares the budget of a pass with other trees."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sources import grown

from rest_local.drafting.models.drafter import BRANCHES
from rest_local.drafting.prediction import MIN_PROBABILITY
from rest_local.drafting.sources import ForcedRows, Merged, PrecedingBigram, SourceRows, model_cell
from rest_local.drafting.tree import ROOT, Calibrate, Calibrated, Draft, Growth
from rest_local.planning.acceptance import model_rates
from rest_local.planning.plan import grow
from rest_local.retrieval.rows import Rows

TOKENS = 6
DEPTH = 5
Texts = st.lists(st.lists(st.integers(-1, TOKENS - 1), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=7)


class Forced:
    """A grammar that allows token 5 only."""

    def __len__(self) -> int:
        return 1

    def at(self, place: int) -> list[tuple[int, int, bool, int]]:
        return [(5, 0, False, 1)] if not place else []


def _rows(number: int, texts: list[list[int]], matches: list[int]) -> SourceRows:
    match = np.array(sorted(matches, reverse=True)[: len(texts)], np.int32)
    return SourceRows(number, Rows(np.array(texts, np.int32), match, np.arange(len(texts)), limit=TOKENS))


def _estimate(cell: int) -> float:
    return 0.05 + 0.9 * (cell * 37 % 101) / 101


def _calibrate(before: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
    """Calibrate by the tokens only, so that every node gets another result."""
    return [(token, 0.05 + 0.9 * ((7 * token + 3 * before[0] + before[1]) % 11) / 11, (token,)) for token in candidates]


def _slow(sources: list[SourceRows], least: float, most: int, leaves: int, calibrate: Calibrate | None) -> Draft:
    """Grow the same tree node by node, with a draft model that proposes nothing."""
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
    quick = grown(sources, _estimate, lambda probability: probability >= least, most, leaves, calibrate=calibrate)
    assert _content(quick) == _content(_slow(sources, least, most, leaves, calibrate))
    paths = [quick.tree.path(node) for node in range(len(quick.tree))]
    for path in paths[-3:]:
        slow = _slow(sources, least, most, leaves, calibrate)
        assert quick.outcomes([*path, 0]) == slow.outcomes([*path, 0])
        assert [(list(j), t) for j, t in quick.calibrations(path)] == [(list(j), t) for j, t in slow.calibrations(path)]
        assert [token for _, token in quick.calibrations(path)] == path


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


# ---- Questions to a draft model ------------------------------------------------------------------------------------


CONTEXT = 1
RETRIEVED = 0.5  # estimate of every retrieved candidate
FIRST_OF_MODEL = model_cell(0, 0.0) // len(model_rates()) * len(model_rates())


def estimate(cell: int) -> float:
    """Estimate a model's candidate as its cell says, and any other with RETRIEVED."""
    place = cell - FIRST_OF_MODEL
    return model_rates()[place] if 0 <= place < len(model_rates()) else RETRIEVED


def rows(*texts: list[int]) -> list[SourceRows]:
    tokens = np.array(texts, np.int32)
    return [SourceRows(CONTEXT, Rows(tokens, np.full(len(texts), 5, np.int32), np.arange(len(texts))))]


def growth(
    sources: list[SourceRows], most: int = 20, leaves: int = 8, promise: float = 0.6, calibrate: object = None
) -> Growth:
    return Growth(sources, estimate, most, leaves, calibrate, promise=lambda depth: promise * 0.9**depth)  # type: ignore[arg-type]


def test_likely_siblings_are_asked_about_before_they_are_in_the_tree() -> None:
    grown = growth([])
    grown.answered(0, [(7, 0.6), (8, 0.3)])
    grown.grow()
    asked = grown.open_nodes()
    assert [question.path for question in asked] == [(7,), (8,)]
    assert asked[0].joint > asked[1].joint
    for question in asked:
        grown.answered(question.number, [(9, 0.9)])
    assert [question.path for question in grown.open_nodes()] == [(7, 9)]  # (8,) was answered
    while grown.best:
        grown.grow()
    tree = grown.draft.tree
    assert [tree.path(node) for node in range(len(tree))] == [[7], [7, 9], [8], [8, 9]]


def test_no_more_siblings_than_the_limit() -> None:
    grown = growth(rows(*([token, 20, 20] for token in range(1, 9))), leaves=9)
    assert len(grown.open_nodes()) == 1 + BRANCHES


@pytest.mark.parametrize("calibrate", [None, lambda bigram, merged: []])
def test_text_that_the_model_contradicts_gets_what_the_model_leaves(calibrate: object) -> None:
    alone = growth([])
    alone.answered(0, [(7, 0.9)])
    grown = growth(rows([1, 2, 3]), promise=0.9, calibrate=calibrate)
    grown.answered(0, [(7, 0.9)])
    merged, sure = grown.draft.proposals[ROOT].merged, alone.best
    assert merged[7][0] == sure
    assert merged[1][0] == pytest.approx(RETRIEVED * (1 - sure))
    grown = growth(rows([7, 2, 3]), promise=0.9, calibrate=calibrate)
    grown.answered(0, [(7, 0.9)])
    assert grown.best == sure  # they agree


def test_what_a_grammar_forces_stands_against_the_model() -> None:
    forced = ForcedRows(Forced())
    grown = Growth([forced], lambda cell: 0.9, 10, 4, promise=lambda depth: 0.6)
    grown.answered(0, [(7, 0.8)])
    merged = grown.draft.proposals[ROOT].merged
    assert merged[5][0] == 0.9
    assert merged[7][0] == pytest.approx(0.9 * 0.1)


def test_the_first_answer_of_a_block_answers_all_questions_and_found_text_goes_on_after_it() -> None:
    block = {(): [(1, 0.9)], (1,): [(2, 0.9)], (1, 2): [(3, 0.9), (8, 0.05)]}
    grown = growth(rows([1, 2, 3, 4, 5]), promise=0.9)
    while grown.best:  # The block is asked after the text is in the tree.
        grown.grow()
    assert [question.path for question in grown.open_nodes()][:3] == [(), (1,), (1, 2)]
    grown.answered(0, [(1, 0.9)], lambda path: block.get(path, ()))
    assert not grown.promised
    assert grown.draft.proposals[1].merged.keys() == {3, 8}
    grown = growth(rows([1, 2, 3, 4, 5]), promise=0.9)
    grown.answered(0, [(1, 0.9)], lambda path: block.get(path, ()))
    while grown.best:
        grown.grow()
        assert not grown.promised
    tree = grown.draft.tree
    assert [1, 2, 3, 4, 5] in [tree.path(node) for node in range(len(tree))]


@pytest.mark.parametrize("least", [0.8, 0.9])
def test_where_a_block_ends_text_is_searched_if_that_is_likely(least: float) -> None:
    block = {(): [(1, 0.95), (4, 0.03)], (1,): [(2, 0.95)]}
    ends: list[list[int]] = []

    def below(path: list[int]) -> list[SourceRows]:
        ends.append(path)
        return [SourceRows(CONTEXT, Rows(np.array([[7, 8]]), np.array([2]), np.array([0])), begin=len(path))]

    grown = Growth([], estimate, 20, 8, promise=lambda depth: 0.9, below=below, least=least)
    grown.answered(0, block[()], lambda path: block.get(path, ()))
    while grown.best:
        grown.grow()
    tree = grown.draft.tree
    assert grown.draft.looked_below == len(ends)
    assert ends == [[1, 2]] * (least < 0.9)
    assert [tree.path(node) for node in range(len(tree)) if tree.depth[node] > 2] == [[1, 2, 7], [1, 2, 7, 8]] * len(
        ends
    )


def test_decline_ends_the_questions_but_not_those_of_later_nodes() -> None:
    grown = growth(rows([1, 2, 3]))
    assert grown.promised == 0.6
    grown.decline()
    assert grown.promised == 0.0
    assert all(question.path for question in grown.open_nodes())  # siblings only
    grown.grow()
    assert grown.promised == pytest.approx(RETRIEVED * 0.6 * 0.9)


def test_outcomes_calibrations_and_confidences_include_the_answers() -> None:
    def calibrate(before: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        return [(token, 0.5 * probability, (token,)) for token, (probability, _, _) in candidates.items()]

    grown = growth(rows([1, 2, 3]), calibrate=calibrate)
    grown.answered(0, [(4, 0.8), (1, 0.1)])
    grown.grow()
    assert grown.draft.tree.token == [4]
    drafted = grown.draft
    cells = [cell for cell, _ in drafted.outcomes([4])]
    assert sorted(estimate(cell) for cell in cells) == pytest.approx([0.1, RETRIEVED, 0.8], abs=0.03)
    assert [right for _, right in drafted.outcomes([4])] == [False, True, False]
    ((calibrated, token),) = drafted.calibrations([4])
    assert token == 4
    assert {each[0] for each in calibrated} == {1, 4}
    ((depth, confidence),) = drafted.confidences([4])
    assert (depth, confidence) == (0, pytest.approx(0.4, abs=0.02))  # calibrated


ANSWERS = st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 1.0)), max_size=3, unique_by=lambda each: each[0])


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), max_size=5),
    st.integers(1, 15),
    st.integers(1, 6),
    st.floats(0.01, 0.99),
    st.data(),
)
def test_with_any_answers_every_node_is_the_best_of_its_time(
    texts: list[list[int]], most: int, leaves: int, promise: float, data: st.DataObject
) -> None:
    grown = growth(rows(*texts) if texts else [], most, leaves, promise)
    tree = grown.draft.tree
    for _ in range(60):
        asked = grown.open_nodes()
        inside = [(), *(tuple(tree.path(node)) for node in range(len(tree)))]
        joints = [question.joint for question in asked if question.path in inside]
        assert joints == sorted(joints, reverse=True)
        if asked and data.draw(st.booleans()):
            for question in data.draw(st.permutations(asked)):
                if data.draw(st.booleans()):
                    grown.answered(question.number, data.draw(ANSWERS))
        elif data.draw(st.integers(0, 9)) == 0:
            grown.decline()
        elif grown.best:
            best, available = grown.best, _available(grown)
            assert best == max(available.values())
            grown.grow()
            assert available[tree.parent[-1], tree.token[-1]] == tree.probability[-1] == best
        else:
            assert not _available(grown)
    assert len(tree) <= most
    assert tree.n_leaves <= leaves
    assert all(parent < node for node, parent in enumerate(tree.parent))
    assert len({(parent, token) for parent, token in zip(tree.parent, tree.token, strict=True)}) == len(tree)
    for question in grown.open_nodes():
        node: int | None = ROOT
        for token in question.path[:-1]:
            assert node is not None
            node = tree.child(node, token)
        assert node is not None  # all but the last token of a path are in the tree


def _available(grown: Growth) -> dict[tuple[int, int], float]:
    """Return the joint probability of each candidate that can be added, by (parent, token)."""
    tree = grown.draft.tree
    found: dict[tuple[int, int], float] = {}
    if len(tree) >= grown.most:
        return found
    for node, proposal in grown.draft.proposals.items():
        joint = 1.0 if node == ROOT else tree.probability[node]
        for token, (probability, _, _) in proposal.merged.items():
            if joint * probability >= MIN_PROBABILITY and tree.can_add(node) and tree.child(node, token) is None:
                found[node, token] = joint * probability
    return found
