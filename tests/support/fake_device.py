"""The fake backend as a device that computes on its own: `decode` returns at once, another thread computes the rows."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from support.fake_backend import N_VOCAB, FakeBackend

_pool = ThreadPoolExecutor(1)


class FakeDevice(FakeBackend):
    """The rows lie in one buffer that each decode makes unreadable, until `logits` has waited for its own.

    `under_way`: a pass is submitted and not waited for. `faults`: call number -> what `logits` raises after it.
    """

    def __init__(self, n_ctx: int = 256, n_branches: int = 8, n_batch: int = 64, n_slots: int = 1) -> None:
        super().__init__(n_ctx, n_branches, n_batch, n_slots=n_slots)
        self.under_way = False
        self.faults: dict[int, BaseException] = {}
        self._buffer = np.empty((self.max_outputs, N_VOCAB), np.float32)
        self._computed: Future[np.ndarray] = Future()

    def decode(self) -> int:
        assert not self.under_way or not len(self._rows), "submitted before the logits of the last pass were read"
        self._buffer[:] = np.nan
        code = super().decode()
        if code == 0:
            rows = self._rows
            self._computed = _pool.submit(rows.copy)
            self.under_way = True
        return code

    def synchronize(self) -> None:
        self._computed.result()
        self.under_way = False

    def logits(self, n_outputs: int) -> np.ndarray:
        rows = self._computed.result()
        self.under_way = False
        if fault := self.faults.pop(self.calls, None):
            raise fault
        assert n_outputs == len(rows)
        self._buffer[:n_outputs] = rows
        return self._buffer[:n_outputs]
