"""`auto` drafts where it pays, and its losses are bounded in every case."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sequences import Silent

from rest_local.calibration.cost import LARGEST, SIZES, CostCurve
from rest_local.drafting.sources import DEPTH, N_CELLS, Lookup, Merged, ModelRows, SourceRows, Sources
from rest_local.drafting.tree import ROOT, Calibrated, Draft, DraftTree
from rest_local.planning.acceptance import RATE, SLOTS, Acceptance, TokenCalibrator
from rest_local.planning.auto import SKIPPED_STEP, Auto
from rest_local.planning.plan import ALLOWANCE, FIRST_SAVING, SAVINGS_SHARE, Budget, Plan, Savings, longest_wait
from rest_local.planning.policy import StepContext, StepCost
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import Rows

CPU = CostCurve.from_points(
    [512], SIZES, [[20 * r for r in (1, 1.86, 2.50, 2.41, 3.96, 3.80, 5.36, 4.91, 8.22, 8.95, 13.9, 18.1)]]
)
DEAR = CostCurve.from_points([512], [1, 4, 5, 64], [[10, 40, 41, 640]])
STEPPED = CostCurve.from_points([512], [1, 2, 8, 9, 16, 32, 48, 64], [[10, 14, 31, 58, 72, 92, 138, 184]])
GPU = CostCurve.from_points([512], [1, 8, 16, 32, 64], [[10, 11.5, 14.5, 21, 36]])


def grown(planner: Auto, probabilities: list[float]) -> Plan:
    plan = planner.plan(512, 63, 0)
    for p in probabilities:
        if not plan.worth(p):
            break
    return plan


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=63), st.sampled_from([CPU, GPU]))
def test_the_plan_maximises_tokens_per_time(raw: list[float], curve: CostCurve) -> None:
    probabilities = sorted(raw, reverse=True)
    planner = Auto(curve)
    cost = planner.plan(512, 63, 0).cost
    rates = [(1 + sum(probabilities[:n])) / cost[n] for n in range(len(probabilities) + 1)]
    best = grown(planner, probabilities).best
    paying = [n for n in range(1, len(rates)) if sum(probabilities[:n]) * cost[0] > 1.26 * (cost[n] - cost[0])]
    highest = max(paying, key=rates.__getitem__, default=0)
    assert rates[best] >= rates[highest] * (1 - 1e-9)


def test_a_draft_has_to_return_a_share_of_its_cost() -> None:
    """Three nodes cost three plain steps more: drafts are as likely as they are expected to give 3.3 and 3.9 tokens."""
    assert grown(Auto(DEAR), [0.999, 0.999, 0.999, 0.3]).best == 0
    assert grown(Auto(DEAR), [0.999, 0.999, 0.999, 0.9]).best == 4


@pytest.mark.parametrize(("n_other", "n_again", "before"), [(0, 0, 0), (0, 5, 5), (3, 5, 8), (3, 70, LARGEST - 1)])
def test_a_draft_is_priced_after_what_the_pass_evaluates_anyway(n_other: int, n_again: int, before: int) -> None:
    """Roots of others, and tokens of rejected drafts; where they are more than the curve has, nothing is drafted."""
    policy = Auto(CPU)
    policy.draft(Silent(), StepContext(512, 63, 1, n_other=n_other, n_again=n_again))
    assert policy.plan(512, 63, n_other).cost == Auto(CPU).plan(512, 63, 0).cost[before:]


NOTHING_DRAFTED = Draft(DraftTree())


@pytest.mark.parametrize("machine", [0.7, 1.0, 1.3])
def test_drafts_at_every_other_step_keep_the_price_of_plain_steps_right(machine: float) -> None:
    """No plain step follows another, each takes 0.15 ms longer, and the measured curve is wrong."""
    policy = Auto(CostCurve.from_points([64], [1, 64], [[10.0, 60.0]]))
    true = CostCurve.from_points([64], [1, 64], [[10.0 * machine, 60.0 * machine]]).at(64)
    for _ in range(300):
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 4, 1, float(true[4]), 0.0))
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(true[0]) + 0.15, 0.0))
    assert policy.shared.curve.at(64)[0] == pytest.approx(true[0], abs=0.4)


class Simulated:
    """A machine whose steps take what the policy's curve says; nothing is measured."""

    def __init__(self, policy: Auto, lookup_ms: float = 0.15) -> None:
        self.policy, self.lookup_ms = policy, lookup_ms
        policy.shared.driver.step = policy.shared.driver.tree = policy.shared.driver.NODE = 0.0
        self.steps = self.tokens = self.lookups = 0
        self.spent = 0.0
        self.sizes: list[int] = []

    def step(self, sources: Lookup, follow: Callable[[DraftTree], list[int]], at: StepContext) -> list[int]:
        """Run one step in which the model generates `follow(tree)`; return these tokens."""
        ms = self.policy.shared.curve.at(at.n_ctx).tolist()
        drafted = self.policy.draft(sources, at)
        looked = None if drafted.lookup_us is None else self.lookup_ms
        tokens = follow(drafted.tree)
        size = len(drafted.tree)
        self.policy.learn(drafted, tokens, StepCost(at.n_ctx, size, len(tokens) - 1, ms[size], 0.0, looked))
        self.policy.catch_up()
        self.sizes.append(size)
        self.steps, self.tokens = self.steps + 1, self.tokens + len(tokens)
        self.lookups += looked is not None
        self.spent += ms[size] + (looked or 0.0)
        return tokens


