"""The context of an engine and all that decodes on it: what it can verify, what it costs, its policies, its slots."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from rest_local.calibration.measuring import ALWAYS_CHECKED, Measured, Progress
from rest_local.calibration.settings import Fidelity, capability_of
from rest_local.calibration.tuning import (
    Tuning,
    fast_self_test,
    load_meter,
    tune,
    tune_thoroughly,
)
from rest_local.decoding.core import Pass, RequestState, Slot
from rest_local.decoding.machine_load import MachineLoad
from rest_local.decoding.scheduler import Scheduler
from rest_local.drafting.models.drafter import Drafter
from rest_local.drafting.models.opening import NO_DRAFTER, Opener
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import ModelError, OptionError
from rest_local.kv_cache.backend import LONGEST_CHAIN, Capability
from rest_local.kv_cache.cell_files import SESSIONS, CellFiles
from rest_local.kv_cache.cell_format import PART, fingerprint_of
from rest_local.kv_cache.sessions import Sessions
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import others_run, release_team, wait_briefly
from rest_local.llama.model import Model
from rest_local.llama.options import Rope
from rest_local.paths import cache_dir
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

FRAME_MS = 30.0  # A reader does not see more than 33 pieces of text in a second.
WITHOUT_DRAFTER = "going on without the draft model"
NO_EXACT_SETTINGS = "no settings of this backend verify drafts bit for bit"


class SlotSources:
    """The sources of each slot, which keep the index of its text. `failed` lists the stores that broke."""

    def __init__(self, model: Model) -> None:
        self.failed: list[Searchable] = []
        self._model = model
        self._of_slot: dict[Slot, Sources] = {}

    def take(self, slot: Slot, others: Iterable[RequestState]) -> Sources:
        """Return the sources of a slot for a request that is admitted to it.

        They are new ones if one of `others` uses those of the slot: it was sent back, and goes on in another slot.
        """
        sources = self._of_slot.get(slot)
        if sources is None or any(state.speculation.sources is sources for state in others):
            vocabulary = self._model.vocabulary
            sources = Sources([], self._model.n_vocab, failed_stores=self.failed, spelling=vocabulary)
            self._of_slot[slot] = sources
        return sources


class DecodeContext:
    """The context of an engine with its slots, its policies and the cost of a batch. `warnings`: what is off, and why.

    An exact context whose self-test found a difference decodes plainly.
    """

    def __init__(
        self,
        model: Model,
        backend: Context,
        tuning: Tuning,
        opener: Opener = NO_DRAFTER,
        busy: bool = False,
        sessions_limit: int = 0,
    ) -> None:
        """Make slots, policies and a scheduler over `backend`.

        `opener`: opens a drafter. `busy`: other programs run now. `sessions_limit`: bytes on disk for the cells of
        texts, of all models.
        """
        self.model, self.backend, self.tuning, self.exact = model, backend, tuning, tuning.fidelity == "exact"
        self.drafter, refusal = _opened(opener, backend)
        capability, warning = _capability(model, backend, tuning)
        self.auto = Auto(tuning.curve, self.drafter)
        self._policies: dict[str, Policy] = {Auto.name: self.auto}
        # SmolLM2 as Q4_0, Q4_1 and Q8_0: of 12 sizes from 17 to 512 rows none had other bits; Gemma, whose batches of 4
        # have other bits, in 5 of 12.
        # In the cheapest settings bits depend on the size of a batch in any case.
        is_same = tuning.fidelity == "same" and tuning.longest >= ALWAYS_CHECKED - 1
        may_join = backend.n_batch > 1 and (is_same or tuning.fidelity == "fast")
        joins = (lambda n, end: not backend.shortcuts.tiles(n, end)) if may_join else None
        fingerprint, shares = fingerprint_of(model, backend.settings, self.exact), capability.shares
        part = min(PART, backend.n_swa or PART)  # llama.cpp saves only the newest window.
        sessions, no_sessions = (
            _open_sessions(fingerprint, sessions_limit, part, shares) if sessions_limit else (None, "")
        )
        self.scheduler: Scheduler = Scheduler(
            backend,
            capability,
            tuning.curve,
            frame_ms=FRAME_MS,
            drafter=self.drafter,
            joins=joins,
            sessions=sessions,
        )
        self.sources = SlotSources(model)
        told = (warning, _beyond_training(model, backend), refusal, no_sessions)
        self.warnings = [each for each in told if each]
        self.load = MachineLoad(model, backend, busy)
        tuning.curve.busy_now = load_meter(model, backend, lambda: self.load.others_run).busy

    @classmethod
    def open(
        cls,
        model: Model,
        settings: ContextSettings,
        fidelity: Fidelity,
        sessions_limit: int = 0,
        opener: Opener = NO_DRAFTER,
    ) -> DecodeContext:
        """Open a context in measured settings, and measure those that are not known. Raises ModelError."""
        if fidelity == "exact":
            settings = replace(settings, n_slots=1, n_cells=settings.n_ctx)
        busy = others_run()
        wait_briefly(busy)  # Else measuring on a busy machine can take a hundred times as long.
        backend, tuning = tune(model, settings, fidelity)
        release_team()  # Another thread may decode from now on.
        try:
            return cls(model, backend, tuning, opener, busy, sessions_limit)
        except BaseException:
            backend.close()
            raise

    @property
    def capability(self) -> Capability:
        """Return what drafts the model can verify, and why."""
        return self.scheduler.forward.capability

    def policy(self, name: str) -> Policy:
        """Return a policy of this name for one request; what it learns is shared by all of the context. Any thread."""
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies.setdefault(name, make_policy(name, self.tuning.curve))
        return policy.fork()

    def step(self, number: int) -> Pass | None:
        """Do one forward pass. Return None if all requests wait for images. `number`: a name for `abort`.

        Afterwards save a little of an idle text, and look if other programs run, each if it is time to.
        """
        self.backend.breaker.number = number
        self.load.before_pass()
        begun = time.perf_counter()
        done = self.scheduler.step()
        if done is not None and not self.scheduler.prefill.was_image:
            seconds = time.perf_counter() - begun
            slots = self.scheduler.slots
            if slots.sessions is not None:
                slots.sessions.after_pass(slots.slots, seconds)
            self.load.after_pass(seconds, done.n_decodes)
        return done

    @property
    def idle_work_in(self) -> float | None:
        """Return the seconds until `use_idle_time` has something to do. 0: now. None: never, as it looks now."""
        slots = self.scheduler.slots
        return None if slots.sessions is None else slots.sessions.wakes_in(slots.slots)

    def use_idle_time(self, seconds: float) -> None:
        """Save idle texts for `seconds`."""
        slots = self.scheduler.slots
        if slots.sessions is not None and slots.sessions.wakes_in(slots.slots) == 0:
            slots.sessions.use_idle_time(slots.slots, seconds)

    def compare(self) -> None:
        """Run the self-test for some seconds, unless it was run. Only while no request runs. Frees the prefix cache."""
        if self.exact or self.tuning.self_test:
            return
        self.scheduler.slots.forget()
        self.tuning.self_test = fast_self_test(self.model, self.backend, self.capability).to_dict()

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure the cost curve thoroughly in a context of its own, and keep it for the next start.

        Takes about 700 plain steps. Only while no request runs. Raises ModelError, and ValueError if the clock stands
        still.
        """
        self.tuning, result = tune_thoroughly(self.model, self.backend.settings, self.tuning, report)
        return result

    def close(self) -> None:
        """Store the learned costs; free the cells."""
        try:
            if not self.model.closed:
                slots = self.scheduler.slots
                if slots.sessions is not None:
                    slots.sessions.close(slots.slots)
                self.tuning.store()
        finally:
            if self.drafter is not None:  # It may read the context of the target.
                self.drafter.close()
            self.backend.close()
            wait_briefly(False)


