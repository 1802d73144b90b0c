"""The published policies match hand-computed cases and never exceed the limits of a step."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.calibration.cost import CostCurve
from rest_local.drafting.sources import SOURCE_NUMBER, SOURCES, SourceRows
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning import policies
from rest_local.planning.policies import (
    POLICIES,
    RESPEC_ALPHA,
    RESPEC_LAMBDA,
    RESPEC_LONGEST,
    REST_PLACES,
    ReSpec,
    Rest,
    Sam,
    certain,
    make_policy,
)
from rest_local.planning.policy import Checkpoint, Policy, StepContext, StepCost
from rest_local.retrieval.rows import Rows

FLAT = CostCurve.from_points([0], [1, 64], [[1.0, 1.0]])
ROOMY = StepContext(100, 63, 64)
DONE = StepCost(100, 1, 0, 1.0, 0.0)

Found = dict[str, list[tuple[int, list[int]]]]  # (match, continuation) by source.


class Fixed:
    """Sources that always return the same rows, up to the requested number and depth, and record the lookups."""

    draft_text = None

    def __init__(self, found: Found) -> None:
        self._found = found
        self.lookups: list[tuple[int | None, int]] = []

    def restart(self, tokens: Sequence[int]) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None: ...

    def rows_after(self, *_: object, **__: object) -> list[SourceRows]:
        return []

    def repeats(self, n: int = 8) -> bool:
        return False

    def rows(self, limit: int | None = None, depth: int = 16, only: Container[str] = SOURCES) -> list[SourceRows]:
        self.lookups.append((limit, depth))
        result = []
        for source, found in self._found.items():
            if source in only and found:
                longest = sorted(enumerate(found), key=lambda numbered: -numbered[1][0])[:limit]
                table = np.full((len(longest), depth), -1, np.int32)
                for row, (_, (_, tokens)) in enumerate(longest):
                    table[row, : len(tokens)] = tokens[:depth]
                match = np.array([m for _, (m, _) in longest], np.int32)
                positions = np.array([number for number, _ in longest], np.int64)
                result.append(SourceRows(SOURCE_NUMBER[source], Rows(table, match, positions)))
        return result


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return every root-to-leaf path."""
    found = set()
    for leaf in range(len(tree)):
        if not tree.children_of(leaf):
            path, node = [], leaf
            while node != ROOT:
                path.append(tree.token[node])
                node = tree.parent[node]
            found.add(tuple(reversed(path)))
    return found


def drafted(policy: Policy, found: Found, at: StepContext = ROOMY) -> DraftTree:
    return policy.draft(Fixed(found), at).tree


ROW = st.tuples(st.integers(1, 32), st.lists(st.integers(0, 5), min_size=1, max_size=16))
FOUND = st.dictionaries(st.sampled_from(["datastore", "history", "context"]), st.lists(ROW, min_size=1, max_size=30))
AT = st.builds(
    StepContext, st.integers(1, 4000), st.integers(0, 63), st.integers(1, 8), st.lists(st.floats(0, 12)), st.just(0),
    forced=st.none(), n_again=st.integers(0, 63),
    checkpoint=st.builds(Checkpoint, st.integers(0, 63), st.floats(0, 10), st.floats(0, 1), st.floats(0, 64)),
)  # fmt: skip


