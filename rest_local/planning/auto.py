"""The policy `auto`: when to draft and how much by expected gain over measured cost, never by a fixed habit.

Contract: before a step, `looks_up` says whether a lookup can be afforded and `plan` gives a rule for growing the tree
and then the number of nodes worth submitting; `draft` does both; after the step, `learn` takes what happened. The rule
(DESIGN.md section 6): stop at the n that maximises (1 + expected accepted) / t(n + 1), where n = 0 is plain decoding.

That drafting is never slower than plain decoding is kept by an account (`rest_local.planning.account`): no draft may
cost more than it holds.
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rest_local.drafting.candidates import SOURCE_NUMBER
from rest_local.drafting.draft_model import Follower
from rest_local.drafting.drafter import Draft, Growth, draft
from rest_local.drafting.sources import DEPTH, Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.account import Account
from rest_local.planning.cost import LARGEST, CostCurve
from rest_local.planning.policy import Situation, StepCost
from rest_local.planning.questions import LEAST_GAIN, Questions, Trust
from rest_local.planning.wording import Wording

REFRESH_STEPS = 16  # how often the cost table follows what was learned

REST_STEPS = 7  # keeping the books takes 40 us behind a forward pass, a tenth of the step of a small model
LEARN_STEPS = 4  # that are learned from together: each alone, behind a forward pass, costs twice as much
WORDS_MS = 2.0  # words take 0.06 ms a draft; of a quicker step that is more than they are worth
LONG_MATCH = 16  # tokens that agree with stored text: its draft may be paid in advance
_STORED = {SOURCE_NUMBER["datastore"], SOURCE_NUMBER["history"]}
LONG_RUN = 12  # after as many accepted tokens in one step, the next draft may be as long as a batch
MOST_AFTERMATH = 0.3  # milliseconds; more is the machine, not the draft
HICCUP = 2.0  # what is booked is at most so many times what was expected: a busy machine slows plain steps down as well
MARGIN = 1.02  # a draft must promise this much more than plain decoding


@dataclass
class Driver:
    """What the driver itself costs a step, in milliseconds, learned from real steps."""

    lookup: float = 0.15  # asking the sources in vain
    step: float = 0.05  # any step: batch, sampling, bookkeeping
    tree: float = 0.08  # a step with a draft, more than that
    aftermath: float = 0.1  # a step without a draft behind one with: another graph for llama.cpp, cold caches
    NODE = 0.014  # and by drafted node: growing, laying out and walking

    def learn_lookup(self, ms: float) -> None:
        self.lookup = _follow(self.lookup, ms)

    def learn_aftermath(self, ms: float) -> None:
        """`ms`: what such a step took longer than usual, below 0 where less."""
        ms = min(max(ms, -MOST_AFTERMATH), MOST_AFTERMATH)
        self.aftermath = max(0.0, self.aftermath + 0.05 * (ms - self.aftermath))

    def learn_step(self, n_nodes: int, ms: float) -> None:
        if n_nodes:
            self.tree = _follow(self.tree, max(0.01, ms - self.step - self.NODE * n_nodes))
        else:
            self.step = _follow(self.step, ms)


def _follow(now: float, ms: float) -> float:
    """Move a twentieth towards `ms`; one hiccup of the machine counts as four times the usual at most."""
    return now + 0.05 * (min(max(ms, 0.0), 4 * now) - now)


@dataclass(slots=True)
class Plan:
    """A rule for one step. `worth` is asked by the drafter before each node; `best` is the number of nodes to
    submit.
    """

    cost: list[float]  # milliseconds of a step with n drafted nodes, n = 0..limit
    slope: list[float]  # least milliseconds a further node can cost from here
    sure: float = 1.0  # tokens that the step gives without any of them: one for each request
    best: int = 0
    expected: float = 0.0
    best_rate: float = field(init=False)
    _grown: int = 0

    def __post_init__(self) -> None:
        self.best_rate = MARGIN * self.sure / self.cost[0]

    def worth(self, probability: float) -> bool:
        """Count a node of this joint probability in, and say whether growth should go on to it. Constant time."""
        if self._grown + 1 >= len(self.cost) or probability <= self.best_rate * self.slope[self._grown]:
            return False
        self._grown += 1
        self.expected += probability
        rate = (self.sure + self.expected) / self.cost[self._grown]
        if rate >= self.best_rate:
            self.best, self.best_rate = self._grown, rate
        return True

    def pays(self, gain: float, ms: float) -> bool:
        """Whether `gain` more tokens are worth a further node and `ms` more. `slope` knows sizes that this step cannot
        afford: growth stops there by itself, but the milliseconds would be gone.
        """
        grown, now = self._grown, self.cost[self._grown]
        further = [(cost - now) / n for n, cost in enumerate(self.cost[grown + 1 :], 1)]
        return bool(further) and gain > self.best_rate * (ms + min(further))


class Auto:
    """Owns the acceptance estimates, what corrects them, and the account, and refines the cost curve. Its forks, one
    for each request, share all but the account. Not thread safe.

    With other requests in the same forward pass, a plain step's price is their share of it, a draft's is what it adds
    to it. The sum over the requests is then the time that all of them lost or won.
    """

    name = "auto"
    watches_entropy = False

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.acceptance = Acceptance()
        self.wording = Wording()
        self.driver = Driver()
        self.account = Account()
        self.has_draft_model = False
        self.trust = Trust()  # in it
        self._prices = Prices(curve, self.driver)
        self._beside = 0  # roots of others in the step under way
        self._depth = DEPTH
        self._unlearned: list[tuple[Draft, Sequence[int]]] = []  # of all requests
        self._rests = 0  # steps to come that are neither asked nor booked
        self._unearned = 0  # such steps since the last one that was
        self._resting = False  # whether the step under way is one
        self._share: float | None = None  # of the nodes in the newest pass, this request's; None where it had none
        self._behind: float | None = None  # the same of the pass before it

    def fork(self) -> Auto:
        """One for another request, with an account of its own."""
        other = copy.copy(self)
        other.account = Account(self.account.record)
        return other

    def plain_ms(self, n_ctx: int) -> float:
        """This request's share of a step in which nobody drafts."""
        return self._prices.at(n_ctx)[0][self._beside] / (1 + self._beside)

    def begin(self, n_ctx: int) -> None:
        """A new request."""
        self._beside = 0
        self.account.begin(self.plain_ms(n_ctx), self.trust.stake if self.has_draft_model else 0.0)
        self._depth = DEPTH
        self._rests = self._unearned = 0
        self._share, self._behind = 0.0, None  # its first step stands behind the prompt: as dear as behind a draft

    def together(self, n_ctx: int, limit: int, beside: int) -> Plan:
        """Best first over the trees of all requests, by marginal gain under t(n)."""
        cost, slope = self._prices.at(n_ctx)
        limit = max(0, min(limit, LARGEST - 1 - beside))
        return Plan(cost[beside : beside + limit + 1], slope[beside:], 1.0 + beside)

    def draft(self, sources: Lookup, at: Situation) -> Draft:
        """The tree of the best expected rate, often empty; beside other requests, what it can grow from."""
        self._beside = at.beside
        self._resting = self._rests > 0
        if self._resting:
            self._rests -= 1
            self._unearned += 1
            return Draft(DraftTree())
        if at.limit < 1:  # nobody may draft, beside a part of a prompt say: not that there was nothing to be found
            self._unearned += 1
            self._resting = self._unearned % (1 + REST_STEPS) > 0  # where it is always so, keep books as seldom
            return Draft(DraftTree())
        if not self.looks_up(at.n_ctx, sources.repeats):
            self._rests = REST_STEPS
            return Draft(DraftTree())
        begun = time.perf_counter()
        found = sources.rows(depth=self._depth)
        lookup_us = 1e6 * (time.perf_counter() - begun)
        for_questions = self.account.risk / 2
        if any(rows.match[0] >= LONG_MATCH and rows.source in _STORED for rows in found):
            self.account.overdraw()
        plan = self.plan(at.n_ctx, at.limit)
        ask = self._questions(sources.follower, plan, at.n_ctx, for_questions) if sources.follower else None
        judge = self.wording.judge if plan.cost[0] >= WORDS_MS else None
        if at.beside:
            growth = Growth(found, self.acceptance.estimate, len(plan.cost) - 1, at.leaves, ask, judge)
            result, result.growth = growth.draft, growth
        else:
            result = draft(found, self.acceptance.estimate, plan.worth, at.limit, at.leaves, ask, judge)
            result.tree = result.tree.cut(plan.best)
        result.lookup_us = lookup_us
        return result

    def _questions(self, follower: Follower, plan: Plan, n_ctx: int, most_ms: float) -> Questions | None:
        """For a draft model that follows the text; `most_ms` may go into asking it."""
        saves_ms = max(LEAST_GAIN, self.trust.gain) * self.plain_ms(n_ctx)
        try:
            ready = follower.can_ask and follower.caught_up(saves_ms)
        except Exception as error:  # costs drafts, never an answer
            follower.model.give_up("failed", error)
            return None
        return Questions(follower, plan, self.trust, most_ms) if ready else None

    def looks_up(self, n_ctx: int, repeats: Callable[[], bool]) -> bool:
        """Whether this step can afford a lookup; `repeats` says whether a long repeat ends here. A no is followed by
        REST_STEPS steps that do not ask.
        """
        self.account.earn(self.plain_ms(n_ctx), 1 + self._unearned)
        self._unearned = 0
        return self.account.affords_lookup(self.driver.lookup, repeats)

    def plan(self, n_ctx: int, limit: int) -> Plan:
        """The rule for a step at `n_ctx` committed tokens with room for `limit` nodes.

        No draft may cost more than the account holds: a request starts with small drafts and earns its long ones.
        """
        beside = self._beside
        cost = self._prices.at(n_ctx)[0]
        stake = self.account.risk - self.driver.lookup - self.driver.aftermath
        affordable = bisect_right(cost, cost[beside] + stake) - 1 - beside
        return self.together(n_ctx, min(limit, affordable), beside)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Count every proposal that `tokens` decided, and book the step."""
        nodes = done.n_nodes + done.nodes_beside
        self._behind, self._share = self._share, done.n_nodes / nodes if nodes else None
        if self._resting:
            return
        if drafted.proposals:
            self._unlearned.append((drafted, tokens))
            if len(self._unlearned) >= LEARN_STEPS:
                self._catch_up()
        if done.asked_ms:
            self.trust.learn(drafted.hits(tokens))
        self.book(done)

    def _catch_up(self) -> None:
        """Learn from the newest steps."""
        for drafted, tokens in self._unlearned:
            self.acceptance.learn(drafted.outcomes(tokens))
            self.wording.learn(drafted.judgements(tokens))
        self._unlearned.clear()

    def book(self, done: StepCost) -> None:
        """Book what a step cost beyond a plain one and what it saved; refine the curve and the driver's own cost."""
        self._depth = LARGEST - 1 if done.n_accepted >= LONG_RUN else DEPTH
        nodes = done.n_nodes + done.nodes_beside
        after_ms = self._aftermath(done) if self._behind is not None and not nodes and not done.prompted else 0.0
        if done.leads:
            self.curve.observe(1 + done.beside + nodes, done.n_ctx, max(done.decode_ms - after_ms, done.decode_ms / 2))
            self._prices.grow_old()  # with the pass, not with everyone in it
        if done.n_nodes or (done.lookup_ms is None and not after_ms):
            self.driver.learn_step(done.n_nodes, done.driver_ms)
        if done.lookup_ms is not None:
            self.account.pay_lookup(min(done.lookup_ms, HICCUP * self.driver.lookup))
            if not done.n_nodes:
                self.driver.learn_lookup(done.lookup_ms)
        if done.n_nodes or done.asked_ms:
            saved = (self._saved(done) if done.n_nodes else 0.0) - done.asked_ms
            self.account.settle(saved)
            if done.asked_ms:
                self.trust.learn_gain(saved / self.plain_ms(done.n_ctx))

    def _aftermath(self, done: StepCost) -> float:
        """Book what a pass without a draft takes longer behind one with: its drafts' doing, by their shares of it."""
        if done.leads:
            usual = self._prices.at(done.n_ctx)[0][done.beside] - self.driver.step
            self.driver.learn_aftermath(done.decode_ms - usual)
        self.account.settle(-(self._behind or 0.0) * self.driver.aftermath)
        return self.driver.aftermath

    def _saved(self, done: StepCost) -> float:
        """Milliseconds that this request's draft won for all of them; negative where it failed."""
        cost = self._prices.at(done.n_ctx)[0]
        nodes = done.n_nodes + done.nodes_beside
        spent = min(done.decode_ms + done.driver_ms, HICCUP * cost[min(done.beside + nodes, LARGEST - 1)])
        return done.n_accepted * self.plain_ms(done.n_ctx) - (spent - cost[done.beside]) * done.n_nodes / nodes


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
