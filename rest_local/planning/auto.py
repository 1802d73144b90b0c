"""The policy `auto`: when to draft and how much, by expected gain over measured cost.

`Auto.draft` is the entry of a lookup, and four files answer what it asks:

1. `rest_local.drafting.sources`, what the sources say: rows of text that follow the newest tokens.
2. `rest_local.planning.acceptance`, what is likely: the probability that a proposed token is accepted.
3. `rest_local.planning.plan`, what is worth its price: whether to look up, how many nodes to submit.
4. `rest_local.drafting.tree`, what the tree is: it grows by its likeliest node while the plan says that this is worth
   it.

One rule decides: submit the n nodes that maximise (1 + expected accepted) / t(n + 1), where n = 0 is plain decoding,
among those that the request's budget allows (DESIGN.md section 6). A drafting model is asked where a pass is worth its
time (`rest_local.planning.draft_scheduler`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.models.drafter import Drafter, DraftText
from rest_local.drafting.sources import DEPTH, GRAMMAR, Lookup
from rest_local.drafting.tree import Draft, DraftModelBudget, DraftTree, Growth
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.planning.draft_scheduler import DraftModelScheduler, ModelStats
from rest_local.planning.plan import (
    EXPLORATION_SHARE,
    Answers,
    Budget,
    Gains,
    Plan,
    Prices,
    Savings,
    StepOverhead,
    Trigger,
    grow,
    refuse,
)
from rest_local.planning.policy import NOTHING, Policy, StepContext, StepCost

if TYPE_CHECKING:
    from typing_extensions import Self

LEARNED_TOGETHER = 16  # The cost curve learns from so many plain steps at once.
OUTLIER_CLIP = 2.0  # A draft is charged at most so many times its expected cost: a busy machine slows plain steps too.
SKIPPED = Draft(DraftTree(), skipped=True)  # The draft of every step without a lookup. It is never changed.
SKIPPED_STEP = Draft(DraftTree(), skipped=True)  # The draft of a step in which nothing had to be decided.
BEFORE_ALL = StepContext(0, 0, 0)


@dataclass(slots=True)
class Prepared:
    """A draft that was grown while the step before it was computed, for the case that this gives `tokens`."""

    tokens: Sequence[int]
    growth: Growth
    depth: int
    estimates: int  # `Acceptance.changes` when it was grown.
    right: bool = False  # The step has given `tokens`.


class Shared:
    """The knowledge that the requests of an engine share: prices, acceptance, and what lookups and drafts save."""

    def __init__(self, curve: CostCurve, drafter: Drafter | None) -> None:
        self.curve = curve
        self.acceptance = Acceptance()
        self.calibrator = TokenCalibrator()
        self.driver = StepOverhead()
        self.prices = Prices(curve, self.driver)
        self.gains = Gains()
        self.savings = Savings()
        self.drafter = drafter
        self.model_stats = ModelStats()
        self.unlearned: list[tuple[Draft, Sequence[int]]] = []
        self.unlearned_plain: list[StepCost] = []

    def plain_ms(self, n_ctx: int, n_other: int) -> float:
        """Return one request's share of a step without drafts, in milliseconds."""
        return self.prices.at(n_ctx)[0][n_other] / (1 + n_other)

    def learn_plain(self) -> None:
        """Learn from the steps of one token since the last call. Many together cost little more than one."""
        steps = self.unlearned_plain
        if steps:
            self.curve.observe_all([(1, step.n_ctx, step.decode_ms) for step in steps])
            self.prices.count_steps(len(steps))
            for step in steps:
                if step.lookup_ms is None:
                    self.driver.learn_step(0, step.driver_ms)
            steps.clear()

    def text_to_ask(self, text: DraftText | None, plain: float) -> DraftText | None:
        """Return the text of a request in the drafting model, or None if it cannot be asked in this step."""
        if text is None or self.drafter is None:
            return None
        try:
            saves_ms = max(EXPLORATION_SHARE, self.model_stats.gain) * plain
            return text if text.can_ask and text.caught_up(saves_ms) else None
        except Exception as error:  # It costs drafts, never an answer.
            self.drafter.give_up("failed", error)
            return None

    def answers(self, plan: Plan, budgets: Sequence[DraftModelBudget]) -> Answers:
        """Make what asks the drafting model for the trees of these requests."""
        if self.drafter is None or not budgets:
            return refuse
        return DraftModelScheduler(self.drafter, plan, self.model_stats, budgets)


