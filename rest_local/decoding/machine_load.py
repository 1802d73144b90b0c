"""Look while an engine is used whether other programs run, and set how long threads wait for each other."""

from __future__ import annotations

from rest_local.calibration.tuning import load_meter
from rest_local.llama.context import Context
from rest_local.llama.cores import LOOK_S, others_run, wait_briefly
from rest_local.llama.model import Model


class MachineLoad:
    """Looks after each LOOK_S of decoding whether other programs run: `others_run`."""

    def __init__(self, model: Model, backend: Context, busy: bool) -> None:
        self.others_run = busy and backend.threads > 1
        self._meter, self._backend = load_meter(model, backend), backend
        # Since the last look:
        self._decoded_s, self._n_decodes = 0.0, 0

    def before_pass(self) -> None:
        """Set how long threads wait for each other. The pass before may have been that of another context."""
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
