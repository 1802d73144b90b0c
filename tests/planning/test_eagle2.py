"""The tree of a drafting model expands the likeliest nodes of each level and keeps the likeliest of all."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sequences import Silent
from support.scripted_drafter import ByTable, Table

from rest_local.drafting.candidates import MODEL
from rest_local.drafting.models.drafter import BRANCHES, TOP_K
from rest_local.drafting.tree import DraftTree
from rest_local.planning.policies import EAGLE2_DEPTH, TREE_NODES, eagle2_tree
from rest_local.planning.policy import StepContext

ROOMY = StepContext(100, 63, 64)


class OnlyModel(Silent):
    """Sources without text, with a drafting model."""

    def __init__(self, drafter: ByTable | None) -> None:
        self.draft_text = drafter


def drafted(table: Table, at: StepContext = ROOMY) -> tuple[DraftTree, ByTable]:
    drafter = ByTable(table)
    return eagle2_tree(OnlyModel(drafter), at), drafter


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path(node)) for node in range(len(tree))]


def full(confidence: tuple[float, ...] = (0.5, 0.3, 0.1)) -> Table:
    """The same answer everywhere: tokens 0, 1, 2."""

    class Everywhere(dict[tuple[int, ...], list[tuple[int, float]]]):
        def get(self, path: object, default: object = None) -> list[tuple[int, float]]:  # type: ignore[override]
            return list(enumerate(confidence))

    return Everywhere()


def test_a_level_is_asked_in_one_pass_by_joint_confidence() -> None:
    table = {
        (): [(1, 0.5), (2, 0.3), (3, 0.1)],
        (1,): [(4, 0.4), (5, 0.35), (6, 0.2)],  # joint 0.2, 0.175, 0.1
        (2,): [(7, 0.9)],  # joint 0.27
        (3,): [(8, 0.9)],  # joint 0.09, below four others
    }
    tree, drafter = drafted(table)
    assert drafter.passes_asked == [[()], [(1,), (2,), (3,)], [(2, 7), (1, 4), (1, 5), (1, 6)]]
    assert BRANCHES == 4
    expected = [(1,), (2,), (2, 7), (1, 4), (1, 5), (3,), (1, 6), (3, 8)]
    assert paths(tree) == expected
    assert tree.probability == pytest.approx([0.5, 0.3, 0.27, 0.2, 0.175, 0.1, 0.1, 0.09])
    assert set(tree.source) == {MODEL}


def test_six_levels_and_sixty_nodes() -> None:
    tree, drafter = drafted(full())
    assert (EAGLE2_DEPTH, TREE_NODES) == (6, 60)
    assert len(drafter.passes_asked) == 6
    assert max(tree.depth) <= 6
    assert len(tree) == 3 + 9 + 4 * 3 * 4 == 60
    deep = drafted(full((0.9, 0.05)), StepContext(100, 100, 64))[0]
    assert len(deep) == 2 + 4 + 4 * 8
    assert max(deep.depth) == 6


def test_where_only_chains_can_be_verified_one_path_is_asked() -> None:
    table = {(): [(1, 0.5), (2, 0.4)], (1,): [(3, 0.3), (4, 0.2)], (2,): [(5, 0.9)], (1, 3): [(6, 0.5)]}
    tree, drafter = drafted(table, StepContext(100, 63, 1))
    assert paths(tree) == [(1,), (1, 3), (1, 3, 6)]
    assert drafter.passes_asked == [[()], [(1,)], [(1, 3)], [(1, 3, 6)]]


CONFIDENCE = st.lists(st.floats(0.01, 1.0), max_size=TOP_K).map(
    lambda many: [each / max(1, sum(many)) for each in many]
)


@given(st.lists(CONFIDENCE, min_size=40, max_size=40), st.integers(1, 63), st.integers(1, 8), st.integers(0, 9))
def test_it_keeps_what_the_limits_allow(answers: list[list[float]], limit: int, leaves: int, shuffle: int) -> None:
    """With room for all branches, it has the likeliest of all nodes that were asked about."""

    class Varied(dict[tuple[int, ...], list[tuple[int, float]]]):
        def get(self, path: object, default: object = None) -> list[tuple[int, float]]:  # type: ignore[override]
            assert isinstance(path, tuple)
            at = sum((token + 2) * 7**place for place, token in enumerate(path)) + shuffle
            return sorted(enumerate(answers[at % len(answers)]), key=lambda each: -each[1])

    tree, drafter = drafted(Varied(), StepContext(100, limit, leaves))
    assert len(tree) <= min(limit, TREE_NODES)
    assert tree.n_leaves <= leaves
    assert all(len(asked) <= min(leaves, BRANCHES) for asked in drafter.passes_asked)
    if leaves < 8:
        return
    roomy, again = drafted(Varied(), StepContext(100, limit, 64))
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for asked in again.passes_asked:
        for path in asked:
            for token, confidence in Varied().get(path):
                joint[(*path, token)] = joint[path] * confidence
    del joint[()]
    likeliest = sorted(joint.values(), reverse=True)[: min(limit, TREE_NODES)]
    assert sorted(roomy.probability, reverse=True) == pytest.approx(likeliest)


def test_a_failure_costs_drafts_only_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    drafter = ByTable(full())
    drafter.error = RuntimeError("broken")
    with caplog.at_level(logging.WARNING, "rest_local.drafting"):
        for _ in range(3):
            assert len(eagle2_tree(OnlyModel(drafter), ROOMY)) == 0
    assert drafter.failed
    assert len(caplog.records) == 1


def test_it_waits_until_the_text_is_caught_up_with() -> None:
    drafter = ByTable(full(), ready=False)
    assert len(eagle2_tree(OnlyModel(drafter), ROOMY)) == 0
    assert not drafter.passes_asked
    drafter.ready = True
    assert len(eagle2_tree(OnlyModel(drafter), ROOMY)) == 60
    assert len(eagle2_tree(OnlyModel(ByTable(full(), room=False)), ROOMY)) == 0
