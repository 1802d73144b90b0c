"""What a policy is: who decides, before each step, whether to look anything up and which tree to submit.

Contract: `begin` with a request, then for each step `draft` and, once the model has spoken, `learn`. A policy owns its
parameters and what it has learned; it knows nothing of llama.cpp, memory cells or text. One module each: `off`, `auto`,
`rest`, `sam`, `respec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup

NEWEST = 3  # tokens whose entropies are kept: ReSpec's trigger looks no further back


@dataclass(frozen=True)
class Situation:
    """What a policy may know before a step."""

    n_ctx: int  # committed tokens
    limit: int  # most nodes that can be submitted; 0 where the model cannot verify any
    leaves: int  # most branches; 1 where only chains can be verified
    entropies: Sequence[float] = ()  # nats, of what gave the newest tokens, newest last; NEWEST at most


@dataclass(frozen=True)
class StepCost:
    """What one step did and took. `lookup_ms`, to ask the sources and grow the tree, is None where nobody was asked;
    `driver_ms` leaves it and the decode out.
    """

    n_ctx: int
    n_nodes: int
    n_accepted: int
    decode_ms: float
    driver_ms: float
    lookup_ms: float | None = None


class Policy(Protocol):
    """Not thread safe; one per engine."""

    name: str
    watches_entropy: bool  # whether `Situation.entropies` is worth computing

    def begin(self, n_ctx: int) -> None:
        """A new request of `n_ctx` prompt tokens."""

    def draft(self, sources: Lookup, at: Situation) -> Draft:
        """The tree to submit, at most `at.limit` nodes and `at.leaves` leaves; empty for a plain step."""
        ...

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """What the model said after this draft, whether submitted or not, and what the step took."""


class Stateless:
    """The part of a policy that learns nothing and prepares nothing."""

    watches_entropy = False

    def begin(self, n_ctx: int) -> None:
        """Nothing to prepare."""

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Nothing to learn."""
