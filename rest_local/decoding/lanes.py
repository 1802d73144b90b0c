"""The lanes of an engine: the one that requests share, and the one for exact requests, opened for the first of them.

Contract: what the engine does to all lanes alike (step, cancel, abort, close), and where a request belongs. `exact` may
be called from any thread, the rest from the one that decodes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from rest_local.decoding.job import Job
from rest_local.decoding.lane import Lane
from rest_local.decoding.tuning import settings_for
from rest_local.errors import ModelError

log = logging.getLogger("rest_local.engine")


class Lanes:
    """`shared`: an engine's own lane, for exact requests as well where the engine is exact. `warnings`: what is off,
    and why, of all that were opened.
    """

    def __init__(self, shared: Lane) -> None:
        self.shared = shared
        self.warnings = [*shared.warnings]
        self._exact: Lane | None = shared if shared.exact else None
        self._opening = threading.Lock()  # of that lane, by whoever asks first

    def __iter__(self) -> Iterator[Lane]:
        """Those that are open."""
        yield self.shared
        if self._exact is not None and self._exact is not self.shared:
            yield self._exact

    def exact(self) -> Lane:
        """The lane for exact requests. The first call on an engine that is not exact takes seconds: it opens a context
        and, the first time, measures. Raises ModelError where that does not fit the memory, or the model is closed.
        """
        with self._opening:
            if self._exact is None:
                shared = self.shared
                if shared.model.closed:
                    raise ModelError(f"model {shared.model.path}: is closed")
                settings = settings_for(shared.model.options, shared.context.n_ctx, shared.context.threads)
                lane = Lane.open(shared.model, settings, True, shared.aside, shared.draft_model)
                for warning in lane.warnings:
                    if warning not in self.warnings:
                        self.warnings.append(warning)
                        log.warning("%s", warning)  # who loaded the engine has shown its warnings long ago
                self._exact = lane
            return self._exact

    def submit(self, job: Job) -> None:
        """Queue a job where it belongs."""
        lane = self.exact() if job.request.exact else self.shared
        lane.scheduler.submit(job)

    def step(self, number: int) -> bool:
        """One forward pass in each lane that has work, under this number; False where none has."""
        busy = [lane for lane in self if lane.scheduler.busy]
        for lane in busy:
            lane.context.number_decodes(number)
            lane.scheduler.step()
        return bool(busy)

    def jobs(self) -> Iterator[Job]:
        """All that are served or wait."""
        for lane in self:
            yield from (*lane.scheduler.admitted, *lane.scheduler.waiting)

    def cancel(self, job: Job) -> None:
        """End a job now, wherever it is."""
        for lane in self:
            if lane.scheduler.has(job):
                lane.scheduler.cancel(job)
                return
        job.finish("cancelled")

    def cancel_all(self) -> None:
        """End every job."""
        for lane in self:
            lane.scheduler.cancel_all()

    def abort(self, number: int | None) -> None:
        """`Context.abort` in every lane, from any thread."""
        for lane in self:
            lane.context.abort(number)

    def forget(self) -> None:
        """Drop the prefixes that idle slots keep."""
        for lane in self:
            lane.scheduler.slots.forget()

    def close(self) -> None:
        """Free all cells, the model and the draft model; again does nothing."""
        with self._opening:  # nobody opens a context of a model that is being freed
            for lane in self:
                lane.close()
            if self.shared.draft_model:
                self.shared.draft_model.close()
            self.shared.model.close()
