"""The published policies match hand-computed cases and never exceed the limits of a step."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sequences import Silent

from rest_local.calibration.cost import CostCurve
from rest_local.drafting.models.drafter import BRANCHES, TOP_K, Drafter, DraftText, Likely, Query
from rest_local.drafting.sources import MODEL, SOURCE_NUMBER, SOURCES, SourceRows
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning import policies
from rest_local.planning.policies import (
    EAGLE2_DEPTH,
    POLICIES,
    RESPEC_ALPHA,
    RESPEC_LAMBDA,
    RESPEC_LONGEST,
    REST_PLACES,
    TREE_NODES,
    ReSpec,
    Rest,
    Sam,
    certain,
    eagle2_tree,
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


# ---- Hybrids -------------------------------------------------------------------------------------------------------


UNSURE = StepContext(100, 63, 64, (4.0, 4.0, 4.0))
MODEL_TREE = {(91,), (92, 93)}
TABLE = {(): [(91, 0.6), (92, 0.3)], (92,): [(93, 0.9)]}


Table = Mapping[tuple[int, ...], Sequence[Likely]]


class ByTable(DraftText, Drafter):
    """A drafter and its one text. `passes_asked`: the paths of each pass. `ready`: whether its text is caught up.

    A pass is said to take `pass_ms`. `error`: what a pass raises.
    """

    name = path = "scripted"

    def __init__(self, table: Table, pass_ms: float = 0.0, ready: bool = True, room: bool = True) -> None:
        self.table, self.pass_ms_each, self.ready, self.room = table, pass_ms, ready, room
        self.passes_asked: list[list[tuple[int, ...]]] = []
        super().__init__(self)
        self.error: Exception | None = None

    @property
    def can_ask(self) -> bool:
        return self.room and not self.failed

    def caught_up(self, saves_ms: float) -> bool:
        return self.ready

    def passes(self, path: Sequence[int]) -> int:
        return 1

    def pass_ms(self, n: int) -> float:
        return self.pass_ms_each

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        assert all(text is self for text, _ in queries)
        if self.error is not None:
            raise self.error
        self.passes_asked.append([path for _, path in queries])
        self.step_ms += self.pass_ms_each
        self.query_ms += self.pass_ms_each
        return [self.table.get(path, ()) for _, path in queries]


class Hybrid(Fixed):
    """Sources with text and a drafting model."""

    def __init__(self, found: Found, drafter: ByTable) -> None:
        super().__init__(found)
        self.draft_text: ByTable | None = drafter  # type: ignore[assignment]


def hybrid(policy: Policy, found: Found, at: StepContext = ROOMY) -> set[tuple[int, ...]]:
    return branches(policy.draft(Hybrid(found, ByTable(TABLE)), at).tree)


@pytest.mark.parametrize("match", [1, 4])
def test_sam_lets_the_model_draft_after_a_short_match(match: int) -> None:
    assert hybrid(Sam(), {"context": [(match, [1] * 60)]}) == MODEL_TREE
    assert hybrid(Sam(), {"datastore": [(5 + match, [7] * 60)]}) == MODEL_TREE
    assert hybrid(Sam(), {}) == MODEL_TREE


def test_sam_drafts_40_tokens_from_text_after_5() -> None:
    for found, token in (
        ({"context": [(5, [1] * 60)]}, 1),
        ({"history": [(10, [7] * 60), (10, [8] * 60)]}, 7),
        ({"context": [(5, [1] * 60)], "datastore": [(10, [7] * 60)]}, 1),
        ({"context": [(5, [1] * 60)], "datastore": [(11, [7] * 60)]}, 7),
        ({"datastore": [(4, [6] * 60)], "history": [(12, [7] * 60)]}, 7),
    ):
        drafter = ByTable(TABLE)
        tree = Sam().draft(Hybrid(found, drafter), ROOMY).tree  # type: ignore[arg-type]
        assert branches(tree) == {(token,) * 40}
        assert not drafter.passes_asked
    assert branches(Sam().draft(Hybrid({"context": [(5, [1, 2, 3])]}, ByTable(TABLE)), ROOMY).tree) == {(1, 2, 3)}
    assert len(Sam().draft(Hybrid({"context": [(5, [1] * 60)]}, ByTable(TABLE)), StepContext(100, 7, 8)).tree) == 7


TEXTS: tuple[Found, ...] = (
    {},
    {"context": [(3, [1] * 60)]},
    {"context": [(9, [1] * 60)]},
    {"datastore": [(8, [7, 1]), (8, [7, 2]), (6, [5])], "context": [(1, [1] * 60)]},
)


@pytest.mark.parametrize("found", TEXTS)
@pytest.mark.parametrize("at", [ROOMY, UNSURE])
@pytest.mark.parametrize("policy", [Sam, ReSpec])
def test_a_model_that_gives_nothing_leaves_the_drafts_of_text(
    policy: type[Policy], at: StepContext, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    alone = policy().draft(Fixed(found), at)
    failing = ByTable(TABLE)
    failing.error = FloatingPointError("values that are not numbers")
    failed = ByTable(TABLE)
    failed.failed = True
    with caplog.at_level(logging.WARNING, "rest_local.drafting"):
        for drafter in (failing, failed, ByTable(TABLE, room=False)):
            for _ in range(2):  # the failure itself, and after it
                draft = policy().draft(Hybrid(found, drafter), at)
                if drafter.failed or not drafter.room:
                    assert (draft.tree, draft.skipped) == (alone.tree, alone.skipped)
    assert len(caplog.records) <= 1


def test_respec_lets_the_model_draft_if_the_target_is_uncertain() -> None:
    found: Found = {"context": [(5, [1, 2, 3])]}
    sources = Hybrid(found, ByTable(TABLE))
    draft = ReSpec().draft(sources, UNSURE)
    assert branches(draft.tree) == MODEL_TREE
    assert (draft.lookup_us, draft.skipped, sources.lookups) == (None, True, [])
    assert hybrid(ReSpec(trigger=False), found, UNSURE) == {(1, 2, 3)}


def test_respec_drafts_from_text_if_it_is_certain() -> None:
    drafter = ByTable(TABLE)
    assert branches(ReSpec().draft(Hybrid({"context": [(5, [1, 2, 3])]}, drafter), ROOMY).tree) == {(1, 2, 3)}
    assert not drafter.passes_asked
    assert hybrid(ReSpec(), {}) == MODEL_TREE


def test_respec_lets_the_model_draft_for_a_place_that_failed_and_goes_on_scoring_it() -> None:
    policy, sources = ReSpec(), Hybrid({"context": [(5, [1] * 16)]}, ByTable(TABLE))
    done = StepCost(100, 1, 0, 1.0, 0.0)
    seen = []
    for generated in ([9], [91, 9], [1], [1, 1]):  # 0.5, then 0.35, 0.245, 0.4715 and over the threshold
        draft = policy.draft(sources, ROOMY)
        seen.append(branches(draft.tree) == MODEL_TREE)
        policy.learn(draft, generated, done)
    assert seen == [False, True, True, True]
    assert branches(policy.draft(sources, ROOMY).tree) == {(1,) * 5}


# ---- EAGLE-2 -------------------------------------------------------------------------------------------------------


class OnlyModel(Silent):
    """Sources without text, with a drafting model."""

    def __init__(self, drafter: ByTable | None) -> None:
        self.draft_text = drafter


def level_tree(table: Table, at: StepContext = ROOMY) -> tuple[DraftTree, ByTable]:
    drafter = ByTable(table)
    return eagle2_tree(OnlyModel(drafter), at), drafter


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path(node)) for node in range(len(tree))]


def full(confidence: tuple[float, ...] = (0.5, 0.3, 0.1)) -> Table:
    """Give the same answer everywhere: tokens 0, 1, 2."""

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
    tree, drafter = level_tree(table)
    assert drafter.passes_asked == [[()], [(1,), (2,), (3,)], [(2, 7), (1, 4), (1, 5), (1, 6)]]
    assert BRANCHES == 4
    expected = [(1,), (2,), (2, 7), (1, 4), (1, 5), (3,), (1, 6), (3, 8)]
    assert paths(tree) == expected
    assert tree.probability == pytest.approx([0.5, 0.3, 0.27, 0.2, 0.175, 0.1, 0.1, 0.09])
    assert set(tree.source) == {MODEL}


def test_six_levels_and_sixty_nodes() -> None:
    tree, drafter = level_tree(full())
    assert (EAGLE2_DEPTH, TREE_NODES) == (6, 60)
    assert len(drafter.passes_asked) == 6
    assert max(tree.depth) <= 6
    assert len(tree) == 3 + 9 + 4 * 3 * 4 == 60
    deep = level_tree(full((0.9, 0.05)), StepContext(100, 100, 64))[0]
    assert len(deep) == 2 + 4 + 4 * 8
    assert max(deep.depth) == 6


def test_where_only_chains_can_be_verified_one_path_is_asked() -> None:
    table = {(): [(1, 0.5), (2, 0.4)], (1,): [(3, 0.3), (4, 0.2)], (2,): [(5, 0.9)], (1, 3): [(6, 0.5)]}
    tree, drafter = level_tree(table, StepContext(100, 63, 1))
    assert paths(tree) == [(1,), (1, 3), (1, 3, 6)]
    assert drafter.passes_asked == [[()], [(1,)], [(1, 3)], [(1, 3, 6)]]


CONFIDENCE = st.lists(st.floats(0.01, 1.0), max_size=TOP_K).map(
    lambda many: [each / max(1, sum(many)) for each in many]
)


@given(st.lists(CONFIDENCE, min_size=15, max_size=15), st.integers(1, 63), st.integers(1, 8), st.integers(0, 9))
def test_it_keeps_what_the_limits_allow(answers: list[list[float]], limit: int, leaves: int, shuffle: int) -> None:
    """If there is room for all branches, it has the likeliest of all nodes that were asked about."""

    class Varied(dict[tuple[int, ...], list[tuple[int, float]]]):
        def get(self, path: object, default: object = None) -> list[tuple[int, float]]:  # type: ignore[override]
            assert isinstance(path, tuple)
            at = sum((token + 2) * 7**place for place, token in enumerate(path)) + shuffle
            return sorted(enumerate(answers[at % len(answers)]), key=lambda each: -each[1])

    tree, drafter = level_tree(Varied(), StepContext(100, limit, leaves))
    assert len(tree) <= min(limit, TREE_NODES)
    assert tree.n_leaves <= leaves
    assert all(len(asked) <= min(leaves, BRANCHES) for asked in drafter.passes_asked)
    if leaves < 8:
        return
    roomy, again = level_tree(Varied(), StepContext(100, limit, 64))
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
