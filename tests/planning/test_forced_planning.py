"""`auto` drafts forced text in every step, also where it looks nothing up, and credits no lookup for it."""

from collections.abc import Callable

import pytest
from support.fake_sequences import Silent
from support.prices import FLAT

from rest_local.drafting.sources import GRAMMAR, ForcedRows, Lookup, SourceRows
from rest_local.grammar.constraint import CERTAIN
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext, StepCost


class Text:
    """Four tokens."""

    def __len__(self) -> int:
        return 4

    def at(self, place: int) -> list[tuple[int, int, bool, int]]:
        return [(10 + place, CERTAIN, False, place + 1)] if place < 4 else []


class Chosen(Auto):
    """Looks up where it is told to."""

    wanted = True

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        super().looks_up(at, repeats)
        return self.wanted


class Asked(Silent):
    """Counts lookups."""

    n = 0

    def rows(self, *_: object, **__: object) -> list[SourceRows]:
        self.n += 1
        return []


def step(at_least: int = 8, forced: bool = True, n_other: int = 0) -> StepContext:
    return StepContext(10, at_least, 8, n_other=n_other, forced=lambda path: [ForcedRows(Text())] if forced else [])


def policy(wanted: bool) -> Chosen:
    made = Chosen(FLAT)
    made.wanted = wanted
    made.begin(10)
    return made


@pytest.mark.parametrize("wanted", [True, False])
def test_forced_text_is_drafted_with_and_without_a_lookup(wanted: bool) -> None:
    sources: Lookup = Asked()
    drafted = policy(wanted).draft(sources, step())
    assert drafted.tree.token == [10, 11, 12, 13]
    assert {*drafted.tree.source} == {GRAMMAR}
    assert drafted.skipped == (not wanted)
    assert (drafted.lookup_us is not None) == wanted
    assert isinstance(sources, Asked)
    assert sources.n == wanted


def test_without_forced_text_nothing_changes() -> None:
    assert policy(False).draft(Asked(), step(forced=False)).skipped
    assert not len(policy(True).draft(Asked(), step(forced=False)).tree)
    assert not len(policy(True).draft(Asked(), step(0)).tree)


def test_with_other_requests_it_is_what_the_tree_can_grow_from() -> None:
    drafted = policy(False).draft(Asked(), step(n_other=2))
    assert drafted.growth is not None
    assert drafted.growth.best >= 0.9


def test_a_lookup_is_not_credited_for_forced_text() -> None:
    """What a lookup is expected to save falls, although each draft comes true."""
    made = policy(True)
    gains = made.trigger.gains
    expected = gains.savings[0]
    for _ in range(40):
        drafted = made.draft(Asked(), step())
        made.learn(drafted, [10, 11, 12, 13, 5], StepCost(10, 4, 4, 1.05, 0.1, 0.15))
        made.catch_up()
    assert gains.learned >= 30
    assert min(gains.savings) < 0.2 * expected


def test_estimates_fall_with_text_that_does_not_come() -> None:
    made = policy(False)
    drafted = made.draft(Asked(), step())
    before = drafted.tree.probability[0]
    for _ in range(30):
        made.learn(made.draft(Asked(), step()), [5], StepCost(10, 0, 0, 1.0, 0.1))
        made.catch_up()
        made.budget.credit = 9.0
    after = made.draft(Asked(), step()).tree
    assert before > 0.9
    assert not len(after) or after.probability[0] < 0.4
