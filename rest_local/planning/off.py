"""The policy `off`: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.policy import Situation, StepCost


class Off:
    """Never looks anything up."""

    name = "off"
    watches_entropy = False

    def begin(self, n_ctx: int) -> None:
        """Nothing to prepare."""

    def draft(self, sources: Lookup, at: Situation) -> Draft:
        """The empty tree."""
        return Draft(DraftTree())

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Nothing to learn."""
