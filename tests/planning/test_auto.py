"""The planner drafts where it pays, and losses are bounded whatever happens."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import N_CELLS, SOURCE_NUMBER, cell_of
from rest_local.drafting.draft_model import Follower
from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Sources
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning import auto
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.auto import Auto, Plan
from rest_local.planning.cost import LARGEST, SIZES, CostCurve, measure
from rest_local.planning.policy import Situation, StepCost
from rest_local.retrieval.growing import GrowingText

CPU = CostCurve.from_points(
    [512], SIZES, [[20 * r for r in (1, 1.86, 2.50, 2.41, 3.96, 3.80, 5.36, 4.91, 8.22, 8.95, 13.9, 18.1)]]
)
GPU = CostCurve.from_points([512], [1, 8, 16, 32, 64], [[10, 11.5, 14.5, 21, 36]])


def grown(planner: Auto, probabilities: list[float]) -> Plan:
    plan = planner.plan(512, 63)
    for p in probabilities:
        if not plan.worth(p):
            break
    return plan


def test_unlikely_drafts_are_not_submitted() -> None:
    assert grown(Auto(CPU), [0.3, 0.1, 0.05]).best == 0
    assert grown(Auto(GPU), [0.01]).best == 0


def test_certain_drafts_fill_the_cheapest_rate() -> None:
    assert grown(Auto(CPU), [0.99] * 63).best >= 15
    assert grown(Auto(GPU), [0.99] * 63).best == 63


def test_growth_looks_past_a_dear_size() -> None:
    """3 tokens cost more than 4 on the reference curve: a draft that stops there would pay for nothing."""
    assert grown(Auto(CPU), [0.9] * 3).best == 3
    assert grown(Auto(CPU), [0.75, 0.7, 0.7, 0.65]).best != 2


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=63), st.sampled_from([CPU, GPU]))
def test_the_plan_maximises_tokens_per_time(raw: list[float], curve: CostCurve) -> None:
    probabilities = sorted(raw, reverse=True)
    planner = Auto(curve)
    cost = planner.plan(512, 63).cost
    rates = [(1 + sum(probabilities[:n])) / cost[n] for n in range(len(probabilities) + 1)]
    best = grown(planner, probabilities).best
    highest = max(range(len(rates)), key=rates.__getitem__)
    if rates[highest] > rates[0] * 1.021:
        assert rates[best] == pytest.approx(rates[highest])
    else:
        assert rates[best] >= rates[0] * (1 - 1e-9)


def test_cells_are_distinct_and_in_range() -> None:
    cells = {
        cell_of(source, length, rows, agreeing)
        for source in SOURCE_NUMBER.values()
        for length in (1, 2, 5, 30, 300)
        for rows in (1, 3, 64, 1000)
        for agreeing in {1, max(1, rows // 2), rows}
    }
    assert min(cells) >= 0
    assert max(cells) < N_CELLS
    per_length = 1 + 2 + 3  # rows of 1, of 3, of 64; 1 000 fall in the bucket of 64
    assert len(cells) == 5 * 4 * per_length


def test_estimates_follow_what_is_counted() -> None:
    acceptance = Acceptance()
    cell = cell_of(0, 8, 1, 1)
    before = acceptance.estimate(cell)
    acceptance.learn([(cell, False)] * 300)
    assert acceptance.estimate(cell) < 0.1 < before
    acceptance.learn([(cell, True)] * 3000)
    assert acceptance.estimate(cell) > 0.9
    assert acceptance.seen(cell) <= 400


def test_longer_matches_start_more_trusted() -> None:
    acceptance = Acceptance()
    estimates = [acceptance.estimate(cell_of(0, length, 4, 4)) for length in (1, 2, 4, 8, 16, 30)]
    assert estimates == sorted(estimates)


def test_the_curve_is_measured_within_its_budget() -> None:
    clock = [0.0]
    calls: list[tuple[int, int]] = []

    def probe(n: int, n_ctx: int) -> float:
        calls.append((n, n_ctx))
        clock[0] += n
        return 2.0 + n

    curve = measure(probe, [64, 512], 10.0)
    assert curve.contexts == [64, 512]
    assert curve.at(64)[0] == pytest.approx(3.0)
    assert curve.at(300)[15] == pytest.approx(18.0)
    short = measure(probe, [64, 512], -1.0)
    assert short.contexts == [64]
    assert short.at(5000)[7] == pytest.approx(10.0)
    assert np.isfinite(short.ms).all()


def test_the_curve_follows_real_steps_and_ignores_hiccups() -> None:
    curve = CostCurve.from_points([64, 512], [1, 64], [[1, 10], [2, 20]])
    for _ in range(200):
        curve.observe(8, 512, 9.0)
    assert curve.at(512)[7] == pytest.approx(9.0, rel=0.1)
    before = curve.at(64)[7]
    for _ in range(60):
        curve.observe(8, 64, before)
    curve.observe(8, 64, 1e6)
    assert curve.at(64)[7] < before * 1.2


def test_the_first_real_steps_of_a_session_count_most() -> None:
    """What was measured in a loop misses what a step finds: a rebuilt graph, cold caches."""
    curve = CostCurve.from_points([64], [1, 64], [[1, 10]])
    plain, sixteen = curve.at(64)[0], curve.at(64)[15]
    for n in (8, 5, 8, 6):
        curve.observe(n, 64, 2 * float(CostCurve.from_points([64], [1, 64], [[1, 10]]).at(64)[n - 1]))
    assert curve.at(64)[0] == plain
    assert 1.6 * sixteen < curve.at(64)[15] < 2.4 * sixteen


def test_sizes_that_no_table_has_are_left_alone() -> None:
    curve = CostCurve.from_points([64, 512], [1, 64], [[1, 10], [2, 20]])
    before = curve.ms.copy()
    curve.observe(LARGEST + 1, 64, 5.0)
    assert (curve.ms == before).all()


def test_a_curve_survives_json_and_refuses_what_is_not_one() -> None:
    again = CostCurve.from_json(CPU.to_json())
    assert np.allclose(again.ms, CPU.ms, atol=1e-4)
    for text in ("{}", '{"contexts": [1], "ms": [[1, 2]]}', '{"contexts": [1], "ms": [[0' + ", 0" * 63 + "]]}", "[]"):
        with pytest.raises(ValueError, match=r"."):
            CostCurve.from_json(text)


def test_a_faster_machine_makes_every_size_cheaper() -> None:
    """Measured while something else ran: plain steps alone must not make drafts look ever dearer."""
    curve = CostCurve.from_points([64], [1, 64], [[2.0, 20.0]])
    before = curve.at(64)[15] / curve.at(64)[0]
    for _ in range(300):
        curve.observe(1, 64, 0.5)
    assert curve.at(64)[0] == pytest.approx(0.5, rel=0.05)
    assert curve.at(64)[15] / curve.at(64)[0] == pytest.approx(before)


def test_a_request_starts_with_small_drafts_and_earns_long_ones() -> None:
    """A draft that fails costs at most what the account holds; each that succeeds lets the next be longer."""
    planner = Auto(CPU)
    planner.driver.tree = planner.driver.step = 0.0
    planner.begin(512)
    sizes = []
    for _ in range(6):
        assert planner.looks_up(512, lambda: True)
        plan = grown(planner, [0.99] * 63)
        sizes.append(plan.best)
        planner.book(StepCost(512, plan.best, plan.best, float(CPU.at(512)[plan.best]), 0.0, 0.1))
    assert sizes == sorted(sizes)
    assert sizes[0] <= 1
    assert sizes[-1] >= 11


QUICK = CostCurve.from_points([64, 1024], SIZES, [[0.4 * (0.6 + 0.4 * n) for n in SIZES]] * 2)


def _stored(n_agreeing: int) -> Sources:
    """Stored text goes on from the newest `n_agreeing` tokens; nothing repeats within the text itself."""
    stored = GrowingText()
    stored.extend(list(range(1000, 1200)))
    sources = Sources([], 100_000, history=stored)
    sources.restart([*range(100), *range(1000, 1000 + n_agreeing)])
    return sources


@pytest.mark.parametrize(("n_agreeing", "drafts"), [(31, True), (auto.LONG_MATCH, True), (auto.LONG_MATCH - 1, False)])
def test_a_request_for_stored_text_is_drafted_from_its_first_step_on(n_agreeing: int, drafts: bool) -> None:
    """A lookup takes a third of a plain step here, a useful draft three: neither was earned yet."""
    policy = Auto(QUICK).fork()
    policy.acceptance.learn((cell, True) for cell in range(N_CELLS) for _ in range(30))  # what is stored goes on
    policy.begin(64)
    drafted = policy.draft(_stored(n_agreeing), Situation(64, 63, 8))
    assert drafted.lookup_us is not None
    assert (len(drafted.tree) >= 4) == drafts


def test_a_long_agreement_with_the_request_itself_is_not_paid_in_advance() -> None:
    """A long repeat may overdraw by less (`Account.affords_lookup`)."""
    sources = Sources([], 100_000)
    sources.restart([*range(40), *range(31)])
    policy = Auto(QUICK).fork()
    policy.begin(64)
    assert policy.draft(sources, Situation(64, 63, 8)).lookup_us is not None
    assert policy.account.risk < 1.5 * policy.plain_ms(64)


NOTHING_DRAFTED = Draft(DraftTree())


def _credit(policy: Auto) -> float:
    """Without what a step earns."""
    policy.account.earn(policy.plain_ms(64), 0)
    return policy.account.risk


def _behind_a_draft(excess: float, share: int = 4, nodes: int = 4, **more: bool) -> tuple[float, Auto]:
    """What the account loses in a plain step that takes so much longer than usual, behind a draft of so many nodes."""
    policy = Auto(QUICK)
    policy.driver.step = 0.0
    policy.begin(64)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, share, 0, float(QUICK.at(64)[nodes]), 0.0, None, 0, nodes - share))
    before = _credit(policy)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(QUICK.at(64)[0]) + excess, 0.0, **more))
    return before - _credit(policy), policy


def test_what_a_plain_step_takes_longer_behind_a_draft_is_paid_by_those_who_drafted() -> None:
    whole, policy = _behind_a_draft(0.2)
    assert whole == pytest.approx(policy.driver.aftermath)
    assert 0.1 < whole < 0.2
    assert _behind_a_draft(0.2, share=1)[0] == pytest.approx(whole / 4)
    assert _behind_a_draft(0.2, share=0)[0] == 0.0
    assert _behind_a_draft(0.2, prompted=True, leads=False)[0] == 0.0
    assert _behind_a_draft(90.0)[0] < 0.2  # a hiccup is not a draft's doing


def test_where_nothing_was_drafted_nothing_is_paid() -> None:
    policy = Auto(QUICK)
    policy.begin(64)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 4, 0, float(QUICK.at(64)[4]), 0.0))
    for plain_steps in range(3):
        before = _credit(policy)
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(QUICK.at(64)[0]), 0.0))
        assert (_credit(policy) < before) == (plain_steps == 0)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 4, 0, float(QUICK.at(64)[4]), 0.0))
    policy.begin(64)  # another request owes nothing
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(QUICK.at(64)[0]), 0.0))
    assert _credit(policy) == 0.0


def test_a_draft_stays_the_one_before_while_its_request_rests() -> None:
    """Without credit nothing is booked for some steps; what comes behind them is not behind a draft any more."""
    policy = Auto(QUICK)
    policy.begin(64)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 4, 0, float(QUICK.at(64)[4]), 0.0))
    policy.account.settle(-50.0)
    sources = Sources([], 1000)
    sources.restart([1, 2, 3])
    for _ in range(1 + auto.REST_STEPS):
        policy.draft(sources, Situation(64, 16, 8))
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(QUICK.at(64)[0]), 0.0))
    policy.draft(sources, Situation(64, 16, 8))
    before = _credit(policy)
    policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(QUICK.at(64)[0]), 0.0))
    assert _credit(policy) == before


@pytest.mark.parametrize("machine", [0.7, 1.0, 1.3])
def test_drafts_at_every_other_step_leave_the_price_of_plain_steps_right(machine: float) -> None:
    """No plain step has another before it, each takes 0.15 ms longer, and the curve was measured wrong."""
    policy = Auto(CostCurve.from_points([64], [1, 64], [[10.0, 60.0]]))
    true = CostCurve.from_points([64], [1, 64], [[10.0 * machine, 60.0 * machine]]).at(64)
    for _ in range(300):
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 4, 1, float(true[4]), 0.0))
        policy.learn(NOTHING_DRAFTED, [1], StepCost(64, 0, 0, float(true[0]) + 0.15, 0.0))
    assert policy.curve.at(64)[0] == pytest.approx(true[0], abs=0.4)


def test_a_draft_may_not_cost_more_than_is_left_behind_the_lookup() -> None:
    policy = Auto(QUICK)
    policy.begin(64)
    policy.account.settle(1.0)
    policy.looks_up(64, lambda: False)
    plan = policy.plan(64, 63)
    spent = plan.cost[-1] - plan.cost[0] + policy.driver.lookup + policy.driver.aftermath
    assert 0.5 < spent <= policy.account.risk


def test_what_is_lent_for_stored_text_is_not_spent_on_questions() -> None:
    """A draft model is asked for half of what the account could lose before."""
    spent = []
    policy = Auto(QUICK).fork()
    policy.begin(64)
    sources = _stored(31)
    sources.follower = cast(Follower, object())
    policy._questions = lambda follower, plan, n_ctx, most_ms: spent.append(most_ms)  # type: ignore[method-assign]
    policy.draft(sources, Situation(64, 63, 8))
    assert spent[0] < policy.plain_ms(64) < policy.account.risk / 2


def test_a_real_step_moves_both_lengths_around_it() -> None:
    """Else the one further away keeps its part of an error for good."""
    curve = CostCurve.from_points([0, 1000, 4000], [1, 64], [[1, 10], [2, 20], [4, 40]])
    for _ in range(300):
        curve.observe(1, 400, 0.7)
    assert curve.at(400)[0] == pytest.approx(0.7, rel=0.02)
    assert curve.at(0)[0] < 0.7
    assert curve.at(1000)[0] < 1.2
    assert curve.at(4000)[0] == 4.0


def test_a_length_that_was_measured_right_stays_right_while_another_is_corrected() -> None:
    curve = CostCurve.from_points([512, 4096], [1, 64], [[10, 60], [40, 120]])
    for _ in range(60):
        curve.observe(1, 4000, 20.0)
    assert curve.at(4000)[0] == pytest.approx(20.0, rel=0.02)
    assert curve.at(512)[0] == pytest.approx(10.0, rel=0.05)
    for _ in range(20):
        curve.observe(1, 6000, 25.0)  # beyond the last length it is that one's
    assert curve.at(512)[0] == pytest.approx(10.0, rel=0.05)


def test_a_step_in_which_nobody_may_draft_is_no_reason_to_rest() -> None:
    """Beside a part of a prompt: the next step looks up, and has earned what both would."""
    policies = Auto(CPU), Auto(CPU)
    for policy, limits in zip(policies, ([16, 16], [0, 16]), strict=True):
        policy.begin(512)
        sources = Sources([], 1000)
        sources.restart([1, 2, 3] * 10)
        for limit in limits:
            drafted = policy.draft(sources, Situation(512, limit, 8))
            assert (drafted.lookup_us is not None) == (limit > 0)
    always, at_last = (policy.account.risk for policy in policies)
    assert always == at_last


def test_where_nobody_may_ever_draft_books_are_kept_now_and_then() -> None:
    policy = Auto(CPU)
    policy.begin(512)
    sources = Sources([], 1000)
    booked = 0
    for _ in range(80):
        before = policy.driver.step
        drafted = policy.draft(sources, Situation(512, 0, 8))
        policy.learn(drafted, [1], StepCost(512, 0, 0, float(CPU.at(512)[0]), 1.0))
        booked += policy.driver.step != before
    assert booked == 10


def test_after_a_no_it_rests_and_a_rested_step_still_earns() -> None:
    """Where lookups are rationed most steps neither ask nor keep books, and lookups come as often as they would."""

    def lookups(rest: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
        asked: list[int] = []
        monkeypatch.setattr(auto, "REST_STEPS", rest)
        policy = Auto(CostCurve.from_points([0], [1, 64], [[0.6, 18.0]]))
        policy.driver.lookup = 0.3
        policy.begin(512)
        sources = Sources([], 1000)
        sources.restart([1, 2, 3])
        monkeypatch.setattr(sources, "repeats", lambda: bool(asked.append(1)))
        found = 0
        for step in range(2000):
            drafted = policy.draft(sources, Situation(512, 16, 8))
            lookup_ms = None if drafted.lookup_us is None else 0.3
            policy.learn(drafted, [step % 7], StepCost(512, 0, 0, 0.6, 0.0, lookup_ms))
            found += lookup_ms is not None
        return found, len(asked)

    with pytest.MonkeyPatch.context() as patch:
        every, asked = lookups(0, patch)
        rested, asked_rested = lookups(3, patch)
    assert every >= 15
    assert abs(rested - every) <= 2
    assert asked_rested < asked / 3


def test_what_words_do_is_learned_by_all_requests_of_an_engine() -> None:
    planner = Auto(GPU)
    request = planner.fork()
    sources = Sources([], 100)
    sources.restart([1, 2, 3, 1, 2])
    request.begin(5)
    drafted = request.draft(sources, Situation(5, 8, 8))
    assert [token for token, _, _ in drafted.proposals[ROOT].judged] == [3]
    for _ in range(auto.LEARN_STEPS):
        request.learn(drafted, [9], StepCost(5, len(drafted.tree), 0, 10.0, 0.0, 0.15))
    ((_, probability, _),) = planner.wording.judge((1, 2), {3: (0.5, 1, [])})
    assert probability < 0.5


@pytest.mark.parametrize(("step_ms", "looks"), [(0.4, False), (10.0, True)])
def test_a_quick_model_has_no_time_for_words(step_ms: float, looks: bool) -> None:
    planner = Auto(CostCurve.from_points([512], [1, 64], [[step_ms, 2 * step_ms]]))
    planner.driver.lookup = 0.0
    sources = Sources([], 100)
    sources.restart([1, 2, 3, 1, 2])
    planner.begin(5)
    drafted = planner.draft(sources, Situation(5, 8, 8))
    assert list(drafted.proposals[ROOT].merged) == [3]
    assert bool(drafted.proposals[ROOT].judged) is looks