class AlwaysCertain(Acceptance):
    """Takes every candidate for certain and learns nothing."""

    def estimate(self, cell: int) -> float:
        return 0.99

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None: ...


class NeverLearns(TokenCalibrator):
    """Changes no estimate."""

    def learn(self, calibrations: Iterable[tuple[Iterable[Calibrated], int]]) -> None: ...


def _at_the_end_of(stored: Sequence[int], n_agreeing: int, prompt: Sequence[int] = ()) -> Sources:
    """Return sources whose history continues the newest `n_agreeing` tokens."""
    history = GrowingText()
    history.extend([*stored, -1])
    sources = Sources([], 100_000, history=history)
    sources.restart([*prompt, *stored[:n_agreeing]])
    return sources


@pytest.mark.parametrize("curve", [CPU, GPU])
@pytest.mark.parametrize("certain", [True, False])
def test_drafts_that_always_fail_lose_a_bounded_share_at_any_point(curve: CostCurve, certain: bool) -> None:
    """Every lookup finds a long match from which the text then diverges; the worst estimates never learn it."""
    policy = Auto(curve)
    if certain:
        policy.shared.acceptance, policy.shared.calibrator = AlwaysCertain(), NeverLearns()
    machine, plain = Simulated(policy, lookup_ms=0.0), float(curve.at(512)[0])
    stored = list(range(1000, 1100))
    policy.begin(512)
    for step in range(1, 300):
        sources = _at_the_end_of(stored, 40)
        machine.step(sources, lambda tree: [7], StepContext(512, 63, 8))
        assert machine.spent <= (step * (1 + ALLOWANCE) + SAVINGS_SHARE * FIRST_SAVING) * plain + 1e-6
    assert sum(machine.sizes) > 0 or not certain


def test_a_copy_of_stored_text_is_drafted_from_the_first_step_on() -> None:
    """The request has no credit yet; earlier requests taught that long matches continue."""
    policy = Auto(GPU)
    policy.shared.acceptance.learn((cell, True) for cell in range(N_CELLS) for _ in range(30))
    machine = Simulated(policy.fork())
    machine.policy.begin(512)
    stored = list(range(1000, 1200))
    for _ in range(2):
        machine.step(_at_the_end_of(stored, 31), lambda tree: [*tree.token[:8], 7], StepContext(512, 63, 8))
    assert machine.sizes[0] > DEPTH == machine.sizes[1], "after a rejection drafts are shorter"


def test_a_copy_goes_past_the_size_from_which_tokens_are_dear() -> None:
    """Nine tokens cost much more than eight, and 32 cost less each than eight."""
    policy = Auto(STEPPED)
    policy.shared.acceptance, policy.shared.calibrator = AlwaysCertain(), NeverLearns()
    machine = Simulated(policy)
    policy.begin(512)
    stored, at = list(range(1000, 1400)), 40
    for _ in range(8):
        tokens = machine.step(_at_the_end_of(stored, at), lambda tree: [*tree.token, 7], StepContext(512, 63, 8))
        at += len(tokens)
    assert machine.sizes[0] <= 7
    assert machine.sizes[-1] > 30


