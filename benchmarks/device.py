"""A backend that computes asynchronously, like a GPU: `decode` returns at once, and reading the logits waits.

The KV cache and the batch belong to a real context, whose model is so small that its decode takes the time of a
submission. The logits are rows of a larger vocabulary, which another thread releases at the end of a step's time;
greedy decoding then yields the given texts. `critical_ms` lists how long the device waited for each submission.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rest_local.kv_cache.backend import Backend
from rest_local.llama.context import Context

MANY_ROWS = 256  # They take 155 MB with 152k entries each, which is more than any cache.


class Device(Backend):
    """A device that takes `step_ms` for a step, and writes `texts`: the prompt and answer of each slot."""

    def __init__(self, context: Context, step_ms: float, n_vocab: int, texts: Sequence[Sequence[int]]) -> None:
        self.n_ctx, self.n_cells, self.n_batch = context.n_ctx, context.n_cells, context.n_batch
        self.n_branches, self.n_slots, self.n_vocab = context.n_branches, context.n_slots, n_vocab
        self.n_swa, self.rollback = context.n_swa, context.rollback
        self.max_outputs, self.batch = context.max_outputs, context.batch
        self.critical_ms: list[float] = []
        self._context, self._step_s, self._texts = context, step_ms / 1e3, texts
        # Rows are used in turn, so that those of a step are in no cache, as after a write by a device.
        self._rows: NDArray[np.float32] = np.random.default_rng(7).standard_normal((MANY_ROWS, n_vocab), np.float32)
        self._first = self._after = 0  # The range of rows of the newest step.
        self._likeliest: list[tuple[int, int]] = []  # (row, its arg-max)
        self._submitted: SimpleQueue[float | None] = SimpleQueue()
        self._done = threading.Event()
        self._ready_at: float | None = None
        self._thread = threading.Thread(target=self._compute, name="device")
        self._thread.start()

    def decode(self) -> int:
        """Submit the batch; its logits are ready after `step_ms`."""
        now = time.perf_counter()
        if self._ready_at is not None:
            self.critical_ms.append(1e3 * (now - self._ready_at))
        code = self._context.decode()
        if code == 0:
            self._done.clear()
            self._fill_rows()
            self._submitted.put(now + self._step_s)
        return code

    def _fill_rows(self) -> None:
        """Make the next token of its text the arg-max of each output. After a wrong draft the token does not matter."""
        batch, n = self.batch, self.batch.n_tokens
        outputs = np.flatnonzero(batch.output[:n])
        slots = (batch.ids[outputs, 0] // self.n_branches).tolist()
        next_ones = (batch.pos[outputs] + 1).tolist()
        for row, token in self._likeliest:
            self._rows[row, token] = 0.0
        self._first = self._after if self._after + len(outputs) <= MANY_ROWS else 0
        self._after = self._first + len(outputs)
        rows = range(self._first, self._after)
        self._likeliest = [(row, self._texts[slot][pos]) for row, slot, pos in zip(rows, slots, next_ones, strict=True)]
        for row, token in self._likeliest:
            self._rows[row, token] = 20.0

    def synchronize(self) -> None:
        self._done.wait()
        self._ready_at = None  # Nothing is measured after a prompt.

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        """Wait for the step in a busy loop, like CUDA. Returns float32 [n_outputs, n_vocab]."""
        while not self._done.is_set():
            time.sleep(0)
        self._ready_at = time.perf_counter()
        return self._rows[self._first : self._first + n_outputs]

    def _compute(self) -> None:
        while (due := self._submitted.get()) is not None:
            time.sleep(max(0.0, due - time.perf_counter()))
            self._done.set()

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        return self._context.remove(seq, p0, p1)

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        self._context.copy(source, target, p0, p1)

    def begin(self, seq: int) -> int:
        return self._context.begin(seq)

    def state_size(self, seq: int) -> int:
        return self._context.state_size(seq)

    def save(self, seq: int, **how: bool) -> bytes:
        return self._context.save(seq, **how)

    def restore(self, seq: int, state: bytes | memoryview, **how: bool) -> bool:
        return self._context.restore(seq, state, **how)

    def clear(self) -> None:
        self._context.clear()

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        self._submitted.put(None)
        self._thread.join()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
