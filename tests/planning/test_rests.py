"""Steps in which nothing has to be decided are counted later, and everything is as if each had been counted at once."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from rest_local.calibration.cost import CostCurve
from rest_local.decoding.verify import verify
from rest_local.drafting.sources import Sources
from rest_local.planning.auto import SKIPPED, SKIPPED_STEP, Auto
from rest_local.planning.plan import ENTROPIES
from rest_local.planning.policy import StepContext, StepCost

SIZES = [1, 2, 4, 8, 16, 64]
QUICK = [[0.6, 0.8, 1.1, 1.6, 2.4, 8.0], [0.65, 0.87, 1.2, 1.75, 2.6, 8.8]]
SLOW = [[4.0, 4.5, 5.3, 8.6, 8.6, 12.0], [4.3, 4.9, 5.9, 9.4, 9.4, 13.0]]
PROMPT = 100
SLOW_ENTROPY = 1.0  # ms: none is computed, so that none can change a decision


class Restless(Auto):
    """The oracle decides at every step."""

    def _make_own(self) -> None:
        super()._make_own()
        self.trigger.allow_rest = lambda repeats, most: None  # type: ignore[method-assign]


@dataclass
class Played:
    """What a policy did: lookups and nodes by step, and how many steps rested."""

    lookups: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rested: int = 0


def text_of(seed: int, n: int = 700) -> list[int]:
    """Return frequent tokens that repeat alone, new tokens, and now and then a passage again."""
    rng = np.random.default_rng(seed)
    text: list[int] = []
    while len(text) < n:
        if len(text) > 60 and rng.random() < 0.04:
            at = int(rng.integers(0, len(text) - 40))
            text += text[at : at + int(rng.integers(5, 40))]
        else:
            text.append(int(rng.zipf(1.4) % 500) if rng.random() < 0.7 else int(rng.integers(500, 30_000)))
    return text[:n]


def play(policy: Auto, texts: list[list[int]], together: bool, seed: int) -> Played:
    """Decode the texts one after another; or `together`, while two requests last for half of their steps only."""
    played = Played()
    times, loads = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    table = policy.shared.curve.copy()
    forks, sources, at = [], [], []
    for text in texts:
        forks.append(policy.fork())
        sources.append(Sources([], 40_000))
        sources[-1].restart(text[:PROMPT])
        at.append(PROMPT)
    groups = [list(range(len(texts)))] if together else [[number] for number in range(len(texts))]
    for group in groups:
        for number in group:
            forks[number].begin(PROMPT)
        while any(at[number] < len(texts[number]) for number in group):
            running = [number for number in group if at[number] < len(texts[number])]
            if loads.random() < 0.3:
                running = running[:1]  # the others wait
            for number in running:
                fork, text = forks[number], texts[number]
                drafted = fork.draft(
                    sources[number], StepContext(at[number], 12, 8, (), len(running) - 1, SLOW_ENTROPY)
                )
                tree = drafted.tree if drafted.growth is None else drafted.growth.draft.tree
                rest = iter(text[at[number] :])
                left = len(text) - at[number]
                verdict = verify(tree, lambda node, rest=rest: next(rest, -1), lambda token: token < 0)
                tokens = verdict.tokens[:left]
                ms = float(table.at(at[number])[min(len(tree) + len(running), 64) - 1]) * float(times.uniform(0.9, 1.3))
                looked = None if drafted.lookup_us is None else 0.15
                cost = StepCost(
                    at[number],
                    len(tree),
                    len(tokens) - 1,
                    ms,
                    float(times.uniform(0.03, 0.08)),
                    looked,
                    n_other=len(running) - 1,
                    updates_curve=number == running[0],
                )
                fork.learn(drafted, tokens, cost)
                fork.catch_up()
                sources[number].extend(tokens)
                at[number] += len(tokens)
                played.lookups.append(looked is not None)
                played.sizes.append(len(tree))
                played.rested += drafted is SKIPPED_STEP
                assert drafted.skipped == (drafted in (SKIPPED_STEP, SKIPPED))
    for fork in forks:
        fork.begin(PROMPT)  # a new request: the last rest ends
    return played


@pytest.mark.parametrize(
    ("seed", "together", "curve"), [(0, False, QUICK), (1, True, QUICK), (0, True, SLOW), (1, False, SLOW)]
)
def test_decisions_and_what_is_learned_are_those_of_steps_without_a_rest(
    curve: list[list[float]], together: bool, seed: int
) -> None:
    texts = [text_of(10 * seed + number) for number in range(3)]
    policy, oracle = (make(CostCurve.from_points([0, 512], SIZES, curve)) for make in (Auto, Restless))
    played, expected = (play(each, texts, together, seed) for each in (policy, oracle))
    assert expected.rested == 0
    assert played.rested or curve is SLOW  # Most lookups pay on the slow curve.
    assert played.lookups == expected.lookups
    assert played.sizes == expected.sizes
    for bucket in range(len(ENTROPIES) + 1):
        assert policy.trigger.gains.saving(bucket) == oracle.trigger.gains.saving(bucket)
    assert (policy.shared.curve.ms == oracle.shared.curve.ms).all()
    assert (policy.shared.curve.covariance == oracle.shared.curve.covariance).all()
    assert policy.shared.driver == oracle.shared.driver


def test_the_budget_of_a_rest_is_that_of_its_steps() -> None:
    policy, oracle = (make(CostCurve.from_points([0], SIZES, QUICK[:1])) for make in (Auto, Restless))
    text = text_of(3, 400)
    for each in (policy, oracle):
        sources = Sources([], 40_000)
        sources.restart(text[:PROMPT])
        each.begin(PROMPT)
        for at in range(PROMPT, len(text)):
            drafted = each.draft(sources, StepContext(at, 0 if at == len(text) - 1 else 12, 8, entropy_ms=SLOW_ENTROPY))
            looked = None if drafted.lookup_us is None else 0.15
            each.learn(drafted, [text[at]], StepCost(at, 0, 0, 0.6, 0.05, looked))
            sources.extend([text[at]])
    assert policy.budget.credit == oracle.budget.credit


@pytest.mark.parametrize("reason", ["another request", "no room for a node", "forced text"])
def test_a_rest_ends_where_there_is_something_to_decide(reason: str) -> None:
    policy = Auto(CostCurve.from_points([0], SIZES, QUICK[:1]))
    sources = Sources([], 40_000)
    sources.restart(range(50))
    policy.begin(50)
    policy.shared.prices.at(50)
    policy.trigger.free_steps = 5
    at = {
        "another request": StepContext(50, 12, 8, n_other=1),
        "no room for a node": StepContext(50, 0, 8),
        "forced text": StepContext(50, 12, 8, forced=lambda path: ()),
    }[reason]
    assert policy.draft(sources, StepContext(50, 12, 8)) is SKIPPED_STEP
    assert policy.draft(sources, at) is not SKIPPED_STEP
    assert policy.trigger.rested == 0
