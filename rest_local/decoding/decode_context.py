"""One context and all that decodes on it: what it can verify, what it costs, its policies, its slots.

Contract: an engine has one. It opens a second one, of one slot, for the first request that asks for exactness on an
engine that is not exact: cells of other requests act like holes there, so such a request is alone on a context of
its own (DESIGN.md section 4).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rest_local.calibration.cost import CERTAIN, SIZES, CostCurve
from rest_local.calibration.measuring import ALWAYS_CHECKED, LoadMeter, Measured, Progress, probe_slot
from rest_local.calibration.settings import Fidelity, capability_of, contexts_to_try, settings_for
from rest_local.calibration.tuning import (
    Tuning,
    continue_self_test,
    fast_self_test,
    load_meter,
    self_test_text,
    tune,
    tune_thoroughly,
)
from rest_local.decoding.core import Pass, RequestState, Slot
from rest_local.decoding.scheduler import Scheduler
from rest_local.drafting.models.drafter import Drafter
from rest_local.drafting.models.opening import NO_DRAFTER, Opener
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import ModelError, OptionError
from rest_local.kv_cache import cell_format, slot_files
from rest_local.kv_cache.backend import LONGEST_CHAIN, Capability
from rest_local.kv_cache.cell_files import SESSIONS, CellFiles
from rest_local.kv_cache.cell_format import PART
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot_files import NamedSlots, Run
from rest_local.llama import library, load_fallback
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import LOOK_S, others_run, release_team, wait_briefly
from rest_local.llama.model import Model
from rest_local.llama.options import Rope
from rest_local.paths import cache_dir
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

log = logging.getLogger("rest_local.engine")
FRAME_MS = 30.0  # 33 pieces of text in a second are more than a reader sees
TRIED_CONTEXT = 512  # tokens; the length does not matter on a CPU
WITHOUT_DRAFTER = "going on without the draft model"
NO_EXACT_SETTINGS = "no settings of this backend verify drafts bit for bit"


# Measuring takes at most this share of the time of steps, so that first answers are not slower.
SHARE = 0.01
LARGEST_BETWEEN = 16  # tokens; larger ones only in idle time, where a stall delays no request
COARSE = 2 * CERTAIN
MOST_IDLE = 4 * len(SIZES)  # batches in one idle period, on a machine whose times do not agree
_BUCKET = 8  # bits: lengths that differ by less than 256 tokens are checked once
# Of the time since the last pass, for a batch in idle time: a request that comes soon meets none, a later one hardly
# ever.
IDLE_SHARE = 0.01
MOST_BUSY = 3  # batches that other processes disturbed, after which the idle period is not used any more


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
        self._planned, self._price_ms = 0, 0.0  # the next batch, which the credit has to pay
        self._idle, self._disturbed = 0, 0  # batches of this idle period
        self._last_pass: float | None = None  # since a request drafts
        self._certain_at: int | None = None  # length at which every price was certain at the last check

    def after_pass(self, seconds: float) -> None:
        """A forward pass took `seconds`; time a batch if the credit pays for it."""
        self._idle = self._disturbed = 0
        if self._last_pass is not None:
            self._last_pass = time.monotonic()
        if not self.enabled:
            return
        self._credit_ms += SHARE * 1e3 * seconds
        if self._credit_ms < self._price_ms:  # the usual case; asking the curve costs as much as a lookup
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
        elif wanted:  # the credit has to grow first
            self._planned, self._price_ms = wanted, float(self.curve.expected(n_ctx)[wanted - 1])
        else:
            self._certain_at = n_ctx >> _BUCKET

    def wakes_in(self) -> float | None:
        """Seconds until `use_idle_time` has something to do; 0: now. None: never, as it looks now."""
        if self._last_pass is None or self._idle >= MOST_IDLE or self._disturbed >= MOST_BUSY:
            return None
        n_ctx = self._n_ctx
        n = self._most_uncertain(n_ctx, SIZES[-1])
        seconds = 1e-3 * float(self.curve.expected(n_ctx)[n - 1])
        return max(self._last_pass + seconds / IDLE_SHARE - time.monotonic(), 0.0) if n else None

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
        """The batch size with the largest variance for its cost, coarsely first: neighbours can wait. 0: all known."""
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
    """Whether it generates, and known prices are of use to it."""
    return not state.text.is_prefilling and not state.left and state.speculation.policy.name != "off"


class DecodeContext:
    """`warnings`: what is off, and why. An exact context whose self-test is not complete decodes plainly."""

    def __init__(
        self,
        model: Model,
        backend: Context,
        tuning: Tuning,
        failed_stores: list[Searchable] | None = None,
        drafter: Drafter | None = None,
        busy: bool = False,
        sessions_limit: int = 0,
    ) -> None:
        """`busy`: other programs run now. `sessions_limit`: bytes on disk for the cells of texts, of all models."""
        self.model, self.backend, self.tuning, self.exact = model, backend, tuning, tuning.fidelity == "exact"
        capability, warning = _capability(model, backend, tuning)
        self.warnings = [told for told in (warning, _beyond_training(model, backend)) if told]
        self.auto = Auto(tuning.curve, drafter)
        self._policies: dict[str, Policy] = {Auto.name: self.auto}
        # SmolLM2 as Q4_0, Q4_1 and Q8_0: of 12 sizes from 17 to 512 rows none had other bits; Gemma, whose batches of 4
        # have other bits, in 5 of 12.
        tiled, joins = backend.shortcuts.tiled, tuning.fidelity == "same" and tuning.longest >= ALWAYS_CHECKED - 1
        joined = (tiled - 1 if tiled else backend.n_batch) if joins else 0
        self.sessions = self._open_sessions(sessions_limit, capability.shares) if sessions_limit else None
        self.scheduler: Scheduler = Scheduler(
            backend,
            capability,
            tuning.curve,
            frame_ms=FRAME_MS,
            drafter=drafter,
            joined=joined,
            sessions=self.sessions,
        )
        self.failed_stores: list[Searchable] = [] if failed_stores is None else failed_stores
        self.drafter = drafter
        self.opener = NO_DRAFTER
        if drafter:
            for slot in self.scheduler.slots.slots:
                slot.draft_text = drafter.text()
        self._sources: dict[Slot, Sources] = {}  # The index of a slot's text is kept with the slot.
        self._others_run = busy and backend.threads > 1  # at the last look at the machine
        self._decoded_s, self._n_decodes = 0.0, 0  # since that look
        self._starved = load_meter(model, backend)
        meter = load_meter(model, backend, lambda: self._others_run)
        tuning.curve.busy_now = meter.busy
        self._calibration = Calibration(
            self.scheduler, tuning.curve, lambda: self_test_text(model, backend.n_ctx), meter, enabled=capability.shares
        )

    @classmethod
    def open(
        cls,
        model: Model,
        settings: ContextSettings,
        fidelity: Fidelity,
        sessions_limit: int = 0,
        failed_stores: list[Searchable] | None = None,
        opener: Opener = NO_DRAFTER,
    ) -> DecodeContext:
        """Measure what was not measured before. Contexts of one model share `failed_stores`. `opener`: opens what
        drafts for the context. Raises ModelError.
        """
        if fidelity == "exact":
            settings = replace(settings, n_slots=1, n_cells=settings.n_ctx)
        busy = others_run()
        wait_briefly(busy)  # else measuring on a busy machine can take a hundred times as long
        backend, tuning = tune(model, settings, fidelity)
        release_team()  # another thread may decode from now on
        try:
            drafter, refusal = _opened(opener, backend)
            context = cls(model, backend, tuning, failed_stores, drafter, busy, sessions_limit)
            context.opener = opener
            context.warnings += [refusal] if refusal else []
            return context
        except BaseException:
            backend.close()
            raise

    def open_exact(self) -> DecodeContext:
        """Another context of the model, for exact requests. Takes seconds and, the first time, measures. Any thread.
        Raises ModelError where that does not fit the memory, or a child process could not compute in its settings.
        """
        model, backend = self.model, self.backend
        if not library.supports_gpu():  # on a GPU that was tried when the model was loaded
            chosen = load_fallback.choose(
                model.path,
                model.n_gpu_layers,
                model.options,
                lambda options: contexts_to_try(options, TRIED_CONTEXT, backend.threads, 1, None, "exact"),
            )
            if chosen.warning:
                raise ModelError(f"{chosen.warning}; for exact requests open it with `repack=False`")
        settings = settings_for(model.options, backend.n_ctx, backend.settings.threads)
        limit = 0 if self.sessions is None else self.sessions.files.folder.limit
        context = DecodeContext.open(model, settings, "exact", limit, self.failed_stores, self.opener)
        for told in context.warnings:
            if told not in self.warnings:
                log.warning("%s", told)  # those of the engine were shown when it was loaded
        return context

    @property
    def capability(self) -> Capability:
        """What drafts the model can verify, and why."""
        return self.scheduler.forward.capability

    def policy(self, name: str) -> Policy:
        """A policy of this name for one request; what it learns is shared by all of the context. Any thread."""
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies.setdefault(name, make_policy(name, self.tuning.curve))
        return policy.fork()

    def sources(self, slot: Slot) -> Sources:
        """For a request that is admitted to a slot: those of the slot, which have its text indexed; or others, where a
        request that was sent back uses those and goes on in another slot.
        """
        sources = self._sources.get(slot)
        if sources is None or any(state.speculation.sources is sources for state in self.scheduler.queue):
            sources = Sources([], self.model.n_vocab, failed_stores=self.failed_stores, spelling=self.model.vocabulary)
            self._sources[slot] = sources
        return sources

    def step(self, number: int) -> Pass | None:
        """Do one forward pass; None where all requests wait for images. `number`: a name for `abort`."""
        self.backend.breaker.number = number
        wait_briefly(self._others_run)  # the pass before may have been that of another context
        begun = time.perf_counter()
        done = self.scheduler.step()
        if done is not None and not self.scheduler.prefill.was_image:
            self.after_pass(time.perf_counter() - begun, done.n_decodes)
        return done

    @property
    def _part(self) -> int:
        """Tokens of a part of a text on disk. Of a sliding window, llama.cpp saves that before the last token alone."""
        return min(PART, self.backend.n_swa or PART)

    def _open_sessions(self, limit: int, shares: bool) -> Sessions | None:
        """Keep the cells of texts in the user's cache; else a warning."""
        made = cell_format.made_with(self.model, self.backend.settings, self.exact)
        try:
            files = CellFiles(cache_dir() / SESSIONS, made, limit, part=self._part)
        except OSError as error:
            self.warnings.append(f"no sessions are kept on disk: {error.filename}: {error.strerror}")
            return None
        return Sessions(files, shares)

    @property
    def idle_work_in(self) -> float | None:
        """Seconds until `use_idle_time` has something to do; 0: now. None: never, as it looks now."""
        saving = None if self.sessions is None else self.sessions.wakes_in(self.scheduler.slots.slots)
        measuring = self._calibration.wakes_in() if self._drafts else None
        return min((seconds for seconds in (saving, measuring) if seconds is not None), default=None)

    @property
    def _drafts(self) -> bool:
        """Whether it matters what a batch costs."""
        return self.capability.kind != "none"

    def after_pass(self, seconds: float, n_decodes: int = 1) -> None:
        """A forward pass took `seconds`: look at what else runs, and time a batch whose price is uncertain, if it is
        time to; save a little of an idle text.
        """
        if self.sessions is not None:
            self.sessions.after_pass(self.scheduler.slots.slots, seconds)
        self._decoded_s += seconds
        self._n_decodes += n_decodes
        if self._decoded_s >= LOOK_S and self.backend.threads > 1:
            # A client that reads a stream is seen as well. It takes little, and only threads that do not get their
            # processors have a reason to wait briefly.
            starved = self._starved.busy(1e3 * self._decoded_s, self._n_decodes)
            self._others_run = (starved or self._others_run) and others_run()
            self._decoded_s, self._n_decodes = 0.0, 0
        if self._drafts:
            self._calibration.after_pass(seconds)

    def use_idle_time(self, seconds: float, number: int = 0) -> None:
        """Save idle texts for `seconds`, or time a doubtful batch. `number`: `abort`'s."""
        self.backend.breaker.number = number
        slots = self.scheduler.slots.slots
        if self.sessions is not None and self.sessions.wakes_in(slots) == 0:
            self.sessions.use_idle_time(slots, seconds)
        elif self._drafts:
            self._calibration.use_idle_time()

    def abort(self, number: int | None = None) -> None:
        """Break off the running pass, or only one of that number. Any thread."""
        self.backend.breaker.abort(number)

    def compare(self, seconds: float = math.inf) -> None:
        """Run the self-test, while there are no requests, if it was never run: some seconds. In exact settings, go on
        with it for at most `seconds`. The prefix cache is lost.
        """
        if self.tuning.testing:
            _, before = _capability(self.model, self.backend, self.tuning)
            self.scheduler.slots.forget()
            continue_self_test(self.model, self.backend, self.tuning, seconds)
            self.scheduler.forward.capability, warning = _capability(self.model, self.backend, self.tuning)
            self.warnings = [*(told for told in self.warnings if told != before), *([warning] if warning else [])]
        if self.exact or self.tuning.self_test:
            return
        self.scheduler.slots.forget()
        self.tuning.self_test = fast_self_test(self.model, self.backend, self.capability).to_dict()

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure thoroughly, in a context of its own (`tune_thoroughly`). Used from the next start on."""
        self.tuning, result = tune_thoroughly(self.model, self.backend.settings, self.tuning, report)
        return result

    def save_cells(self, path: Path) -> bool:
        """As `Engine.save_cells`, of the longest text that the KV cache holds."""
        slot = max(self.scheduler.slots.slots, key=lambda slot: slot.n_past)
        problem = "there are none"
        try:
            if slot.n_past:
                made = cell_format.made_with(self.model, self.backend.settings, self.exact)
                planned = slot_files.plan(slot, made, self._part, self.capability.shares, most=sys.maxsize)
                assert planned is not None
                slot_files.save(slot, path, planned)
                return True
        except OSError as error:
            problem = error.strerror or str(error)
        log.warning("the cells of the conversation are not kept in %s: %s", path, problem)
        return False

    def load_cells(self, path: Path) -> int:
        """As `Engine.load_cells`."""
        slot = self.scheduler.slots.slots[0]
        try:
            return slot_files.load(
                slot, path, cell_format.made_with(self.model, self.backend.settings, self.exact)
            ).tokens
        except FileNotFoundError:
            return 0
        except (OSError, cell_format.Unusable) as error:
            log.warning("the cells in %s are not used, the text is evaluated again: %s", path, error)
            return 0

    def named_slots(self, run: Run, user: str = "") -> NamedSlots | None:
        """What saves the slots by name, for one user; None where no sessions are kept."""
        if self.sessions is None:
            return None
        return NamedSlots(self.sessions.files, self.scheduler.slots, self.capability.shares, run, user)

    def close(self) -> None:
        """Store the learned costs; free the cells."""
        try:
            if not self.model.closed:
                if self.sessions is not None:
                    self.sessions.close(self.scheduler.slots.slots)
                self.tuning.store()
        finally:
            if self.drafter is not None:  # it may read the context of the target
                self.drafter.close()
            self.backend.close()
            wait_briefly(False)


def _opened(opener: Opener, context: Context) -> tuple[Drafter | None, str]:
    """The drafter of a context, and a warning if it is refused."""
    try:
        return opener(context), ""
    except (ModelError, OptionError) as error:
        return None, f"{WITHOUT_DRAFTER}: {error}"


def _beyond_training(model: Model, context: Context) -> str:
    """A warning where the context is longer than what the model was trained for, and nothing stretches it."""
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
        if tuning.testing:
            warning = f"`exact`: {tuning.testing}; decoding plainly until it is complete; `doctor` can do that"
            return replace(capability, kind="none", reason=f"exact: {tuning.testing}"), warning
        warning = f"`exact`: {NO_EXACT_SETTINGS}; decoding plainly"
        return replace(capability, kind="none", reason=f"exact: {NO_EXACT_SETTINGS}"), warning
    if capability.kind == "none":
        return capability, f"drafting is off: {capability.reason}"
    return capability, ""