class Auto(Policy):
    """The planner of one request. `fork` makes that of another, which has only `shared` in common. Not thread safe.

    With other requests in the same forward pass, the price of a plain step is the request's share of the pass, and the
    price of a draft is what it adds to the pass. The sum over the requests is then the time that all of them lost or
    saved.
    """

    name = "auto"

    def __init__(self, curve: CostCurve, drafter: Drafter | None = None) -> None:
        """Plan by `curve`, which is refined, and with `drafter`, a model that drafts for all requests."""
        self.shared = Shared(curve, drafter)
        self._make_own()

    def _make_own(self) -> None:
        """Make everything that belongs to one request."""
        self.budget = Budget()
        self.pass_budget = Budget()  # For passes of a drafting model: other sources do not pay for them.
        self.trigger = Trigger(self.shared.gains)
        self._at = BEFORE_ALL  # What was known before the current step.
        self._run = 0  # Accepted tokens since a drafted one was rejected.
        self._prepared: Prepared | None = None
        self._dropped: Prepared | None = None  # `catch_up` frees it, so that no pass waits for that.
        self._unknown = False  # A drafting model is asked first in the current step.

    def fork(self) -> Self:
        """Make the policy of another request, with its own budget and timer."""
        other = copy.copy(self)
        other._make_own()
        return other

    def begin(self, n_ctx: int) -> None:
        shared = self.shared
        shared.learn_plain()
        self._at = BEFORE_ALL
        self._run = DEPTH  # Nothing was rejected yet, and long matches at the beginning of an answer are copies.
        plain = shared.plain_ms(n_ctx, 0)
        credit = plain * shared.model_stats.initial_credit if shared.drafter else 0.0
        self.budget.begin(plain, credit + shared.savings.begin(plain))
        self.pass_budget.begin(plain, credit)
        self.trigger.begin()

    def plan(self, n_ctx: int, limit: int, n_other: int) -> Plan:
        """Make the rule for a step at `n_ctx` committed tokens with room for `limit` nodes of all requests."""
        shared, at = self.shared, self._at
        cost, slope = shared.prices.at(n_ctx)
        first = min(n_other + at.n_again, LARGEST - 1)
        limit = max(0, min(limit, LARGEST - 1 - first))
        n_requests = 1.0 + n_other
        rate = shared.model_stats.speedup * n_requests / cost[n_other] if shared.drafter else None
        prices = cost[first : first + limit + 1]
        free, ms, rejected, again = at.checkpoint
        if limit > free:
            ms += rejected * (cost[min(n_other + round(again), LARGEST - 1)] - cost[n_other])
            prices = [*prices[: free + 1], *(price + ms for price in prices[free + 1 :])]
        return Plan(prices, slope[first:], n_requests, rate=rate)

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Return the tree with the best expected rate, often empty. With other requests in the pass, the result also
        holds the growth from which all trees are grown together.
        """
        shared, trigger = self.shared, self.trigger
        prepared = self._dropped = self._prepared
        self._prepared = None
        if trigger.free_steps and not at.n_other and at.limit and at.forced is None:
            trigger.rest(1)
            return SKIPPED_STEP
        if trigger.rested or trigger.free_steps:
            self.budget.earn_again(trigger.end_rest())
        self._at = at
        plain = shared.plain_ms(at.n_ctx, at.n_other)
        self.budget.earn(plain)
        self.pass_budget.earn(plain, EXPLORATION_SHARE)
        if at.limit < 1:
            return NOTHING
        wanted = self.looks_up(at, sources.repeats)
        forced = at.forced(()) if at.forced else ()
        text = shared.text_to_ask(sources.draft_text, plain)
        if not wanted and not forced and not text:
            return SKIPPED
        begun = time.perf_counter()
        depth = _depth(self._run)
        if prepared and not (
            wanted
            and not forced
            and not text
            and prepared.right
            and (prepared.depth, prepared.estimates) == (depth, shared.acceptance.changes)
            and prepared.growth.draft.tree.max_leaves == at.leaves
        ):
            prepared = None
        found = sources.rows(depth=depth) if wanted and prepared is None else []
        lookup_us = 1e6 * (time.perf_counter() - begun)
        if not (found or forced or text or prepared or at.n_other):
            return Draft(DraftTree(), lookup_us=lookup_us)
        plan = self.plan(at.n_ctx, at.limit, at.n_other)
        plan.afford(self.budget.credit)
        most = len(plan.cost) - 1 if at.n_other else at.limit
        if prepared:
            growth = prepared.growth
            growth.rewind(most)
        else:
            growth = Growth(
                [*found, *forced],
                shared.acceptance.estimate,
                most,
                at.leaves,
                shared.calibrator.calibrate,
                at.forced,
                shared.model_stats.promise if text else None,
                at.newest,
                lambda path: sources.rows_after(path, depth, len(path)),
                shared.driver.lookup * plan.price_of_time,  # What is found is taken to give one token.
            )
        self._unknown = growth.promised > growth.best
        if not self._unknown:  # Found text goes on here: what such a step yields says nothing about one without it.
            plan.rate = None
        result = growth.draft
        model_budget = DraftModelBudget(growth, text, self.pass_budget.credit / 2) if text else None
        if at.n_other:
            result.growth, result.model_budget = growth, model_budget
        else:
            if not prepared or growth.grow_again(plan.worth):
                grow([growth], plan.worth, most, shared.answers(plan, [model_budget] if model_budget else []))
            result.tree = result.tree.cut(plan.best)
            if set(result.tree.source) != {GRAMMAR}:  # Otherwise the lookup has nothing to do with it.
                result.saving = plan.saving
        result.lookup_us, result.skipped = (lookup_us, False) if wanted else (None, True)
        return result

    def prepare(self, sources: Lookup, at: StepContext, tokens: Sequence[int]) -> None:
        """Make the next draft ahead (see `Policy.prepare`): the lookup, and a tree as large as it would be in the step
        at work.
        """
        depth = _depth(self._run + len(tokens) - 1)
        found = sources.rows_after(tokens, depth)
        if found:
            shared = self.shared
            estimate, calibrate = shared.acceptance.estimate, shared.calibrator.calibrate
            before, last = [at.newest[1], *tokens][-2:]
            growth = Growth(found, estimate, at.limit, at.leaves, calibrate, newest=(before, last))
            plan = self.plan(at.n_ctx, at.limit, at.n_other)
            plan.afford(self.budget.credit)
            grow([growth], plan.worth, at.limit)
            self._prepared = Prepared(tokens, growth, depth, shared.acceptance.changes)

    def grow_together(self, drafts: Sequence[Draft], n_ctx: int, limit: int, n_other: int) -> tuple[list[int], int]:
        """Grow the trees of several requests best first, by marginal gain under t(n)."""
        plan = self.plan(n_ctx, limit, n_other)
        budgets = [budget for drafted in drafts if (budget := drafted.model_budget)]
        growths = [growth for drafted in drafts if (growth := drafted.growth)]
        order = grow(growths, plan.worth, limit, self.shared.answers(plan, budgets))
        for number, growth in enumerate(growths):  # Nodes that were not added again leave the tree.
            growth.draft.tree = growth.draft.tree.cut(order.count(number))
        return order, plan.best

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        """Return True if this step makes a lookup. `repeats` is `Sources.repeats`."""
        shared = self.shared
        if self.trigger.fires(repeats, shared.driver.lookup / shared.plain_ms(at.n_ctx, at.n_other)):
            return True
        if not (at.n_other or at.forced or shared.drafter):
            self.trigger.allow_rest(repeats, shared.prices.steps_left(at.n_ctx))
        return False

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Account for the step, and keep its proposals, which `tokens` decide, for `catch_up` to count."""
        shared = self.shared
        if (prepared := self._prepared) is not None:
            prepared.right = prepared.tokens == tokens
        if drafted.proposals:
            shared.unlearned.append((drafted, tokens))
        if done.query_ms:  # Charge the passes with their time, and credit the tokens that they alone gave.
            plain = shared.plain_ms(done.n_ctx, self._at.n_other)
            saved = drafted.added(tokens) * plain - done.query_ms
            shared.model_stats.learn(drafted.confidences(tokens))
            shared.model_stats.learn_gain(saved / plain)
            self.pass_budget.settle(saved)
        self.account(drafted, done)

    def account(self, drafted: Draft, done: StepCost) -> None:
        """Charge what the draft cost beyond a plain step and credit what it saved; refine the cost curve and the
        driver's times.
        """
        shared, n_other = self.shared, done.n_other
        if not (done.n_nodes or n_other or done.n_again or done.prompted or shared.drafter):
            self._run = 0
            shared.unlearned_plain.append(done)
            if done.lookup_ms is not None:
                shared.driver.learn_lookup(done.lookup_ms)
                self.trigger.learn(0.0)
            if len(shared.unlearned_plain) >= LEARNED_TOGETHER:
                shared.learn_plain()
            return
        shared.learn_plain()
        self._run = done.n_accepted + (self._run if 0 < done.n_accepted == done.n_nodes else 0)
        own = done.n_nodes + done.n_again
        size = n_other + own + done.n_other_nodes
        if done.updates_curve:  # Once per pass, not once per request.
            shared.curve.observe(1 + size, done.n_ctx, done.decode_ms)
            shared.prices.count_steps()
        if done.n_nodes or done.lookup_ms is None:
            shared.driver.learn_step(done.n_nodes, done.driver_ms)
        else:
            shared.driver.learn_lookup(done.lookup_ms)
        cost, _ = shared.prices.at(done.n_ctx)
        plain = shared.plain_ms(done.n_ctx, self._at.n_other)
        spent = min(done.decode_ms + done.driver_ms, OUTLIER_CLIP * cost[min(size, LARGEST - 1)])
        if shared.drafter and self._unknown:
            shared.model_stats.learn_step(1 + done.n_accepted, (spent / (1 + n_other) + done.query_ms) / plain)
        if not own and done.lookup_ms is None and not done.query_ms:
            return
        saved = -done.query_ms
        if own:
            share = (spent - cost[n_other]) * own / (own + done.n_other_nodes)
            saved += done.n_accepted * plain - share - done.checkpoint_ms
        self.budget.settle(saved)
        shared.savings.add(saved)
        if done.lookup_ms is not None:
            self.trigger.learn((max(saved, 0.0) if n_other else drafted.saving) / plain)

    @property
    def free_steps(self) -> int:
        """Return how many of the next steps are known to draft nothing."""
        return self.trigger.free_steps

    def learn_free(self, steps: Sequence[StepCost]) -> None:
        """Keep the costs of steps of a rest, to be counted when it ends."""
        self.trigger.rest(len(steps))
        self.shared.unlearned_plain += steps

    def catch_up(self) -> None:
        """Count the proposals of the newest steps, submitted or not."""
        shared = self.shared
        for drafted, tokens in shared.unlearned:
            shared.acceptance.learn(drafted.outcomes(tokens))
            shared.calibrator.learn(drafted.calibrations(tokens))
        shared.unlearned.clear()
        self._dropped = None


def _depth(run: int) -> int:
    """Return how long a draft may be after `run` accepted tokens without a rejected one.

    It is as long as a batch at the beginning of an answer, and once they were as many as another draft has. Without
    this bound, drafts grow long where two texts part, and edits lose 3 to 5%. Bounded at the beginning as well, next
    edits would lose 4%.
    """
    return LARGEST - 1 if run >= DEPTH else DEPTH
