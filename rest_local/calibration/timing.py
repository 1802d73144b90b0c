"""Time batches on a backend, and detect other processes that use the machine at the same time.

- `DecodeProbe` times batches on a backend without requests, for measuring before the first token.
- `probe_slot` times a batch after the text of a slot, between the steps of requests, and leaves the slot unchanged.
- `LoadMeter` compares the process's CPU time with the clock.
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

BUSY_SHARE = 0.75  # share of the CPU time that all threads can have; 0.2 to 0.35 with one busy process per core
PREEMPTIONS_PER_SECOND = 20.0  # of the threads; 110 to 250 were counted on a busy machine
NOT_ONE_STEP = 1.5  # times a step: a longer interval includes a pause, in which the load is unknown


class LoadMeter:
    """`threads`: number of threads that compute; 0 on a GPU, whose work takes no CPU time, so that no load can be
    detected. `known_busy`: another way to know that the machine is busy.
    """

    def __init__(self, threads: Callable[[], int], known_busy: Callable[[], bool] | None = None) -> None:
        self._threads, self._known_busy = threads, known_busy
        self._last = _usage()

    def start(self) -> None:
        """Start the interval."""
        self._last = _usage()

    def busy(self, ms: float) -> bool:
        """Whether other processes used the machine since the last call. A step took the last `ms` of the interval."""
        last, self._last = self._last, _usage()
        wall, cpu, preempted = (now - then for now, then in zip(self._last, last, strict=True))
        if self._known_busy is not None and self._known_busy():
            return True
        threads = self._threads()
        if not threads or not 0 < wall < 1e-3 * NOT_ONE_STEP * ms + 1e-3:
            return False
        return cpu < BUSY_SHARE * threads * wall and preempted > PREEMPTIONS_PER_SECOND * wall


def _usage() -> tuple[float, float, float]:
    """The clock and the process's CPU time in seconds, and the number of preemptions. Takes 1.5 us."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, float(usage.ru_nivcsw)


class DecodeProbe:
    """Times one decode of n tokens after `n_ctx` others. It fills the KV cache once per context length.

    A plain step precedes each decode, as in generation: llama.cpp keeps the graph of the last decode and builds a new
    one for another size (0.2 ms for the demo model). The cache is cleared at another length; the next user of the
    backend has to clear it too.
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
        """Time a decode without a plain step before it. Raises DecodeFailed."""
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
    """Time a batch of these tokens after the text of a slot, as a draft that is rejected. Returns None if there is no
    room or the decode is aborted. The memory of the model must be able to remove a tail.
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
    if code != 1:  # 1: no room, and no cell has changed
        slot.rewind(slot.n_past)
    return Timing(ms, busy) if code == 0 else None
