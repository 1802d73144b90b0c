"""The policy `auto`: when to draft and how much, by expected gain over measured cost.

- `draft` is called before each step, `learn` after it.
- One rule decides: submit the n nodes that maximise (1 + expected accepted) / t(n + 1), where n = 0 is plain decoding,
  among those that the request's budget allows (`rest_local.planning.plan`, docs/DESIGN.md section 6).
- A trigger decides whether a step makes a lookup at all (`rest_local.planning.plan`).
- A drafting model is asked where a pass is worth its time (`rest_local.planning.draft_scheduler`).
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.models.drafter import Drafter, DraftText
from rest_local.drafting.sources import DEPTH, GRAMMAR, Lookup, PrecedingBigram, SourceRows
from rest_local.drafting.tree import Draft, DraftModelBudget, DraftTree, Growth, Promise
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.planning.draft_scheduler import DraftModelScheduler, ModelStats
from rest_local.planning.plan import (
    TRIAL_SHARE,
    Answers,
    Budget,
    Gains,
    Plan,
    Prices,
    Savings,
    StepOverhead,
    Trigger,
    grow,
    longest_wait,
    refuse,
)
from rest_local.planning.policy import NO_CHECKPOINT, NOTHING, Policy, StepContext, StepCost

if TYPE_CHECKING:
    from typing_extensions import Self

LEARNED_TOGETHER = 16  # The cost curve learns from so many plain steps at once.
# Entropies are computed where one costs at most this share of a plain step. Without them there are rests, in which the
# driver takes a third of its time.
ENTROPY_SHARE = 0.0025
OUTLIER_CLIP = 2.0  # a draft is charged at most this many times its expected cost: a busy machine slows plain steps too
SKIPPED = Draft(DraftTree(), skipped=True)  # of every step without a lookup: nothing changes an empty draft
SKIPPED_STEP = Draft(DraftTree(), skipped=True)  # of a step in which nothing had to be decided


@dataclass(slots=True)
class Prepared:
    """A draft that was grown while the step before it was computed, for the case that this gives `tokens`."""

    tokens: Sequence[int]
    growth: Growth
    depth: int
    estimates: int  # `Acceptance.changes` when it was grown
    right: bool = False  # the step has given `tokens`


class Auto(Policy):
    """Owns the acceptance estimates, their calibration by token, the trigger and the budget, and refines the cost
    curve. There is one fork for each request; forks share everything except the budget and the trigger's timer. Not
    thread safe.

    With other requests in the same forward pass, the price of a plain step is the request's share of the pass, and the
    price of a draft is what it adds to the pass. The sum over the requests is then the time that all of them lost or
    saved.
    """

    name = "auto"

    def __init__(self, curve: CostCurve, drafter: Drafter | None = None) -> None:
        """`drafter`: a model that drafts, for all requests."""
        self.curve = curve
        self.acceptance = Acceptance()
        self.calibrator = TokenCalibrator()
        self.driver = StepOverhead()
        self.drafter = drafter
        self.model_stats = ModelStats()
        self.watches_entropy = True
        self._prices = Prices(curve, self.driver)
        self._savings = Savings()
        self._unlearned: list[tuple[Draft, Sequence[int]]] = []  # of all requests
        self._unlearned_plain: list[StepCost] = []  # likewise
        self._make_own(Gains())

    def _make_own(self, gains: Gains) -> None:
        """Everything that belongs to one request. Forks share the rest, `gains` included."""
        self.budget = Budget()
        self.pass_budget = Budget()  # of passes of a drafting model, which other sources do not pay for
        self.trigger = Trigger(gains)
        self._n_other = 0  # roots of other requests in the current step
        self._n_again, self._checkpoint = 0, NO_CHECKPOINT  # of the current step
        self._run = 0  # accepted tokens since a drafted one was rejected
        self._saving = 0.0  # milliseconds that the current draft is expected to save
        self._to_skip = 0  # further steps in which nothing has to be decided
        self._skipped = 0  # steps of the rest so far
        self._prepared: Prepared | None = None
        self._dropped: Prepared | None = None  # `catch_up` frees it, so that no pass waits for that
        self._unknown = False  # whether a drafting model is asked first, in the current step

    def fork(self) -> Self:
        """Make the policy of another request, with its own budget and timer."""
        other = copy.copy(self)
        other._make_own(self.trigger.gains)
        return other

    def plain_ms(self, n_ctx: int) -> float:
        """This request's share of a step without drafts, in milliseconds."""
        return self._prices.at(n_ctx)[0][self._n_other] / (1 + self._n_other)

    def begin(self, n_ctx: int) -> None:
        """Start a new request."""
        self._end_rest()
        self._learn_plain()
        self._n_other = 0
        self._run = 0
        plain = self.plain_ms(n_ctx)
        credit = plain * self.model_stats.initial_credit if self.drafter else 0.0
        self.budget.begin(plain, credit + self._savings.begin(plain))
        self.pass_budget.begin(plain, credit)
        self.trigger.begin()

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> Plan:
        """The rule over the trees of all requests: best first, by marginal gain under t(n)."""
        cost, slope = self._prices.at(n_ctx)
        first = min(n_other + self._n_again, LARGEST - 1)
        limit = max(0, min(limit, LARGEST - 1 - first))
        n_requests = 1.0 + n_other
        rate = self.model_stats.speedup * n_requests / cost[n_other] if self.drafter else None
        prices = cost[first : first + limit + 1]
        free, ms, rejected, again = self._checkpoint
        if limit > free:
            ms += rejected * (cost[min(n_other + round(again), LARGEST - 1)] - cost[n_other])
            prices = [*prices[: free + 1], *(price + ms for price in prices[free + 1 :])]
        return Plan(prices, slope[first:], n_requests, rate=rate)

    def plan(self, n_ctx: int, limit: int) -> Plan:
        """The rule for a step at `n_ctx` committed tokens with room for `limit` nodes, within the budget."""
        plan = self.joint_plan(n_ctx, limit, self._n_other)
        affordable = bisect_right(plan.cost, plan.cost[0] + self.budget.credit)
        plan.cost = plan.cost[: max(1, affordable)]
        return plan

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree with the best expected rate, often empty. With other requests in the pass, the result also holds the
        growth from which all trees are grown together.
        """
        prepared = self._dropped = self._prepared
        self._prepared = None
        if self._to_skip and not at.n_other and at.limit and at.forced is None:
            self._to_skip -= 1
            self._skipped += 1
            return SKIPPED_STEP
        if self._to_skip or self._skipped:
            self._end_rest()
        self._n_other = at.n_other
        self._n_again, self._checkpoint = at.n_again, at.checkpoint
        self._saving = 0.0
        plain = self.plain_ms(at.n_ctx)
        self.budget.earn(plain)
        self.pass_budget.earn(plain, TRIAL_SHARE)
        if at.limit < 1:
            return NOTHING
        wanted = self.looks_up(at, sources.repeats)
        forced = at.forced(()) if at.forced else ()
        text = self._text_to_ask(sources, at.n_ctx)
        if not wanted and not forced and not text:
            return SKIPPED
        begun = time.perf_counter()
        if not wanted or forced or text or (prepared and not self._fits(prepared, at)):
            prepared = None
        found = sources.rows(depth=_depth(self._run)) if wanted and prepared is None else []
        lookup_us = 1e6 * (time.perf_counter() - begun)
        if not (found or forced or text or prepared or at.n_other):
            return Draft(DraftTree(), lookup_us=lookup_us)
        plan = self.plan(at.n_ctx, at.limit)
        most = len(plan.cost) - 1 if at.n_other else at.limit
        if prepared:
            growth = prepared.growth
            growth.rewind(most)
        else:
            promise = self.model_stats.promise if text else None
            growth = self._growth([*found, *forced], most, at, at.newest, promise)
        self._unknown = growth.promised > growth.best
        if not self._unknown:  # found text goes on here: what such a step yields says nothing about one without it
            plan.rate = None
        result = growth.draft
        model_budget = DraftModelBudget(growth, text, self.pass_budget.credit / 2) if text else None
        if at.n_other:
            result.growth, result.model_budget = growth, model_budget
        else:
            if not prepared or growth.grow_again(plan.worth):
                grow([growth], plan.worth, most, self._answers(plan, [model_budget] if model_budget else []))
            result.tree = result.tree.cut(plan.best)
            if set(result.tree.source) != {GRAMMAR}:  # else the lookup has nothing to do with it
                self._saving = plan.saving
        result.lookup_us, result.skipped = (lookup_us, False) if wanted else (None, True)
        return result

    def prepare(self, sources: Lookup, at: StepContext, tokens: Sequence[int]) -> None:
        """As `Policy.prepare`: the lookup, and a tree as large as it would be in the step at work."""
        depth = _depth(self._run + len(tokens) - 1)
        found = sources.rows_after(tokens, depth)
        if found:
            before, last = [at.newest[1], *tokens][-2:]
            growth = self._growth(found, at.limit, at, (before, last))
            grow([growth], self.plan(at.n_ctx, at.limit).worth, at.limit)
            self._prepared = Prepared(tokens, growth, depth, self.acceptance.changes)

    def _fits(self, prepared: Prepared, at: StepContext) -> bool:
        """Whether the draft of this step would be the same."""
        same = (prepared.depth, prepared.estimates) == (_depth(self._run), self.acceptance.changes)
        return prepared.right and same and prepared.growth.draft.tree.max_leaves == at.leaves

    def _growth(
        self,
        found: list[SourceRows],
        most: int,
        at: StepContext,
        newest: PrecedingBigram,
        promise: Promise | None = None,
    ) -> Growth:
        """What grows from these rows, which follow the tokens `newest`."""
        estimate, calibrate = self.acceptance.estimate, self.calibrator.calibrate
        return Growth(found, estimate, most, at.leaves, calibrate, at.forced, promise, newest)

    def grow_together(self, drafts: Sequence[Draft], n_ctx: int, limit: int, n_other: int) -> tuple[list[int], int]:
        """Grow the trees of several requests best first, by marginal gain under t(n)."""
        plan = self.joint_plan(n_ctx, limit, n_other)
        budgets = [budget for drafted in drafts if (budget := drafted.model_budget)]
        growths = [growth for drafted in drafts if (growth := drafted.growth)]
        order = grow(growths, plan.worth, limit, self._answers(plan, budgets))
        for number, growth in enumerate(growths):  # Nodes that were not added again leave the tree.
            growth.draft.tree = growth.draft.tree.cut(order.count(number))
        return order, plan.best

    def _answers(self, plan: Plan, budgets: Sequence[DraftModelBudget]) -> Answers:
        """What asks the drafting model for the trees of these requests."""
        if self.drafter is None or not budgets:
            return refuse
        return DraftModelScheduler(self.drafter, plan, self.model_stats, budgets)

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        """Whether this step makes a lookup. `repeats`: see `Sources.repeats`."""
        plain = self.plain_ms(at.n_ctx)
        price = self.driver.lookup / plain
        self.watches_entropy = longest_wait(price) > 1 and at.entropy_ms <= ENTROPY_SHARE * plain
        if self.trigger.fires(at.entropies if self.watches_entropy else (), repeats, price):
            return True
        if not (self.watches_entropy or at.n_other or at.forced or self.drafter):
            self._to_skip = max(0, min(self.trigger.skip_steps(repeats), self._prices.steps_left(at.n_ctx)))
        return False

    def _end_rest(self) -> None:
        """Do what its steps left undone, as if each had done it."""
        rested, self._skipped, self._to_skip = self._skipped, 0, 0
        self.trigger.count_skipped(rested)
        self.budget.earn_again(rested)

    def _learn_plain(self) -> None:
        """Learn from the steps of one token since the last call. Many together cost little more than one."""
        steps = self._unlearned_plain
        if steps:
            self.curve.observe_all([(1, step.n_ctx, step.decode_ms) for step in steps])
            self._prices.count_steps(len(steps))
            for step in steps:
                if step.lookup_ms is None:
                    self.driver.learn_step(0, step.driver_ms)
            steps.clear()

    def _text_to_ask(self, sources: Lookup, n_ctx: int) -> DraftText | None:
        """The text of this request in the drafting model; None if it cannot be asked in this step."""
        text = sources.draft_text
        if text is None or self.drafter is None:
            return None
        saves_ms = max(TRIAL_SHARE, self.model_stats.gain) * self.plain_ms(n_ctx)
        try:
            return text if text.can_ask and text.caught_up(saves_ms) else None
        except Exception as error:  # costs drafts, never an answer
            self.drafter.give_up("failed", error)
            return None

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Account for the step, and keep its proposals, which `tokens` decide, for `catch_up` to count."""
        if (prepared := self._prepared) is not None:
            prepared.right = prepared.tokens == tokens
        if drafted.proposals:
            self._unlearned.append((drafted, tokens))
        if done.query_ms:
            self.model_stats.learn(drafted.confidences(tokens))
            self._settle_passes(drafted.added(tokens), done)
        self.account(done)

    @property
    def free_steps(self) -> int:
        """Return how many of the next steps are known to draft nothing."""
        return self._to_skip

    def learn_free(self, steps: Sequence[StepCost]) -> None:
        """Keep the costs of steps of a rest, to be counted when it ends."""
        self._to_skip -= len(steps)
        self._skipped += len(steps)
        self._unlearned_plain += steps

    def _settle_passes(self, added: int, done: StepCost) -> None:
        """Charge the passes of this step with their time, and credit the tokens that they alone gave."""
        plain = self.plain_ms(done.n_ctx)
        saved = added * plain - done.query_ms
        self.pass_budget.settle(saved)
        self.model_stats.learn_gain(saved / plain)

    def catch_up(self) -> None:
        """Count the proposals of the newest steps, submitted or not."""
        for drafted, tokens in self._unlearned:
            self.acceptance.learn(drafted.outcomes(tokens))
            self.calibrator.learn(drafted.calibrations(tokens))
        self._unlearned.clear()
        self._dropped = None

    def account(self, done: StepCost) -> None:
        """Charge what the draft cost beyond a plain step and credit what it saved; refine the cost curve and the
        driver's times.
        """
        if not (done.n_nodes or done.n_other or done.n_again or done.prompted or self.drafter):
            self._run = 0
            self._unlearned_plain.append(done)
            if done.lookup_ms is not None:
                self.driver.learn_lookup(done.lookup_ms)
                self.trigger.learn(0.0)
            if len(self._unlearned_plain) >= LEARNED_TOGETHER:
                self._learn_plain()
            return
        self._learn_plain()
        self._run = done.n_accepted + (self._run if 0 < done.n_accepted == done.n_nodes else 0)
        if done.updates_curve:
            size = 1 + done.n_other + done.n_nodes + done.n_again + done.n_other_nodes
            self.curve.observe(size, done.n_ctx, done.decode_ms)
            self._prices.count_steps()  # once per pass, not once per request
        if done.n_nodes or done.lookup_ms is None:
            self.driver.learn_step(done.n_nodes, done.driver_ms)
        else:
            self.driver.learn_lookup(done.lookup_ms)
        plain = self.plain_ms(done.n_ctx)
        if self.drafter and self._unknown:
            spent = self._spent(done) / (1 + done.n_other) + done.query_ms
            self.model_stats.learn_step(1 + done.n_accepted, spent / plain)
        charged = done.n_nodes or done.n_again
        if not charged and done.lookup_ms is None and not done.query_ms:
            return
        saved = (self._saved(done) if charged else 0.0) - done.query_ms
        self.budget.settle(saved)
        self._savings.add(saved)
        if done.lookup_ms is not None:
            expected = max(saved, 0.0) if done.n_other else self._saving
            self.trigger.learn(expected / plain)

    def _saved(self, done: StepCost) -> float:
        """Milliseconds that this request's draft saved for all requests of the pass; negative if it failed."""
        own = done.n_nodes + done.n_again
        extra = self._spent(done) - self._prices.at(done.n_ctx)[0][done.n_other]
        share = extra * own / (own + done.n_other_nodes)
        return done.n_accepted * self.plain_ms(done.n_ctx) - share - done.checkpoint_ms

    def _spent(self, done: StepCost) -> float:
        """Milliseconds of the pass, as they are charged."""
        size = min(done.n_other + done.n_nodes + done.n_again + done.n_other_nodes, LARGEST - 1)
        return min(done.decode_ms + done.driver_ms, OUTLIER_CLIP * self._prices.at(done.n_ctx)[0][size])


def _depth(run: int) -> int:
    """How long a draft may be after so many accepted tokens without a rejected one: as long as a batch once they were
    as many as another draft has. Without this bound, drafts grow long where two texts part, and edits lose 3 to 5%.
    """
    return LARGEST - 1 if run >= DEPTH else DEPTH
