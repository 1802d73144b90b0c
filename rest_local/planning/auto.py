"""The policy `auto`: when to draft and how much, by expected gain over measured cost.

Contract: `draft` before each step, `learn` after it. One rule decides (DESIGN.md section 6): submit the n nodes that
maximise (1 + expected accepted) / t(n + 1), where n = 0 is plain decoding, of those that the request's budget allows: a
draft may cost at most the credit plus a fixed share of its expected saving, and never more than a small floor
(`rest_local.planning.budget`). Lookups follow a timer that successes reset (`rest_local.planning.trigger`).
"""

from __future__ import annotations

import copy
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.candidates import GRAMMAR
from rest_local.drafting.draft_model import Follower
from rest_local.drafting.drafter import Draft, Growth, draft
from rest_local.drafting.sources import DEPTH, Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.budget import Budget
from rest_local.planning.calibrator import TokenCalibrator
from rest_local.planning.policy import StepContext, StepCost
from rest_local.planning.questions import LEAST_GAIN, DraftModelQueries, DraftModelStats
from rest_local.planning.trigger import LOOKUP_MS, TEACHES, Trigger

REFRESH_STEPS = 16  # how often the cost table follows what was learned
OUTLIER_CLIP = 2.0  # a draft is charged at most so many times what was expected: a busy machine slows plain steps, too
ENTROPY_SHARE = 0.5  # of a lookup's time that entropies may take: on unseen text about half of the lookups are skipped
MARGIN = 1.02  # a draft must promise this much more than plain decoding
LONG_RUN = 12  # after as many accepted tokens in one step, a draft may be as long as a batch; without this bound, what
# is guessed where texts part grows long, and edits lose 3 to 5%


@dataclass
class Driver:
    """The driver's own time of a step, in milliseconds, learned from real steps."""

    lookup: float = LOOKUP_MS  # asking the sources where nothing comes of it
    step: float = 0.05  # any step: batch, sampling, bookkeeping
    tree: float = 0.08  # a step with a draft, more than that
    NODE = 0.014  # and by drafted node: growing, laying out and walking

    def learn_lookup(self, ms: float) -> None:
        self.lookup = _follow(self.lookup, ms)

    def learn_step(self, n_nodes: int, ms: float) -> None:
        if n_nodes:
            self.tree = _follow(self.tree, max(0.01, ms - self.step - self.NODE * n_nodes))
        else:
            self.step = _follow(self.step, ms)


def _follow(now: float, ms: float) -> float:
    """Move a twentieth towards `ms`; an outlier counts as four times the usual at most."""
    return now + 0.05 * (min(max(ms, 0.0), 4 * now) - now)


@dataclass(slots=True)
class Plan:
    """The rule for one step. The drafter asks `worth` before each node; `best` is the number of nodes to submit."""

    cost: list[float]  # milliseconds of a step with n drafted nodes, n = 0..limit
    slope: list[float]  # least milliseconds a further node can cost from here
    guaranteed: float = 1.0  # tokens that the step gives without any of them: one for each request
    budget: Budget | None = None  # of the request, where it drafts alone
    best: int = 0
    expected: float = 0.0  # accepted nodes of all that were counted in
    saving: float = 0.0  # milliseconds that the `best` nodes are expected to save
    best_rate: float = field(init=False)
    _plain: float = field(init=False)
    _grown: int = 0

    def __post_init__(self) -> None:
        self._plain = self.cost[0] / self.guaranteed
        self.best_rate = MARGIN / self._plain

    def worth(self, probability: float) -> bool:
        """Count a node of this joint probability in, and say whether growth should go on to it. Constant time."""
        n = self._grown + 1
        if n >= len(self.cost) or probability <= self.best_rate * self.slope[n - 1]:
            return False
        self._grown = n
        self.expected += probability
        cost = self.cost[n]
        rate = (self.guaranteed + self.expected) / cost
        if rate >= self.best_rate:
            extra = cost - self.cost[0]
            saving = self.expected * self._plain - extra
            if self.budget is None or self.budget.allows(extra, saving):
                self.best, self.best_rate, self.saving = n, rate, saving
        return True

    def pays(self, gain: float, ms: float) -> bool:
        """Whether `gain` more tokens are worth a further node and `ms` more. Only sizes that the credit affords count:
        what else is asked for a draft that may not go is lost.
        """
        grown, now = self._grown, self.cost[self._grown]
        most = math.inf if self.budget is None else self.cost[0] + self.budget.credit
        further = [(cost - now) / n for n, cost in enumerate(self.cost[grown + 1 :], 1) if cost <= most]
        return bool(further) and gain > self.best_rate * (ms + min(further))


