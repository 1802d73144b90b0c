"""What a policy is: who decides, before each step, whether to look anything up and which tree to submit.

Contract: `fork` one for each request, `begin` with it, then for each step `draft` and, once the model has spoken,
`learn`. A policy owns its parameters and what it has learned; it knows nothing of llama.cpp, memory cells or text. One
module each: `off`, `auto`, `rest`, `sam`, `respec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rest_local.drafting.drafter import Draft
from rest_local.drafting.sources import Lookup

if TYPE_CHECKING:
    from typing_extensions import Self

NEWEST = 3  # tokens whose entropies are kept: ReSpec's trigger looks no further back


class Situation(NamedTuple):
    """What a policy may know before a step."""

    n_ctx: int  # tokens in the cells: what attention has to pass over
    limit: int  # most nodes that can be submitted; 0 where the model cannot verify any
    leaves: int  # most branches; 1 where only chains can be verified
    entropies: Sequence[float] = ()  # nats, of what gave the newest tokens, newest last; NEWEST at most
    beside: int = 0  # roots of other requests in the same forward pass


class StepCost(NamedTuple):
    """What one step did for one request, and took. `lookup_ms`, to ask the sources and, where nothing came of it, to
    find that out, is None where nobody was asked; `driver_ms` leaves it and the decode out. `decode_ms` is that of the
    whole forward pass, which also held `beside` roots and `nodes_beside` drafted tokens of other requests; of those who
    share it, one `leads`: the cost curve learns from its step only, and from none of a pass that also held a part of a
    prompt (`prompted`). `asked_ms` is what asking a draft model took, in none of the others.
    """

    n_ctx: int
    n_nodes: int
    n_accepted: int
    decode_ms: float
    driver_ms: float
    lookup_ms: float | None = None
    beside: int = 0
    nodes_beside: int = 0
    leads: bool = True
    asked_ms: float = 0.0
    prompted: bool = False


class Plan(Protocol):
    """A rule for growing one or many trees: asked before each node, in falling order of probability."""

    best: int  # nodes to submit, of those counted so far

    def worth(self, probability: float) -> bool: ...


class Policy(Protocol):
    """Not thread safe; one for each request, made by `fork` from the engine's own."""

    name: str
    watches_entropy: bool  # whether `Situation.entropies` is worth computing

    def fork(self) -> Policy:
        """One for another request, at the same time: what was learned is shared, what is owed is not."""
        ...

    def begin(self, n_ctx: int) -> None:
        """A new request of `n_ctx` prompt tokens."""

    def together(self, n_ctx: int, limit: int, beside: int) -> Plan | None:
        """The rule for `limit` nodes over the trees of 1 + `beside` requests; None: all that was drafted, while it
        fits.
        """
        ...

    def draft(self, sources: Lookup, at: Situation) -> Draft:
        """The tree to submit, at most `at.limit` nodes and `at.leaves` leaves; empty for a plain step."""
        ...

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """What the model said after this draft, whether submitted or not, and what the step took."""


class Stateless:
    """The part of a policy that learns nothing and prepares nothing."""

    watches_entropy = False

    def fork(self) -> Self:
        """Nothing is owed to any request."""
        return self

    def begin(self, n_ctx: int) -> None:
        """Nothing to prepare."""

    def together(self, n_ctx: int, limit: int, beside: int) -> Plan | None:
        """No rule but the room."""
        return None

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Nothing to learn."""
