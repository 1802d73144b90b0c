"""The policy `off`: plain decoding."""

from __future__ import annotations

from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import DraftTree
from rest_local.planning.policy import Stateless, StepContext


class Off(Stateless):
    """Never looks anything up."""

    name = "off"

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The empty tree."""
        return Draft(DraftTree())
