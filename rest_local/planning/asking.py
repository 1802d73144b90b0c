"""When a drafting model is asked, and for how much: its passes are part of the price of a draft.

- A pass costs time and, if its tokens are drafted, nodes in the batch. It is worth that if the tokens that it is likely
  to add pay for it at the best rate of tokens per millisecond so far. At one path, it adds the joint probability of the
  path, times how much more often the model's first candidate is right than what is known there already.
- One pass serves all open paths of all requests. A further path is added to it if it pays for its row.
- A request loses at most half of its credit to passes in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rest_local.drafting.growth import Asker, Question
from rest_local.drafting.models.seam import Drafter, Query
from rest_local.planning.plan import Plan

INITIAL_CREDIT = 4.0  # plain steps that a new request may lose to a drafting model
INITIAL_GAIN = 0.3  # plain steps that it is expected to save in each step, until anything is measured
LEAST_GAIN = 0.02  # plain steps per step: the saving that is still expected of a drafting model that has lost so far
DEPTHS = 8  # depths whose first candidates are counted apart; the last counter holds all deeper ones
INITIAL_RIGHT = 0.6
STRENGTH = 8.0  # answers that the depth above counts for
_SMOOTHING = 0.05


@dataclass
class ModelStats:
    """What is known of a drafting model: how often its first candidate was right, by depth, and its saving per step,
    in plain steps.
    """

    right: list[float] = field(default_factory=lambda: [INITIAL_RIGHT] * DEPTHS)
    seen: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    gain: float = INITIAL_GAIN

    @property
    def initial_credit(self) -> float:
        """Plain steps that a new request may lose to the model. The user who loads one wants it tried at once, not
        after the steps that would earn the first draft. INITIAL_CREDIT at most, and less the less it saves.
        """
        return INITIAL_CREDIT * max(0.0, min(self.gain / INITIAL_GAIN, 1.0))

    def promise(self, depth: int) -> float:
        """How often its first candidate is right, `depth` tokens below the root. A depth that was seen seldom counts
        little against the one above it, so that a good model is asked deeper than before.
        """
        promised = INITIAL_RIGHT
        for right, seen in zip(self.right[: depth + 1], self.seen, strict=False):
            promised += (right - promised) * seen / (seen + STRENGTH)
        return promised

    def learn(self, hits: Iterable[tuple[int, bool]]) -> None:
        """Count (depth, whether the first candidate was right)."""
        for depth, hit in hits:
            at = min(depth, DEPTHS - 1)
            self.seen[at] += 1
            self.right[at] += max(_SMOOTHING, 1 / self.seen[at]) * (hit - self.right[at])

    def learn_gain(self, steps: float) -> None:
        """A step in which it was asked saved so many plain steps; negative if it lost."""
        self.gain += _SMOOTHING * (max(-1.0, min(steps, 4.0)) - self.gain)


class Asking:
    """The passes of one step. A call asks the open questions in one pass, or returns False where that does not pay."""

    def __init__(self, drafter: Drafter, plan: Plan, stats: ModelStats, askers: Sequence[Asker]) -> None:
        self._drafter, self._plan, self._stats = drafter, plan, stats
        self._askers = list(askers)
        self._left = [asker.most_ms for asker in askers]

    def __call__(self) -> bool:
        """Takes the time of the pass; about 10 us for each question without it."""
        drafter = self._drafter
        if drafter.failed:
            return False
        chosen = self._choose()
        if not chosen:
            return False
        try:
            answers = drafter.answer([Query(self._askers[who].text, question.path) for who, question in chosen])
        except Exception as error:  # costs drafts, never an answer
            drafter.give_up("failed", error)
            return False
        for (who, question), likely in zip(chosen, answers, strict=True):
            self._askers[who].growth.answered(question.number, likely)
        return True

    def _choose(self) -> list[tuple[int, Question]]:
        """The questions of the next pass, by request; none if it is not worth its time."""
        questions = [
            (self._gain(question), who, question)
            for who, asker in enumerate(self._askers)
            for question in asker.growth.questions()
        ]
        questions.sort(key=lambda each: -each[0])
        drafter, plan = self._drafter, self._plan
        row_ms = drafter.pass_ms(2) - drafter.pass_ms(1)
        total, passes = 0.0, 1
        chosen: list[tuple[int, Question]] = []
        for gain, who, question in questions:
            own = self._askers[who].text.passes(question.path)
            needed = max(passes, own)
            if not own or (chosen and not plan.pays(gain, row_ms + (needed - passes) * drafter.pass_ms(1))):
                continue
            if gain <= 0.0:
                break
            total += gain
            passes = needed
            chosen.append((who, question))
        price = passes * drafter.pass_ms(len(chosen))
        requests = {who for who, _ in chosen}
        if not chosen or not plan.pays(total, price, len(chosen)):
            return []
        share = price / len(requests)
        if any(share > self._left[who] for who in requests):
            return []
        for who in requests:
            self._left[who] -= share
        plan.spend(price)
        return chosen

    def _gain(self, question: Question) -> float:
        """Tokens that an answer is likely to add."""
        return question.joint * (self._stats.promise(len(question.path)) - question.known)