class Auto:
    """Owns the acceptance estimates, what corrects them, the trigger and the budget, and refines the cost curve. Its
    forks, one for each request, share all but the budget and the trigger's timer. Not thread safe.

    With other requests in the same forward pass, a plain step's price is their share of it, a draft's is what it adds
    to it. The sum over the requests is then the time that all of them lost or won.
    """

    name = "auto"

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.acceptance = Acceptance()
        self.calibrator = TokenCalibrator()
        self.driver = Driver()
        self.budget = Budget()
        self.trigger = Trigger()
        self.has_draft_model = False
        self.draft_model = DraftModelStats()
        self.watches_entropy = True
        self._prices = Prices(curve, self.driver)
        self._n_other = 0  # roots of others in the step under way
        self._depth = DEPTH
        self._saving = 0.0  # milliseconds that the draft under way is expected to save
        self._found = False  # whether it had candidates
        self._unlearned: list[tuple[Draft, Sequence[int]]] = []  # of all requests

    def fork(self) -> Auto:
        """One for another request, with a budget and a timer of its own."""
        other = copy.copy(self)
        other.budget = Budget()
        other.trigger = Trigger(self.trigger.gains)
        return other

    def plain_ms(self, n_ctx: int) -> float:
        """This request's share of a step without drafts."""
        return self._prices.at(n_ctx)[0][self._n_other] / (1 + self._n_other)

    def begin(self, n_ctx: int) -> None:
        """A new request."""
        self._n_other = 0
        self._depth = DEPTH
        self.budget.begin(self.plain_ms(n_ctx), self.draft_model.stake if self.has_draft_model else 0.0)
        self.trigger.begin()

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> Plan:
        """Best first over the trees of all requests, by marginal gain under t(n)."""
        cost, slope = self._prices.at(n_ctx)
        limit = max(0, min(limit, LARGEST - 1 - n_other))
        return Plan(cost[n_other : n_other + limit + 1], slope[n_other:], 1.0 + n_other)

    def plan(self, n_ctx: int, limit: int) -> Plan:
        """The rule for a step at `n_ctx` committed tokens with room for `limit` nodes, within the budget."""
        cost, n_other = self._prices.at(n_ctx)[0], self._n_other
        affordable = bisect_right(cost, cost[n_other] + self.budget.most) - 1 - n_other
        plan = self.joint_plan(n_ctx, min(limit, affordable), n_other)
        plan.budget = self.budget
        return plan

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree of the best expected rate, often empty; with other requests, what it can grow from."""
        self._n_other = at.n_other
        self._saving = 0.0
        self.budget.earn(self.plain_ms(at.n_ctx))
        if at.limit < 1:
            return Draft(DraftTree())
        wanted = self.looks_up(at, sources.repeats)
        forced = at.forced(()) if at.forced else ()
        if not wanted and not forced:
            return Draft(DraftTree(), skipped=True)
        begun = time.perf_counter()
        found = sources.rows(depth=self._depth) if wanted else []
        lookup_us = 1e6 * (time.perf_counter() - begun)
        self._found = bool(found)
        found = [*found, *forced]
        plan = self.plan(at.n_ctx, at.limit)
        ask = self._queries(sources.follower, plan, at.n_ctx) if sources.follower else None
        if at.n_other:
            growth = Growth(
                found,
                self.acceptance.estimate,
                len(plan.cost) - 1,
                at.leaves,
                ask,
                self.calibrator.calibrate,
                at.forced,
            )
            result, result.growth = growth.draft, growth
        else:
            result = draft(
                found,
                self.acceptance.estimate,
                plan.worth,
                at.limit,
                at.leaves,
                ask,
                self.calibrator.calibrate,
                at.forced,
            )
            result.tree = result.tree.cut(plan.best)
            if set(result.tree.source) != {GRAMMAR}:  # else the lookup has nothing to do with it
                self._saving = plan.saving
        result.lookup_us, result.skipped = (lookup_us, False) if wanted else (None, True)
        return result

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        """Whether to ask the sources in this step. `repeats`: as for `Sources`."""
        price = self.driver.lookup / self.plain_ms(at.n_ctx)
        self.watches_entropy = price > TEACHES and at.entropy_ms <= ENTROPY_SHARE * self.driver.lookup
        return self.trigger.wants(at.entropies, repeats, price)

    def _queries(self, follower: Follower, plan: Plan, n_ctx: int) -> DraftModelQueries | None:
        """For a draft model that follows the text."""
        saves_ms = max(LEAST_GAIN, self.draft_model.gain) * self.plain_ms(n_ctx)
        try:
            ready = follower.can_ask and follower.caught_up(saves_ms)
        except Exception as error:  # costs drafts, never an answer
            follower.model.give_up("failed", error)
            return None
        return DraftModelQueries(follower, plan, self.draft_model, self.budget.credit / 2) if ready else None

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Book the step, and note its proposals, which `tokens` decided, for `catch_up` to count."""
        if drafted.proposals:
            self._unlearned.append((drafted, tokens))
        if done.asked_ms:
            self.draft_model.learn(drafted.hits(tokens))
        self.book(done)

    def catch_up(self) -> None:
        """Count what was proposed in the newest steps, submitted or not."""
        for drafted, tokens in self._unlearned:
            self.acceptance.learn(drafted.outcomes(tokens))
            self.calibrator.learn(drafted.calibrations(tokens))
        self._unlearned.clear()

    def book(self, done: StepCost) -> None:
        """Charge what the draft cost beyond a plain step, credit what it saved; refine the curve and the driver."""
        nodes = done.n_nodes + done.n_other_nodes
        self._depth = LARGEST - 1 if done.n_accepted >= LONG_RUN else DEPTH
        if done.updates_curve:
            self.curve.observe(1 + done.n_other + nodes, done.n_ctx, done.decode_ms)
            self._prices.grow_old()  # with the pass, not with everyone in it
        if done.n_nodes or done.lookup_ms is None:
            self.driver.learn_step(done.n_nodes, done.driver_ms)
        else:
            self.driver.learn_lookup(done.lookup_ms)
        plain = self.plain_ms(done.n_ctx)
        saved = (self._saved(done) if done.n_nodes else 0.0) - done.asked_ms
        self.budget.settle(saved)
        if done.asked_ms:
            self.draft_model.learn_gain(saved / plain)
        if done.lookup_ms is not None:
            expected = max(saved, 0.0) if done.n_other else self._saving
            self.trigger.learn(expected / plain, self.driver.lookup / plain, self._found)

    def _saved(self, done: StepCost) -> float:
        """Milliseconds that this request's draft won for all of them; negative where it failed."""
        cost = self._prices.at(done.n_ctx)[0]
        nodes = done.n_nodes + done.n_other_nodes
        spent = min(done.decode_ms + done.driver_ms, OUTLIER_CLIP * cost[min(done.n_other + nodes, LARGEST - 1)])
        return done.n_accepted * self.plain_ms(done.n_ctx) - (spent - cost[done.n_other]) * done.n_nodes / nodes


