"""The interface of a policy, which decides before each step whether to make a lookup and which tree to submit.

- `fork` makes the policy of a request, `begin` starts the request.
- For each step the engine calls `draft` and, after the forward pass, `learn`. It calls `catch_up` later, possibly after
  the next `draft`.
- A policy owns its parameters and what it has learned. It knows nothing about llama.cpp, the KV cache or text.

`off` is in this module, `auto` and `policies` hold the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rest_local.calibration.cost import LARGEST
from rest_local.drafting.sources import NO_BIGRAM, Lookup, PrecedingBigram
from rest_local.drafting.tree import Draft, DraftTree, Force

if TYPE_CHECKING:
    from typing_extensions import Self

NOTHING = Draft(DraftTree())  # The draft of every step that drafts nothing and looks nothing up. It is never changed.
NEWEST = 3  # So many entropies of the newest tokens are kept: ReSpec's trigger looks no further back.


class Checkpoint(NamedTuple):
    """The extra cost of a draft of more than `free` nodes, which cannot be taken back without a checkpoint.

    `ms` is the time of one, and of going back to it times how often that was needed (`rejected`). Then `again` tokens
    were evaluated again.
    """

    free: int
    ms: float = 0.0
    rejected: float = 0.0
    again: float = 0.0


NO_CHECKPOINT = Checkpoint(LARGEST)


class StepContext(NamedTuple):
    """The facts that a policy has before a step.

    - `n_ctx`: tokens in the KV cache, which attention reads.
    - `limit`: most nodes that can be submitted, 0 if the model cannot verify any; `leaves`: most branches, 1 if only
      chains can be verified.
    - `entropies`: those of the distributions of the newest tokens in nats, newest last, NEWEST at most, if the policy
      watches them.
    - `n_other`: roots of other requests in the same forward pass.
    - `forced`: tells what the grammar of the request allows only one way.
    - `newest`: the two newest tokens, the root last.
    - `n_again`: tokens that the pass evaluates again, for drafts that were rejected before.
    - `checkpoint`: what a longer draft needs.
    """

    n_ctx: int
    limit: int
    leaves: int
    entropies: Sequence[float] = ()
    n_other: int = 0
    forced: Force | None = None
    newest: PrecedingBigram = NO_BIGRAM
    n_again: int = 0
    checkpoint: Checkpoint = NO_CHECKPOINT


class StepCost(NamedTuple):
    """The record of one step for one request, and how long it took, in milliseconds.

    - `lookup_ms`: the lookup and, if nothing was submitted, all drafting; None without a lookup.
    - `driver_ms`: the rest of the driver's time, without the decode.
    - `decode_ms`: the whole forward pass, which also evaluates `n_other` roots and `n_other_nodes` drafted tokens of
      other requests.
    - `updates_curve`: the cost curve learns from one request of each pass.
    - `prompted`: the pass also evaluates a part of a prompt; the cost curve does not learn from it.
    - `n_again`: tokens that this request has evaluated again because a draft was rejected; `n_other_nodes` has those of
      others. `checkpoint_ms`: its checkpoint, and going back to it, which no other time includes.
    - `query_ms`: queries to a draft model, which none of the other times include.
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
    query_ms: float = 0.0
    prompted: bool = False
    n_again: int = 0
    checkpoint_ms: float = 0.0


class Policy:
    """A base that drafts nothing and learns nothing. Not thread safe; one for each request, made by `fork` from the
    engine's own.
    """

    name: str
    watches_entropy = False  # True if it decides by `StepContext.entropies`, which take 0.05 ms for 152k tokens.

    def fork(self) -> Self:
        """Make the policy of another request. Forks share what is learned, but not the budget. One that holds nothing
        of a request is its own fork.
        """
        return self

    def begin(self, n_ctx: int) -> None:
        """Start a new request of `n_ctx` prompt tokens."""

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Return the tree to submit, at most `at.limit` nodes and `at.leaves` leaves; empty for a plain step."""
        return NOTHING

    def grow_together(self, drafts: Sequence[Draft], n_ctx: int, limit: int, n_other: int) -> tuple[Sequence[int], int]:
        """Grow the trees of drafts with a `growth` to `limit` nodes in total, in a pass of 1 + `n_other` requests.

        Returns the number of the draft that each node was added to, and how many of these nodes to submit. Raises
        TreeFailed.
        """
        return (), 0

    def prepare(self, sources: Lookup, at: StepContext, tokens: Sequence[int]) -> None:
        """Make the next draft while the step of the last one, which was made with `at`, is computed, for the case that
        it gives `tokens`. If it does, `draft` returns what it would have returned otherwise, sooner.
        """

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Learn from the `tokens` that the model generated after this draft, submitted or not, and from the step's
        times. The next forward pass waits for this call, so anything over some 10 us is left to `catch_up`.
        """

    @property
    def free_steps(self) -> int:
        """Return how many steps of one token may follow the last `draft`, which was empty, without another one."""
        return 0

    def learn_free(self, steps: Sequence[StepCost]) -> None:
        """Learn from such steps."""

    def catch_up(self) -> None:
        """Do the part of learning that can wait. It is called once after each `learn`, on any fork. On a GPU it is
        called after the next `draft`, while the device computes.
        """


class Off(Policy):
    """The policy `off`: plain decoding without lookups."""

    name = "off"

    @property
    def free_steps(self) -> int:
        """Return a number without meaning: no step has anything to decide."""
        return sys.maxsize
