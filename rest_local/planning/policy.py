"""What a policy is: who decides, before each step, whether to look anything up and which tree to submit.

Contract: `fork` one for each request, `begin` with it, then for each step `draft` and, once the model has spoken,
`learn`. `catch_up` comes later, perhaps after the next `draft`. A policy owns its parameters and what it has learned;
it knows nothing of llama.cpp, memory cells or text. One module each: `off`, `auto`, `rest`, `sam`, `respec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rest_local.drafting.drafter import Draft, Force
from rest_local.drafting.sources import Lookup

if TYPE_CHECKING:
    from typing_extensions import Self

NEWEST = 3  # tokens whose entropies are kept: ReSpec's trigger looks no further back


class StepContext(NamedTuple):
    """What a policy may know before a step."""

    n_ctx: int  # tokens in the cells: what attention has to pass over
    limit: int  # most nodes that can be submitted; 0 where the model cannot verify any
    leaves: int  # most branches; 1 where only chains can be verified
    entropies: Sequence[float] = ()  # nats, of what gave the newest tokens, newest last; NEWEST at most
    n_other: int = 0  # roots of other requests in the same forward pass
    entropy_ms: float = 0.0  # that computing entropies held up the last step; 0 where a device computes meanwhile
    forced: Force | None = None  # where the request has a grammar


class StepCost(NamedTuple):
    """What one step did for one request, and how long it took, in milliseconds.

    `lookup_ms`: the lookup and, where nothing was submitted, all drafting; None without a lookup. `driver_ms`: the rest
    of the driver's time, without the decode. `decode_ms`: the whole forward pass, which also held `n_other` roots and
    `n_other_nodes` drafted tokens of other requests. The cost curve learns from the one request of a pass whose
    `updates_curve` is set, and from no pass that held a part of a prompt (`prompted`). `asked_ms`: queries to a draft
    model, in none of the others.
    """

    n_ctx: int
    n_nodes: int
    n_accepted: int
    decode_ms: float
    driver_ms: float
    lookup_ms: float | None = None
    n_other: int = 0
    n_other_nodes: int = 0
    updates_curve: bool = True
    asked_ms: float = 0.0
    prompted: bool = False


class Plan(Protocol):
    """A rule for growing one or many trees: asked before each node, in falling order of probability."""

    best: int  # nodes to submit, of those counted so far

    def worth(self, probability: float) -> bool: ...


class Policy(Protocol):
    """Not thread safe; one for each request, made by `fork` from the engine's own."""

    name: str
    watches_entropy: bool  # whether `StepContext.entropies` is worth computing

    def fork(self) -> Policy:
        """One for another request, at the same time: what was learned is shared, what is owed is not."""
        ...

    def begin(self, n_ctx: int) -> None:
        """A new request of `n_ctx` prompt tokens."""

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> Plan | None:
        """The rule for `limit` nodes over the trees of 1 + `n_other` requests; None: all that was drafted, while it
        fits.
        """
        ...

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree to submit, at most `at.limit` nodes and `at.leaves` leaves; empty for a plain step."""
        ...

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """What the model said after this draft, whether submitted or not, and what the step took. The next forward pass
        waits for it: what needs more than some 10 us is noted, and left to `catch_up`.
        """

    def catch_up(self) -> None:
        """The part of learning that can wait. Once after each `learn`, of any fork; on a device that computes by
        itself, after the next `draft`, while it computes.
        """


class Stateless:
    """The part of a policy that learns nothing and prepares nothing."""

    watches_entropy = False

    def fork(self) -> Self:
        """Nothing is owed to any request."""
        return self

    def begin(self, n_ctx: int) -> None:
        """Nothing to prepare."""

    def joint_plan(self, n_ctx: int, limit: int, n_other: int) -> Plan | None:
        """No rule but the room."""
        return None

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Nothing to learn."""

    def catch_up(self) -> None:
        """Nothing was noted."""
