"""Calibration in the background: batches whose price is uncertain are timed between steps and in idle time.

Contract: a scheduler's slots and the cost curve that its policies use go in; the curve learns. One batch at a time, so
a request waits for one at most. Between steps, the batches take at most SHARE of the time of the steps, and none where
every price is certain. The tokens of a batch are removed again; answers stay the same.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from rest_local.calibration.cost import CERTAIN, SIZES, CostCurve
from rest_local.calibration.measuring import LoadMeter, probe_slot
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.sequence import Sequence
from rest_local.kv_cache.slot import Slot

SHARE = 0.05  # of the time of steps: 300 tokens pay for 15 plain steps, enough for 2, 4, 8 and 16 tokens once on a CPU
LARGEST_BETWEEN = 16  # tokens; larger ones only in idle time, where a stall delays no request
COARSE = 2 * CERTAIN
MOST_IDLE = 4 * len(SIZES)  # batches in one idle period, on a machine whose times do not agree
_BUCKET = 8  # bits: lengths that differ by less than 256 tokens are checked once
MOST_BUSY = 3  # batches that other processes disturbed, after which the idle period is not used any more


class Calibration:
    """`text`: gives token ids to evaluate. `enabled`: False where a draft cannot be removed without a trace."""

    def __init__(
        self,
        scheduler: Scheduler,
        curve: CostCurve,
        text: Callable[[], abc.Sequence[int]],
        meter: LoadMeter,
        *,
        enabled: bool = True,
    ) -> None:
        self.curve, self.enabled = curve, enabled
        self._scheduler, self._meter = scheduler, meter
        self._make_text = text
        self._text: abc.Sequence[int] = ()
        self._credit_ms = 0.0
        self._planned, self._price_ms = 0, 0.0  # the next batch, which the credit has to pay
        self._idle, self._disturbed = 0, 0  # batches of this idle period
        self._certain_at: int | None = None  # length at which every price was certain at the last check

    def after_pass(self, seconds: float) -> None:
        """A forward pass took `seconds`; time a batch if the credit pays for it."""
        self._idle = self._disturbed = 0
        if not self.enabled:
            return
        self._credit_ms += SHARE * 1e3 * seconds
        if self._credit_ms < self._price_ms:  # the usual case; asking the curve costs as much as a lookup
            return
        running = [sequence.slot for sequence in self._scheduler.admitted if _drafts(sequence)]
        n_ctx = self._n_ctx
        if not running or self._certain_at == n_ctx >> _BUCKET:
            self._credit_ms = 0.0
            return
        wanted, planned = self._most_uncertain(n_ctx, LARGEST_BETWEEN), self._planned
        if wanted and wanted == planned:
            self._planned, self._price_ms = 0, 0.0
            self._credit_ms -= self._measure(running[0], wanted, n_ctx)
        elif wanted:  # the credit has to grow first
            self._planned, self._price_ms = wanted, float(self.curve.expected(n_ctx)[wanted - 1])
        else:
            self._certain_at = n_ctx >> _BUCKET

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        if not self.enabled or self._idle >= MOST_IDLE or self._disturbed >= MOST_BUSY:
            return False
        return bool(self._most_uncertain(self._n_ctx, SIZES[-1]))

    def use_idle_time(self) -> None:
        """One batch, and a plain step before it, in the slot that holds the longest text with room after it."""
        self._idle += 1
        n_ctx = self._n_ctx
        n = self._most_uncertain(n_ctx, SIZES[-1])
        slots = [slot for slot in self._scheduler.slots.slots if slot.n_past + n <= slot.backend.n_ctx]
        if not n or not slots:
            self._idle = MOST_IDLE
            return
        slot = max(slots, key=lambda each: each.n_past)
        self._measure(slot, 1, n_ctx)
        self._measure(slot, n, n_ctx)

    @property
    def _n_ctx(self) -> int:
        """Tokens in the cells."""
        return sum(slot.n_past for slot in self._scheduler.slots.slots)

    def _most_uncertain(self, n_ctx: int, largest: int) -> int:
        """The batch size with the largest variance for what it costs to measure, coarsely first: the neighbours of a
        size that was measured can wait. 0 where all are certain.
        """
        backend = self._scheduler.backend
        largest = min(largest, backend.max_outputs, backend.n_batch)
        sd, price = self.curve.uncertainty(n_ctx), self.curve.expected(n_ctx)
        for limit in (COARSE, CERTAIN):
            if doubtful := [n for n in SIZES if n <= largest and sd[n - 1] > limit]:
                return max(doubtful, key=lambda n: float(sd[n - 1] ** 2 / price[n - 1]))
        return 0

    def _measure(self, slot: Slot, n: int, n_ctx: int) -> float:
        """Time a batch; returns what it took, in milliseconds."""
        self._text = self._text or self._make_text()
        timing = probe_slot(slot, [self._text[i % len(self._text)] for i in range(n)], self._meter)
        if timing is None or not timing.valid:
            return 0.0
        self._disturbed += timing.busy
        self.curve.observe(n, n_ctx, timing.ms, timing.busy)
        return timing.ms


def _drafts(sequence: Sequence) -> bool:
    """Whether it generates, and known prices are of use to it."""
    return not sequence.is_prefilling and not sequence.left and sequence.policy.name != "off"
