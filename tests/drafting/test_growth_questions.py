"""A growing tree asks a drafting model about its nodes, and takes the answers at any time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import MODEL, Merged, PrecedingBigram, SourceRows, model_cell, model_rates
from rest_local.drafting.growth import MIN_PROBABILITY, SIBLINGS, Calibrated, Growth, OpenNode
from rest_local.drafting.tree import ROOT
from rest_local.retrieval.rows import Rows

CONTEXT = 1
RETRIEVED = 0.5  # estimate of every retrieved candidate
FIRST_OF_MODEL = model_cell(0, 0.0) // len(model_rates()) * len(model_rates())
Answer = Sequence[tuple[int, float]]


def estimate(cell: int) -> float:
    """A model's candidate is as likely as its cell says, any other has RETRIEVED."""
    place = cell - FIRST_OF_MODEL
    return model_rates()[place] if 0 <= place < len(model_rates()) else RETRIEVED


def rows(*texts: list[int]) -> list[SourceRows]:
    tokens = np.array(texts, np.int32)
    return [SourceRows(CONTEXT, Rows(tokens, np.full(len(texts), 5, np.int32), np.arange(len(texts))))]


def growth(
    sources: list[SourceRows], most: int = 20, leaves: int = 8, promise: float = 0.6, calibrate: object = None
) -> Growth:
    return Growth(sources, estimate, most, leaves, calibrate, promise=lambda depth: promise)  # type: ignore[arg-type]


def reply(grown: Growth, path: Sequence[int], answer: Answer) -> None:
    (question,) = (each for each in grown.open_nodes() if each.path == tuple(path))
    grown.answered(question.number, answer)


def test_the_root_is_asked_first_and_its_answer_gives_candidates() -> None:
    grown = growth([])
    assert (grown.best, grown.promised) == (0.0, 0.6)
    assert grown.open_nodes() == [OpenNode(0, (), 1.0, 0.0)]
    grown.answered(0, [(7, 0.8), (8, 0.1)])
    assert grown.best == pytest.approx(0.8, abs=0.03)
    assert grown.promised == 0.0
    grown.grow()
    assert grown.draft.tree.token == [7]
    assert grown.draft.tree.source == [MODEL]
    assert grown.promised == pytest.approx(0.6 * grown.draft.tree.probability[0])


def test_known_candidates_that_are_likelier_than_promised_come_first() -> None:
    grown = growth(rows([1, 2, 3]), promise=0.3)
    assert grown.best == RETRIEVED > grown.promised
    assert growth(rows([1, 2, 3]), promise=0.6).promised > RETRIEVED


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
    assert len(grown.open_nodes()) == 1 + SIBLINGS


def test_a_token_that_both_propose_is_one_node_that_both_continue() -> None:
    grown = growth(rows([1, 2, 3]))
    grown.answered(0, [(1, 0.8)])
    assert len(grown.draft.proposals[ROOT].merged) == 1
    probability, source, members = grown.draft.proposals[ROOT].merged[1]
    assert (probability, source) == (pytest.approx(0.8, abs=0.03), MODEL)
    assert {each.source for each, _ in members} == {CONTEXT, MODEL}
    grown.grow()
    reply(grown, [1], [(2, 0.7), (6, 0.2)])
    (below,) = grown.draft.tree.root_children
    assert {each.source for each, _ in grown.draft.proposals[below].merged[2][2]} == {CONTEXT, MODEL}
    assert {each.source for each, _ in grown.draft.proposals[below].merged[6][2]} == {MODEL}


@pytest.mark.parametrize("calibrate", [None, lambda bigram, merged: []])
def test_of_two_tokens_that_contradict_each_other_one_is_right_at_most(calibrate: object) -> None:
    alone = growth([])
    alone.answered(0, [(7, 0.9)])
    grown = growth(rows([1, 2, 3]), promise=0.9, calibrate=calibrate)
    grown.answered(0, [(7, 0.9)])
    merged, sure = grown.draft.proposals[ROOT].merged, alone.best
    neither = 1 - sure * RETRIEVED  # of the four cases all but the one in which both are right
    assert merged[7][0] == pytest.approx(sure * (1 - RETRIEVED) / neither)
    assert merged[1][0] == pytest.approx(RETRIEVED * (1 - sure) / neither)
    grown = growth(rows([7, 2, 3]), promise=0.9, calibrate=calibrate)
    grown.answered(0, [(7, 0.9)])
    assert grown.best == sure  # they agree


def test_decline_ends_the_questions_but_not_those_of_later_nodes() -> None:
    grown = growth(rows([1, 2, 3]))
    grown.decline()
    assert grown.promised == 0.0
    assert all(question.path for question in grown.open_nodes())  # siblings only
    grown.grow()
    assert grown.promised == pytest.approx(RETRIEVED * 0.6)


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
    """By (parent, token): the joint probability of each candidate that can be added."""
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
