"""When a draft model is asked in a step: as long as what it is likely to add is worth its time.

Contract: a question costs a pass of the draft model and, if it is followed, a node in the batch. It is worth asking
below a node where the joint probability of that node, times how often the draft model's first candidate was right
beyond what is known there already, exceeds that price at the best rate of tokens a millisecond so far: the rule by
which nodes are added (`rest_local.planning.auto.Plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rest_local.drafting.draft_model import DraftModelSequence, Likely

if TYPE_CHECKING:
    from rest_local.planning.auto import Plan

STAKE = 4.0
LEAST_GAIN = 0.02  # plain steps a step: what a draft model that has lost so far is still expected to save
_FOLLOW = 0.05


@dataclass
class DraftModelStats:
    """What is known of a draft model: how often its first candidate was right, and what it saved a step, in plain steps
    (one step in three, until anything is known).
    """

    right: float = 0.6
    gain: float = 0.3

    @property
    def stake(self) -> float:
        """Plain steps that a new request may lose to it: who gave a draft model wants it tried, at once and not after
        the steps that would earn the first draft; but a STAKE at most, and less the less it saves.
        """
        return STAKE * max(0.0, min(self.gain / DraftModelStats.gain, 1.0))

    def learn(self, hits: Iterable[bool]) -> None:
        for hit in hits:
            self.right += _FOLLOW * (hit - self.right)

    def learn_gain(self, steps: float) -> None:
        self.gain += _FOLLOW * (max(-1.0, min(steps, 4.0)) - self.gain)


class DraftModelQueries:
    """The questions of one step. `purse`: milliseconds that they may take."""

    def __init__(self, follower: DraftModelSequence, plan: Plan, trust: DraftModelStats, purse: float) -> None:
        self._follower, self._plan, self._trust = follower, plan, trust
        self._purse = purse

    def __call__(self, path: Sequence[int], joint: float, known: float) -> Sequence[Likely]:
        """What follows `path`, of joint probability `joint`, or nothing where it is not worth asking."""
        price = self._follower.model.pass_ms
        if price > self._purse or not self._plan.pays(joint * (self._trust.right - known), price):
            return ()
        self._purse -= price
        try:
            return self._follower.ask(path)
        except Exception as error:  # costs drafts, never an answer
            self._follower.model.give_up("failed", error)
            return ()