def test_requests_share_what_is_learned_but_not_their_losses() -> None:
    planner = Auto(GPU)
    one, other = planner.fork(), planner.fork()
    for request in (one, other):
        request.begin(5)
    credits = [request.budget.credit for request in (one, other)]
    sources = Sources([], 100)
    sources.restart([1, 2, 3, 1, 2])
    drafted = one.draft(sources, StepContext(5, 8, 8, newest=(1, 2)))
    assert [token for token, _, _ in drafted.proposals[ROOT].calibrated] == [3]
    one.learn(drafted, [9], StepCost(5, 8, 0, 60.0, 0.0, 0.15))
    other.catch_up()  # A fork would do the same.
    ((_, probability, _),) = planner.shared.calibrator.calibrate((1, 2), candidates({3: 0.5}))
    assert probability < 0.5
    assert (one.budget.credit < credits[0], other.budget.credit) == (True, credits[1])


def test_deferred_learning_happens_once() -> None:
    policy = Auto(GPU)
    policy.begin(5)
    sources = Sources([], 100)
    sources.restart([1, 2, 3, 1, 2])
    drafted = policy.draft(sources, StepContext(5, 8, 8))
    assert drafted.proposals[ROOT].by_source
    policy.learn(drafted, [3], StepCost(5, 0, 0, 10.0, 0.0, 0.15))
    assert policy.shared.acceptance.changes == 0
    for _ in range(3):
        policy.catch_up()
    assert policy.shared.acceptance.changes == 1


def test_a_fast_model_makes_few_lookups_in_noise_and_notices_stored_text() -> None:
    """A lookup takes a quarter of a step. After 2 000 tokens of noise the text repeats stored text."""
    policy = Auto(CostCurve.from_points([0], [1, 8, 64], [[0.6, 0.8, 4.0]]))
    machine = Simulated(policy)
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 50_000, 4000).tolist()
    history = GrowingText()
    history.extend([*stored, -1])
    sources = Sources([], 100_000, history=history)
    sources.restart([1, 2, 3])
    policy.begin(3)

    def generated(tokens: list[int]) -> list[int]:
        sources.extend(tokens)
        return tokens

    for _ in range(2000):
        machine.step(sources, lambda tree: generated([int(rng.integers(60_000, 90_000))]), StepContext(64, 63, 8))
    assert machine.lookups < 2000 / 10
    assert machine.spent < 2000 * 0.6 * 1.03
    at, steps = 0, 0
    while not machine.sizes[-1] and steps < 3 * longest_wait(0.15 / 0.6):
        token = stored[at]
        machine.step(sources, lambda tree, token=token: generated([token]), StepContext(64, 63, 8))
        at, steps = at + 1, steps + 1
    assert machine.sizes[-1] > 0, "it drafts again"


@pytest.mark.parametrize("reason", ["another request", "no room for a node", "forced text"])
def test_a_rest_ends_where_there_is_something_to_decide(reason: str) -> None:
    """Its steps have earned credit like others."""
    policy = Auto(CostCurve.from_points([0], [1, 64], [[0.6, 8.0]]))
    policy.begin(50)
    sources = Sources([], 40_000)
    sources.restart(range(50))
    plain = StepContext(50, 12, 8)
    policy.shared.driver.lookup = 0.6  # So dear that none is expected to pay.
    policy.draft(sources, plain)
    assert policy.draft(sources, plain) is SKIPPED_STEP
    credit = policy.budget.credit
    at = {
        "another request": plain._replace(n_other=1),
        "no room for a node": plain._replace(limit=0),
        "forced text": plain._replace(forced=lambda path: ()),
    }[reason]
    assert policy.draft(sources, at) is not SKIPPED_STEP
    assert policy.free_steps == 0
    assert policy.budget.credit > credit


def _credit_after(done: StepCost) -> float:
    """Return the credit for a failed step of a request whose plain step takes 10 ms and each node 1 ms."""
    policy = Auto(CostCurve([0], np.array([[10.0 + n for n in range(LARGEST)]])))
    policy.begin(0)
    policy.draft(Silent(), StepContext(0, 0, 0, n_other=done.n_other))
    begun_with = policy.budget.credit
    policy.learn(NOTHING_DRAFTED, [1], done._replace(updates_curve=False))
    return policy.budget.credit - begun_with


def test_a_draft_is_charged_at_most_twice_its_expected_time() -> None:
    slow, slower = (_credit_after(StepCost(0, 8, 0, ms, 0.0)) for ms in (300.0, 3000.0))
    assert slow == slower
    assert slow < _credit_after(StepCost(0, 8, 0, 18.0, 0.0)) < 0


def test_requests_of_one_pass_share_what_drafts_cost_by_their_nodes() -> None:
    alone = _credit_after(StepCost(0, 8, 0, 19.0, 0.0, n_other=1))
    half = _credit_after(StepCost(0, 4, 0, 19.0, 0.0, n_other=1, n_other_nodes=4))
    assert half == pytest.approx(alone / 2)
    assert half < 0


