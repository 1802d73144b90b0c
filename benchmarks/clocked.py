"""Decoding on a simulated clock: real drafts and a real verification, with the milliseconds of another machine.

Each forward pass of the target takes what a cost curve says, and each pass of a drafting head a share of that, for as
many tokens as it had. The driver and a lookup take fixed times. The planner sees these times, too, so it plans for that
machine. With `Said`, all setups have the same text. Reading rows of logits is not charged: 0.01 ms a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.candidates import SourceRows
from rest_local.drafting.growth import Draft
from rest_local.drafting.models.heads import Head
from rest_local.drafting.models.seam import Likely, PassTimes, Query
from rest_local.drafting.recycled import SuccessorTable
from rest_local.drafting.sources import Lookup
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext, StepCost

DRIVER_MS, LOOKUP_MS = (0.05, 0.15), 0.1  # of a plain step, of one with a draft; of a lookup


@dataclass(frozen=True)
class Setup:
    """What drafts for which target."""

    name: str
    target: str  # "demo" or "mimo2"
    retrieval: bool = False
    head: bool = False
    logits: bool = False

    @property
    def engine(self) -> str:
        """The name of its engine: without a head the target computes no features for it."""
        return f"{self.target} {'with' if self.head else 'without'} a head"


class Said:
    """A chooser that says a recorded answer, whatever the logits are."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer, self._at = answer, 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        return self._answer[self._at]

    def accept(self, token: int) -> None:
        """Go on."""
        self._at += 1

    def close(self) -> None:
        """Do nothing."""


class Unsearched:
    """Sources in which nothing is found."""

    def __init__(self, sources: Lookup) -> None:
        self.draft_text = sources.draft_text

    def rows(self, limit: int | None = None, depth: int = 0, only: Container[str] = ()) -> list[SourceRows]:
        return []

    def repeats(self, n: int = 0) -> bool:
        return False


class Chosen(Auto):
    """`auto` with some of its sources."""

    def __init__(self, curve: CostCurve, setup: Setup, n_vocab: int, head: Any = None) -> None:
        super().__init__(curve)
        self.setup = setup
        self.drafter = head
        self.successors = SuccessorTable(n_vocab) if setup.logits else None

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """From the sources of the setup."""
        return super().draft(sources if self.setup.retrieval else cast(Lookup, Unsearched(sources)), at)

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        """Never for a head alone. The table of logits is read where a lookup is made."""
        if self.setup.retrieval or self.setup.logits:
            return super().looks_up(at, repeats)
        self.watches_entropy = False
        return False


class Clock:
    """Simulated milliseconds of one engine: `curve` for the target, `share` of it for the passes of `head`."""

    def __init__(self, curve: CostCurve, share: float, head: Head | None = None) -> None:
        self.curve, self.share, self.head = curve, share, head
        self.ms = self.head_ms = 0.0  # of the run
        self._unpaid = 0.0  # of passes of the head in this step
        self.times = PassTimes(self.pass_ms(1), (self.pass_ms(4) - self.pass_ms(1)) / 3)
        self.times.learn = lambda n, ms: None  # type: ignore[method-assign]

    def pass_ms(self, n: int) -> float:
        """Of a pass of `n` tokens of the head."""
        if not self.share:
            return 0.0
        ms = self.curve.at(0)[min(n, LARGEST) - 1] * max(n / LARGEST, 1.0)
        return float(self.share * ms)

    def __enter__(self) -> Clock:
        """Charge every decode of the head, and let it plan with these times."""
        self.ms = self.head_ms = self._unpaid = 0.0
        if (head := self.head) is not None:
            self._saved, decode = (head.times, head.context.decode), head.context.decode

            def charged() -> int:
                self._unpaid += self.pass_ms(head.context.batch.n_tokens)
                return decode()

            head.times, head.context.decode = self.times, charged  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self.head is not None:
            self.head.times, self.head.context.decode = self._saved  # type: ignore[method-assign]

    @property
    def unpaid(self) -> float:
        """Milliseconds of the head since the last `step`."""
        return self._unpaid

    def step(self, done: StepCost, query_ms: float) -> StepCost:
        """What the step of a request costs by this clock."""
        line = self.curve.at(done.n_ctx)
        lookup = None if done.lookup_ms is None else LOOKUP_MS
        result = done._replace(
            decode_ms=float(line[done.n_nodes]),
            driver_ms=DRIVER_MS[done.n_nodes > 0],
            lookup_ms=lookup,
            query_ms=query_ms,
            updates_curve=False,
        )
        self.ms += result.decode_ms + result.driver_ms + (lookup or 0.0) + self._unpaid
        self.head_ms += self._unpaid
        self._unpaid = 0.0
        return result

    def plain_ms(self, n_ctx: int, n_tokens: int) -> float:
        """Of so many plain steps."""
        return sum(float(self.curve.at(n_ctx + i)[0]) + DRIVER_MS[0] for i in range(n_tokens))


class Charged:
    """A head whose passes a policy pays by a clock. `query_ms`: of the answers since it was last set to 0."""

    def __init__(self, head: Head, clock: Clock) -> None:
        self.name, self.head, self.clock, self.query_ms = head.name, head, clock, 0.0

    @property
    def failed(self) -> bool:
        return self.head.failed

    def pass_ms(self, n: int) -> float:
        return self.clock.pass_ms(n)

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        before = self.clock.unpaid
        answers = self.head.answer(queries)
        self.query_ms += self.clock.unpaid - before
        return answers

    def give_up(self, why: str, error: Exception | None = None) -> None:
        self.head.give_up(why, error)


class Simulated(Chosen):
    """The same on a simulated clock."""

    def __init__(self, clock: Clock, setup: Setup, n_vocab: int) -> None:
        super().__init__(clock.curve, setup, n_vocab, Charged(clock.head, clock) if clock.head else None)
        self.clock = clock

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """With entropies that cost what the machine's do not decide."""
        return super().draft(sources, at._replace(entropy_ms=0.0))

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """As `auto` does, with the times of the clock."""
        charged = self.drafter
        query_ms = charged.query_ms if isinstance(charged, Charged) else 0.0
        super().learn(drafted, tokens, self.clock.step(done, query_ms))
        if isinstance(charged, Charged):
            charged.query_ms = 0.0