@given(found=FOUND, at=AT, generated=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_no_policy_exceeds_its_limits(found: Found, at: StepContext, generated: list[int]) -> None:
    policies = [make_policy(name, FLAT) for name in POLICIES]
    for policy in policies:
        policy.begin(at.n_ctx)
    for policy in policies * 3:
        draft = policy.draft(Fixed(found), at)
        assert len(draft.tree) <= at.limit
        assert draft.tree.n_leaves <= at.leaves
        assert min(draft.tree.token, default=0) >= 0, "the end of a document is no token"
        policy.learn(draft, generated, StepCost(at.n_ctx, len(draft.tree), 0, 1.0, 0.0))


def test_rest_takes_the_most_frequent_of_the_longest_match() -> None:
    found: Found = {"datastore": [(5, [1, 2]), (5, [1, 3]), (5, [1, 2]), (5, [4]), (3, [9, 9])], "context": [(30, [8])]}
    tree = drafted(Rest(), found)
    assert tree.token[:2] == [1, 2]
    assert tree.probability[:2] == [0.75, 0.5]
    assert branches(tree) == {(1, 2), (1, 3), (4,)}
    assert branches(drafted(Rest(), found, StepContext(100, 63, 1))) == {(1, 2)}


def test_rest_reads_10_tokens_and_fetches_more_places_only_if_there_are_more() -> None:
    few, many = Fixed({"datastore": [(5, list(range(16)))]}), Fixed({"datastore": [(5, [n % 7]) for n in range(200)]})
    assert max(Rest().draft(few, ROOMY).tree.depth) == 10
    tree = Rest().draft(many, ROOMY).tree
    assert few.lookups == [(None, 10)]
    assert many.lookups == [(None, 10), (REST_PLACES, 10)]
    assert tree.probability[0] == 29 / 200


@pytest.mark.parametrize(("match", "nodes"), [(1, 5), (3, 13), (14, 57), (15, 60), (32, 60)])
def test_sam_drafts_more_nodes_after_longer_matches(match: int, nodes: int) -> None:
    assert len(drafted(Sam(), {"context": [(match, [1] * 60)]})) == nodes
    assert len(drafted(Sam(), {"history": [(match, [1] * 60)]})) == (min(60, 1 + 4 * (match - 5)) if match > 5 else 0)


def test_sam_drafts_8_nodes_per_depth_from_stored_text() -> None:
    tree = drafted(Sam(), {"datastore": [(20, [n, n]) for n in range(20)]}, StepContext(100, 63, 8))
    assert [tree.depth.count(depth) for depth in (1, 2)] == [8, 8]


def test_the_trigger_weighs_the_newest_against_the_mean() -> None:
    assert certain([])
    assert certain([1.5])
    assert not certain([1.51])
    # k = 1: 1.4 + lambda; k = 2: 3.2 + lambda / 2: the newest alone is the cheapest, and certain
    assert certain([5.0, 1.4])
    # k = 1: 1.6 + 0.5; k = 2: 1.45 + 0.25; k = 3: 1.4 + 0.1667: the mean of three
    assert RESPEC_LAMBDA == 0.5
    assert certain([1.3, 1.3, 1.6])
    # k = 1: 1.4 + 0.5 = 1.9; k = 2: 1.55 + 0.25 = 1.8: the mean of two is cheaper, and not certain
    assert not certain([1.7, 1.4])


def test_no_lookup_if_the_target_is_uncertain() -> None:
    found: Found = {"context": [(5, [1, 2, 3])]}
    unsure = StepContext(100, 63, 8, (4.0, 4.0, 4.0))
    sources = Fixed(found)
    assert ReSpec().draft(sources, unsure) == Draft(DraftTree(8), skipped=True)
    assert sources.lookups == []
    assert len(drafted(ReSpec(trigger=False), found, unsure)) == 3
    assert (ReSpec().watches_entropy, ReSpec(trigger=False).watches_entropy) == (True, False)


@pytest.mark.parametrize("source", ["context", "prediction"])
def test_a_place_whose_draft_fails_is_left_out_until_it_is_right_again(source: str) -> None:
    policy, found = ReSpec(), Fixed({source: [(5, [1] * 16)]})
    lengths = []
    # 0.5; no token right: 0.35; the one known token right: 0.545; all 4 right: 0.6815. Each times 8 tokens
    for generated in ([9], [1], [1, 1, 1, 1, 9]):
        draft = policy.draft(found, ROOMY)
        lengths.append(len(draft.tree))
        policy.learn(draft, generated, DONE)
    lengths.append(len(policy.draft(found, ROOMY).tree))
    assert (RESPEC_ALPHA, RESPEC_LONGEST) == (0.3, 8)
    assert lengths == [4, 0, 4, 5]
    policy.begin(1)
    assert len(policy.draft(found, ROOMY).tree) == 4, "a new request has another text"


def test_candidates_are_branches_and_scores_of_stored_text_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "RESPEC_PLACES", 3)
    found: Found = {"datastore": [(6, [1, 2]), (5, [1, 3]), (5, [4]), (4, [5])]}
    assert branches(drafted(ReSpec(), found)) == {(1, 2), (1, 3), (4,)}
    policy = ReSpec()
    draft = policy.draft(Fixed(found), ROOMY)
    policy.learn(draft, [4, 9], DONE)
    policy.begin(1)
    assert branches(policy.draft(Fixed(found), ROOMY).tree) == {(4,)}
