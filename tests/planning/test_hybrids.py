"""`sam` and `respec` with a drafting model: text where it is known, the model where it is not."""

from __future__ import annotations

import logging

import pytest
from support.scripted_drafter import ByTable
from test_papers import Fixed, Found, branches

from rest_local.planning.policies import ReSpec, Sam
from rest_local.planning.policy import Policy, StepContext, StepCost

ROOMY = StepContext(100, 63, 64)
UNSURE = StepContext(100, 63, 64, (4.0, 4.0, 4.0))
MODEL_TREE = {(91,), (92, 93)}
TABLE = {(): [(91, 0.6), (92, 0.3)], (92,): [(93, 0.9)]}


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


FOUND: tuple[Found, ...] = (
    {},
    {"context": [(3, [1] * 60)]},
    {"context": [(9, [1] * 60)]},
    {"datastore": [(8, [7, 1]), (8, [7, 2]), (6, [5])], "context": [(1, [1] * 60)]},
)


@pytest.mark.parametrize("found", FOUND)
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
