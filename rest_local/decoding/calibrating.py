"""Measure while an engine is used: the time of batches whose price is uncertain, and whether other programs run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rest_local.calibration.cost import CERTAIN, SIZES, CostCurve
from rest_local.calibration.measuring import LoadMeter, probe_slot
from rest_local.calibration.tuning import load_meter
from rest_local.decoding.core import RequestState, Slot
from rest_local.decoding.scheduler import Scheduler
from rest_local.llama.context import Context
from rest_local.llama.cores import LOOK_S, others_run, wait_briefly
from rest_local.llama.model import Model

# Measuring takes at most this share of the time of steps, so that first answers are not slower.
SHARE = 0.01
# Batches of more tokens are timed only while the engine is idle, where a stall delays no request.
LARGEST_BETWEEN = 16
COARSE = 2 * CERTAIN
MOST_IDLE = 4 * len(SIZES)  # Batches in one idle period, on a machine whose times do not agree.
_BUCKET = 8  # Bits: lengths that differ by less than 256 tokens are checked once.
# Of the time since the last pass, for a batch in idle time: a request that comes soon meets none, a later one hardly
# ever.
IDLE_SHARE = 0.01
MOST_BUSY = 3  # After so many batches that other processes disturbed, an idle period is not used any more.


class Calibration:
    """Times batches whose price is uncertain, between steps and in idle time; the cost curve learns.

    Between steps, the batches take at most SHARE of the time of the steps, and none where every price is certain. In
    idle time, a batch takes at most IDLE_SHARE of the time since the last pass, and a request breaks it off. There are
    none before a request has drafted. The tokens of a batch are removed again; answers stay the same.

    `text`: gives token ids to evaluate. `enabled`: False where a draft cannot be removed without a trace.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        curve: CostCurve,
        text: Callable[[], Sequence[int]],
        meter: LoadMeter,
        *,
        enabled: bool = True,
    ) -> None:
        self.curve, self.enabled = curve, enabled
        self._scheduler, self._meter = scheduler, meter
        self._make_text = text
        self._text: Sequence[int] = ()
        self._credit_ms = 0.0
        self._planned, self._price_ms = 0, 0.0  # The size of the next batch, and the credit that it needs.
        self._idle, self._disturbed = 0, 0  # Batches in this idle period, and how many were disturbed.
        self._last_pass: float | None = None  # None until a request drafts.
        self._certain_at: int | None = None  # The length at which every price was certain at the last check.

    def after_pass(self, seconds: float) -> None:
        """Time a batch, after a forward pass that took `seconds`, if the credit pays for it."""
        self._idle = self._disturbed = 0
        if self._last_pass is not None:
            self._last_pass = time.monotonic()
        if not self.enabled:
            return
        self._credit_ms += SHARE * 1e3 * seconds
        if self._credit_ms < self._price_ms:  # The usual case; asking the curve costs as much as a lookup.
            return
        running = [state.text.slot for state in self._scheduler.queue.admitted if _drafts(state)]
        n_ctx = self._n_ctx if running else 0
        if running:
            self._last_pass = time.monotonic()
        if not running or self._certain_at == n_ctx >> _BUCKET:
            self._credit_ms = 0.0
            return
        wanted, planned = self._most_uncertain(n_ctx, LARGEST_BETWEEN), self._planned
        if wanted and wanted == planned:
            self._planned, self._price_ms = 0, 0.0
            self._credit_ms -= self._measure(running[0], wanted, n_ctx)
        elif wanted:  # The credit has to grow first.
            self._planned, self._price_ms = wanted, float(self.curve.expected(n_ctx)[wanted - 1])
        else:
            self._certain_at = n_ctx >> _BUCKET

    def wakes_in(self) -> float | None:
        """Return the seconds until `use_idle_time` has something to do; 0: now. None: never, as it looks now."""
        if self._last_pass is None or self._idle >= MOST_IDLE or self._disturbed >= MOST_BUSY:
            return None
        n_ctx = self._n_ctx
        n = self._most_uncertain(n_ctx, SIZES[-1])
        seconds = 1e-3 * float(self.curve.expected(n_ctx)[n - 1])
        return max(self._last_pass + seconds / IDLE_SHARE - time.monotonic(), 0.0) if n else None

    def use_idle_time(self) -> None:
        """Time one batch, and a plain step before it, in the slot that holds the longest text with room after it."""
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
        """Return the tokens in the cells."""
        return sum(slot.n_past for slot in self._scheduler.slots.slots)

    def _most_uncertain(self, n_ctx: int, largest: int) -> int:
        """Return the batch size with the largest variance for its cost, coarsely first: neighbours can wait. 0: none is
        uncertain.
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


def _drafts(state: RequestState) -> bool:
    """Return True if it generates, and known prices are of use to it."""
    return not state.text.is_prefilling and not state.left and state.speculation.policy.name != "off"


class MachineLoad:
    """Looks each LOOK_S of decoding whether other programs run. `busy`: they do now."""

    def __init__(self, model: Model, backend: Context, busy: bool) -> None:
        self.others_run = busy and backend.threads > 1
        self._meter, self._backend = load_meter(model, backend), backend
        # Since the last look:
        self._decoded_s, self._n_decodes = 0.0, 0

    def before_pass(self) -> None:
        """Set how long threads wait for each other; the pass before may have been that of another context."""
        wait_briefly(self.others_run)

    def after_pass(self, seconds: float, n_decodes: int) -> None:
        """Look again, if it is time to.

        A client that reads a stream is seen as well. It takes little, and only threads that do not get their processors
        have a reason to wait briefly.
        """
        self._decoded_s += seconds
        self._n_decodes += n_decodes
        if self._decoded_s >= LOOK_S and self._backend.threads > 1:
            starved = self._meter.busy(1e3 * self._decoded_s, self._n_decodes)
            self.others_run = (starved or self.others_run) and others_run()
            self._decoded_s, self._n_decodes = 0.0, 0