# ---- What may be lost ----------------------------------------------------------------------------------------------


def test_a_new_request_starts_without_the_previous_losses() -> None:
    budget = Budget()
    budget.begin(1.0)
    budget.settle(-2.0)
    budget.begin(1.0)
    assert budget.credit == 0.0
    budget.begin(3.0, 6.0)
    assert budget.credit == 6.0


def test_a_request_may_lose_a_share_of_what_drafts_saved_for_earlier_ones() -> None:
    savings = Savings()
    for _ in range(200):
        savings.begin(10.0)
        savings.add(500.0)
    assert savings.begin(10.0) == pytest.approx(SAVINGS_SHARE * 500.0, rel=0.01)
    for _ in range(200):
        savings.begin(10.0)
        savings.add(-1.0)
    assert savings.begin(10.0) == 0.0, "where drafts lose, nothing is staked on them"


# ---- Calibrated tokens ---------------------------------------------------------------------------------------------


TEXT, COMPUTED = SourceRows(0, Rows.empty(1)), ModelRows()


def candidates(estimates: dict[int, float], computed: Collection[int] = ()) -> Merged:
    return {
        token: (estimate, 0, [(TEXT, ()), *([(COMPUTED, ())] * (token in computed))])
        for token, estimate in estimates.items()
    }


class Naive:
    """The same regression with weights by name; a drafting model proposes the tokens in `computed`."""

    def __init__(self) -> None:
        self.weights: dict[object, list[float]] = {}
        self.computed: Collection[int] = ()

    def names(self, preceding: tuple[int, int], token: int, estimates: dict[int, float]) -> list[object]:
        before, last = preceding
        half = round(2 * log(estimates[token] / (1 - estimates[token])))
        bucket = ("bucket", half, int(4 * sum(estimates.values())))
        names = [("alone", token), ("pair", last, token), ("apart", before, token), ("after", last), bucket]
        return [(name, token in self.computed) for name in names]

    def probability(self, preceding: tuple[int, int], token: int, estimates: dict[int, float]) -> float:
        names = self.names(preceding, token, estimates)
        odds = log(estimates[token] / (1 - estimates[token]))
        odds += sum(self.weights.setdefault(name, [0.0, RATE])[0] for name in names)
        return 1 / (1 + exp(-odds))

    def learn(self, preceding: tuple[int, int], estimates: dict[int, float], right: int) -> None:
        calibrated = {token: self.probability(preceding, token, estimates) for token in estimates}
        for token, probability in calibrated.items():
            error = (token == right) - probability
            for name in self.names(preceding, token, estimates):
                weight = self.weights[name]
                weight[1] += error * error
                weight[0] += RATE * error / sqrt(weight[1])


TOKENS = st.integers(1, 4)  # so few that no two weights share a slot
NODES = st.lists(
    st.tuples(
        st.tuples(TOKENS, TOKENS),
        st.dictionaries(TOKENS, st.floats(0.001, 0.999), min_size=1),
        st.sets(TOKENS),
        st.integers(1, 5),
    ),
    max_size=12,
)


@given(NODES)
def test_the_probabilities_equal_those_of_a_naive_regression(
    nodes: list[tuple[tuple[int, int], dict[int, float], set[int], int]],
) -> None:
    calibrator, naive = TokenCalibrator(), Naive()
    for preceding, estimates, naive.computed, right in nodes:
        calibrated = calibrator.calibrate(preceding, candidates(estimates, naive.computed))
        for token, probability, _ in calibrated:
            assert 0.0 < probability < 1.0
            assert probability == pytest.approx(naive.probability(preceding, token, estimates))
        calibrator.learn([(calibrated, right)])
        naive.learn(preceding, estimates, right)


@given(
    st.tuples(st.integers(-1, 1 << 20), st.integers(-1, 1 << 20)), st.integers(0, 1 << 20), st.floats(1e-6, 0.999999)
)
def test_every_token_has_valid_slots(preceding: tuple[int, int], token: int, estimate: float) -> None:
    calibrator = TokenCalibrator()
    ((_, _, used),) = calibrated = calibrator.calibrate(preceding, candidates({token: estimate}))
    assert all(0 <= slot < SLOTS for slot in used)
    calibrator.learn([(calibrated, token)])
    ((_, after, _),) = calibrator.calibrate(preceding, candidates({token: estimate}))
    assert after > estimate * (1 - 1e-9)