def _open_sessions(fingerprint: str, limit: int, part: int, shares: bool) -> tuple[Sessions | None, str]:
    """Open the folder of cells in the user's cache, `limit` bytes for all models, or return a warning."""
    try:
        return Sessions(CellFiles(cache_dir() / SESSIONS, fingerprint, limit, part=part), shares), ""
    except OSError as error:
        return None, f"no sessions are kept on disk: {error.filename}: {error.strerror}"


def _opened(opener: Opener, context: Context) -> tuple[Drafter | None, str]:
    """Return the drafter of a context, and a warning if it is refused."""
    try:
        return opener(context), ""
    except (ModelError, OptionError) as error:
        return None, f"{WITHOUT_DRAFTER}: {error}"


def _beyond_training(model: Model, context: Context) -> str:
    """Return a warning if the context is longer than what the model was trained for, and nothing stretches it."""
    if not 0 < model.n_ctx_train < context.n_ctx or model.is_recurrent or model.options.rope != Rope():
        return ""
    return (
        f"a context of {context.n_ctx} tokens: the model was trained for {model.n_ctx_train}, and gets worse beyond; "
        "lower `n_ctx`, or stretch it with `rope`"
    )


def _capability(model: Model, context: Context, tuning: Tuning) -> tuple[Capability, str]:
    longest = tuning.longest if tuning.fidelity == "same" else LONGEST_CHAIN
    capability = capability_of(model, context, tuning.fidelity, longest)
    if tuning.fidelity == "exact" and not tuning.exact and capability.kind != "none":
        warning = f"`exact`: {NO_EXACT_SETTINGS}; decoding plainly"
        return replace(capability, kind="none", reason=f"exact: {NO_EXACT_SETTINGS}"), warning
    if capability.kind == "none":
        return capability, f"drafting is off: {capability.reason}"
    return capability, ""