class Prices:
    """Milliseconds of a step by its tokens, and the least slope from there: recomputed every few steps, 60 us."""

    def __init__(self, curve: CostCurve, driver: Driver) -> None:
        self._curve, self._driver = curve, driver
        self._refresh_in = 0
        self._bucket = -1
        self._found: tuple[list[float], list[float]] = ([], [])

    def grow_old(self) -> None:
        """A step was learned from."""
        self._refresh_in -= 1

    def at(self, n_ctx: int) -> tuple[list[float], list[float]]:
        """Both by tokens less one, [64], at so many tokens of context."""
        if self._bucket != n_ctx >> 7 or self._refresh_in <= 0:
            cost = self._curve.at(n_ctx) + self._driver.step
            cost[1:] += self._driver.tree + self._driver.NODE * np.arange(1, LARGEST)
            cost = np.minimum.accumulate(cost[::-1])[::-1]  # a size that costs more than a larger one is filled up
            rise = (cost[None, :] - cost[:, None]) / np.where(_GAPS > 0, _GAPS, 1)
            slope = np.where(_GAPS > 0, rise, np.inf).min(axis=1)
            self._found = (cost.tolist(), slope.tolist())
            self._bucket, self._refresh_in = n_ctx >> 7, REFRESH_STEPS
        return self._found


_GAPS = np.arange(LARGEST)[None, :] - np.arange(LARGEST)[:, None]
