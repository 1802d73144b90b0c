"""Time batches on a backend, and tell whether other processes took part of the machine meanwhile.

Contract: `DecodeProbe` times batches in cells of its own, for measuring before the first token; `probe_slot` times one
after the text of a slot, between the steps of requests, and leaves the slot as it was. `LoadMeter` compares the
process's CPU time with the clock.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence

import numpy as np

from rest_local.calibration.cost import LARGEST
from rest_local.calibration.measuring import Timing
from rest_local.errors import DecodeFailed
from rest_local.kv_cache.backend import Backend, remove_tail
from rest_local.kv_cache.slot import BatchBuilder, Slot

BUSY_SHARE = 0.75  # of the CPU time that all threads could have had; with one busy process per core it was 0.2 to 0.35
PREEMPTIONS_A_SECOND = 20.0  # the threads were taken off their cores; 110 to 250 were counted on a busy machine
NOT_ONE_STEP = 1.5  # a pause between two steps, not a step: nothing is known of what the machine did


class LoadMeter:
    """`threads`: how many compute, 0 where a GPU does, whose work takes no CPU time: nothing can be told then.
    `known_busy`: what else knows that the machine is.
    """

    def __init__(self, threads: Callable[[], int], known_busy: Callable[[], bool] | None = None) -> None:
        self._threads, self._known_busy = threads, known_busy
        self._last = _usage()

    def start(self) -> None:
        """From here on counts."""
        self._last = _usage()

    def busy(self, ms: float) -> bool:
        """Whether others took part of the machine since the last call, of which a step took the last `ms`."""
        last, self._last = self._last, _usage()
        wall, cpu, preempted = (now - then for now, then in zip(self._last, last, strict=True))
        if self._known_busy is not None and self._known_busy():
            return True
        threads = self._threads()
        if not threads or not 0 < wall < 1e-3 * NOT_ONE_STEP * ms + 1e-3:
            return False
        return cpu < BUSY_SHARE * threads * wall and preempted > PREEMPTIONS_A_SECOND * wall


def _usage() -> tuple[float, float, float]:
    """The clock and the process's CPU time in seconds, and how often a thread was taken off its core. 1.5 us."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, float(usage.ru_nivcsw)


class DecodeProbe:
    """Times one decode of n tokens after `n_ctx` others. It fills the cells once per length.

    As a step finds things, after a plain one: llama.cpp keeps the graph of the last decode and rebuilds it for another
    size (0.2 ms for the demo model). Its cells are cleared at another length, and by who uses the backend next.
    """

    def __init__(self, backend: Backend, text: Sequence[int], meter: LoadMeter | None = None) -> None:
        self.backend = backend
        self._meter = meter
        self._text = np.resize(np.asarray(text, np.int32), max(backend.n_ctx, LARGEST))
        self._n_past = -1

    def __call__(self, n: int, n_ctx: int) -> Timing:
        """Raises DecodeFailed."""
        if n > 1:
            self.alone(1, n_ctx)
        return self.alone(n, n_ctx)

    def alone(self, n: int, n_ctx: int) -> Timing:
        """The same without a plain step before it. Raises DecodeFailed."""
        if self._n_past != n_ctx:
            self._fill(n_ctx)
        if self._meter:
            self._meter.start()
        begun = time.perf_counter()
        self._decode(n, n_ctx, 1)
        self.backend.logits(n)
        ms = 1e3 * (time.perf_counter() - begun)
        busy = self._meter is not None and self._meter.busy(ms)
        if not remove_tail(self.backend, n_ctx):
            self._n_past = -1
        return Timing(ms, busy)

    def _fill(self, n_ctx: int) -> None:
        self.backend.clear()
        for begin in range(0, n_ctx, self.backend.n_batch):
            self._decode(min(self.backend.n_batch, n_ctx - begin), begin, 0)
        self._n_past = n_ctx

    def _decode(self, n: int, begin: int, output: int) -> None:
        backend = self.backend
        backend.batch.fill(self._text[:n], np.arange(begin, begin + n), 0, backend.n_branches, output)
        if code := backend.decode():
            raise DecodeFailed(code, n)


def probe_slot(slot: Slot, tokens: Sequence[int], meter: LoadMeter | None = None) -> Timing | None:
    """Time a batch of these tokens after the text of a slot, as a draft that is rejected. None where there is no room,
    or the decode was broken off. Only for memory that can remove a tail.
    """
    backend, n = slot.backend, len(tokens)
    if slot.n_past + n > backend.n_ctx or n > min(backend.max_outputs, backend.n_batch):
        return None
    batch = BatchBuilder()
    slot.add_prompt(batch, tokens)
    batch.output = [1] * n
    batch.load(backend.batch)
    if meter:
        meter.start()
    begun = time.perf_counter()
    code = backend.decode()
    if code == 0:
        backend.logits(n)
    ms = 1e3 * (time.perf_counter() - begun)
    busy = meter is not None and meter.busy(ms)
    if code != 1:  # no room: nothing was changed
        slot.rewind(slot.n_past)
    return Timing(ms, busy) if code == 0 else None
