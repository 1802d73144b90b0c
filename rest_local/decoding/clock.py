"""The times of a forward pass, and of the step that one sequence makes in it.

Contract: whatever a policy is told of time is made here (`StepClock.cost`), from what was measured where it happened.
"""

from __future__ import annotations

from dataclasses import dataclass

from rest_local.planning.policy import StepCost


@dataclass(slots=True)
class PassClock:
    """What is in a pass, and when it was begun to be put together, submitted (the decode that succeeded), and computed:
    seconds of `time.perf_counter`.
    """

    n_ctx: int  # tokens in the cells before it
    n_sequences: int  # that generate
    prompted: bool  # whether it holds a part of a prompt
    n_nodes: int = 0  # drafted tokens of all of them
    begun: float = 0.0
    submitting: float = 0.0
    submitted: float = 0.0
    ready: float = 0.0

    @property
    def decode_ms(self) -> float:
        return 1e3 * (self.ready - self.submitting)

    @property
    def batch_ms(self) -> float:
        """Building the batch, and submissions that failed: the share of one sequence."""
        return 1e3 * (self.submitting - self.begun) / self.n_sequences


@dataclass(slots=True)
class StepClock:
    """Milliseconds of the stages of one sequence's step, in the order in which they come."""

    draft: float = 0.0  # lookup, growth and pruning, without the draft model
    lookup: float | None = None  # the lookup alone; None where nothing was looked up
    model: float = 0.0  # the draft model: catching up with the text, and queries
    queries: float = 0.0  # the queries alone
    verify: float = 0.0  # verification, the cells, the sources
    late: float = 0.0  # learning, and what came after the pass: charged to the next step
    entropy: float = 0.0  # of `late`, computing entropies

    def begin(self) -> None:
        """A new step; what the one before left to be charged stays."""
        self.draft = self.model = self.queries = self.verify = 0.0
        self.lookup = None

    @property
    def own(self) -> float:
        """What this sequence took in the step, without its part of the pass."""
        return self.draft + self.verify + self.late

    def cost(self, done: PassClock, n_nodes: int, n_accepted: int, first: bool) -> StepCost:
        """What a policy learns from. `first`: of the sequences in the pass, the one that the cost curve learns from.

        A lookup that led to no draft is charged with all of drafting; otherwise growth is a part of what the draft
        costs. What a part of a prompt takes says nothing about steps without one.
        """
        lookup = self.lookup
        if lookup is not None:
            lookup = min(lookup, self.draft) if n_nodes else self.draft
        return StepCost(
            n_ctx=done.n_ctx,
            n_nodes=n_nodes,
            n_accepted=n_accepted,
            decode_ms=done.decode_ms,
            driver_ms=done.batch_ms + self.own - (lookup or 0.0),
            lookup_ms=lookup,
            n_other=done.n_sequences - 1,
            n_other_nodes=done.n_nodes - n_nodes,
            updates_curve=first and not done.prompted,
            query_ms=self.queries,
            prompted=done.prompted,
        )
