"""The lanes of an engine: the one that requests share, and the one for exact requests, opened for the first of them.

Contract: what the engine does to all lanes alike (step, cancel, abort, close), and where a request belongs. `exact` may
be called from any thread, the rest from the one that decodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

from rest_local.calibration.settings import contexts_to_try, settings_for
from rest_local.decoding.lane import Lane
from rest_local.decoding.sequence import Sequence
from rest_local.errors import ModelError
from rest_local.llama import ladder, library
from rest_local.llama.model import Model

log = logging.getLogger("rest_local.engine")

TRIED_CONTEXT = 512  # tokens; the length does not matter on a CPU


class Lanes:
    """`shared`: an engine's own lane, for exact requests as well where the engine is exact."""

    def __init__(self, shared: Lane) -> None:
        self.shared = shared
        self._exact: Lane | None = shared if shared.exact else None
        self._opening = threading.Lock()  # held while that lane is opened
        self._while_loading: list[str] = []

    def __iter__(self) -> Iterator[Lane]:
        """Those that are open."""
        yield self.shared
        if self._exact is not None and self._exact is not self.shared:
            yield self._exact

    @property
    def warnings(self) -> list[str]:
        """What is off, and why, in all that are open; and what loading gave up."""
        of_lanes = (warning for lane in self for warning in lane.warnings)
        return list(dict.fromkeys((*self._while_loading, *of_lanes)))

    def warn(self, warning: str) -> None:
        """Add a warning of loading the model."""
        self._while_loading.append(warning)

    def exact(self) -> Lane:
        """The lane for exact requests. The first call on an engine that is not exact takes seconds: it opens a context
        and, the first time, measures. Raises ModelError where that does not fit the memory, or the model is closed.
        """
        with self._opening:
            if self._exact is None:
                shared = self.shared
                if shared.model.closed:
                    raise ModelError(f"model {shared.model.path}: is closed")
                self._try_exact(shared.model, shared.context.threads)
                settings = settings_for(shared.model.options, shared.context.n_ctx, shared.context.threads)
                lane = Lane.open(shared.model, settings, True, shared.aside, shared.draft_model)
                for warning in lane.warnings:
                    if warning not in shared.warnings:
                        log.warning("%s", warning)  # those of the engine were shown when it was loaded
                self._exact = lane
            return self._exact

    def _try_exact(self, model: Model, threads: int) -> None:
        """Compute in a child process in the settings of exact requests. On a GPU that was done at load. Raises
        ModelError where they need the weights to be loaded in another way.
        """
        if library.supports_gpu():
            return
        chosen = ladder.choose(
            model.path,
            model.n_gpu_layers,
            model.options,
            lambda options: contexts_to_try(options, TRIED_CONTEXT, threads, 1, None, exact=True),
        )
        if not chosen.warning:
            return
        if chosen.options.repack != model.options.repack:
            raise ModelError(f"{chosen.warning}; for exact requests start again with --no-repack")
        self.warn(chosen.warning)
        log.warning("%s", chosen.warning)
        model.options = chosen.options  # flash attention off, in contexts that are made from now on

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence where it belongs."""
        lane = self.exact() if sequence.request.exact else self.shared
        lane.scheduler.submit(sequence)

    def step(self, number: int) -> bool:
        """One forward pass in each lane that has work, under this number; False where none has."""
        busy = [lane for lane in self if lane.scheduler.busy]
        for lane in busy:
            lane.context.number_decodes(number)
            begun = time.perf_counter()
            lane.scheduler.step()
            lane.after_pass(time.perf_counter() - begun)
            if len(busy) > 1:
                lane.scheduler.deliver()  # text does not wait for the pass of the other lane
        return bool(busy)

    def deliver(self) -> None:
        """Finish what the last passes left to be done, where a device computes on its own."""
        for lane in self:
            lane.scheduler.deliver()

    def use_idle_time(self, seconds: float) -> bool:
        """Do what was put off until nothing is asked, for so long in each lane; False where there is nothing."""
        idle = [lane for lane in self if lane.has_idle_work]
        for lane in idle:
            lane.use_idle_time(seconds)
        return bool(idle)

    def sequences(self) -> Iterator[Sequence]:
        """All that are admitted or wait."""
        for lane in self:
            yield from (*lane.scheduler.admitted, *lane.scheduler.waiting)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now, wherever it is."""
        for lane in self:
            if lane.scheduler.has(sequence):
                lane.scheduler.cancel(sequence)
                return
        sequence.finish("cancelled")

    def cancel_all(self) -> None:
        """End every sequence."""
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
