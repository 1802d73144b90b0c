"""One context and all that decodes on it: what it can verify, what it costs, its policies, its slots.

Contract: an engine has one lane. It opens a second one, of one slot, for the first request that asks for exactness on
an engine that is not exact: cells of other requests act like holes there, so such a request is alone on a context of
its own (DESIGN.md section 4).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rest_local.calibration.cost import LARGEST
from rest_local.calibration.exactness import N_BATCH, N_CTX, Background, SelfTest, ThreadedBackend
from rest_local.calibration.measuring import Measured, Progress
from rest_local.calibration.settings import capability_of, contexts_to_try, settings_for
from rest_local.calibration.threads import Level, ThreadGovernor, levels
from rest_local.calibration.tuning import (
    Tuning,
    exact_self_test,
    fast_self_test,
    load_meter,
    self_test_text,
    tune,
    tune_thoroughly,
)
from rest_local.decoding.refinement import Calibration
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.sequence import Sequence
from rest_local.drafting.models.drafter import Drafter
from rest_local.drafting.models.opening import NO_DRAFTER, Opener
from rest_local.drafting.recycled import SuccessorTable
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import DecodeFailed, ModelError, OptionError
from rest_local.kv_cache import saved
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.session_files import PART, SESSIONS, SessionFiles
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import Slot
from rest_local.llama import library, load_fallback
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import can_wait_briefly, others_run, wait_briefly
from rest_local.llama.model import Model
from rest_local.llama.options import Rope
from rest_local.paths import cache_dir
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

log = logging.getLogger("rest_local.engine")
TRIED_CONTEXT = 512  # tokens; the length does not matter on a CPU
WITHOUT_DRAFTER = "going on without the draft model"
NO_EXACT_SETTINGS = "no settings of this backend verify drafts bit for bit"


class Lane:
    """`warnings`: what is off, and why. An exact lane whose self-test is not complete decodes plainly and continues the
    test in the background; drafting begins when the test has found no difference.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        tuning: Tuning,
        exact: bool,
        failed_stores: list[Searchable] | None = None,
        drafter: Drafter | None = None,
        busy: bool = False,
    ) -> None:
        """`busy`: other programs run now."""
        self.model, self.context, self.tuning, self.exact = model, context, tuning, exact
        capability, warning = _capability(model, context, tuning, exact)
        self.warnings = [told for told in (warning, _beyond_training(model, context)) if told]
        self.auto = Auto(tuning.curve)
        self.auto.drafter = drafter
        self.auto.successors = SuccessorTable(model.n_vocab)
        self._policies: dict[str, Policy] = {Auto.name: self.auto}
        self.scheduler: Scheduler = Scheduler(context, capability, tuning.curve)
        self.failed_stores: list[Searchable] = [] if failed_stores is None else failed_stores
        self.drafter = self.scheduler.forward.drafter = drafter
        self.opener = NO_DRAFTER
        if drafter:
            for slot in self.scheduler.slots.slots:
                slot.draft_text = drafter.text()
        self.sessions: Sessions | None = None
        self._sources: dict[int, Sources] = {}  # by slot: the index of its text is kept with it
        self._self_test = self._background() if exact and tuning.testing else None
        self._governor = ThreadGovernor(self._levels(), busy) if context.threads > 1 else None
        meter = load_meter(model, context, self._governor)
        tuning.curve.busy_now = meter.busy
        self._calibration = Calibration(
            self.scheduler, tuning.curve, lambda: self_test_text(model, context.n_ctx), meter, enabled=capability.shares
        )

    @classmethod
    def open(
        cls,
        model: Model,
        settings: ContextSettings,
        exact: bool,
        failed_stores: list[Searchable] | None = None,
        opener: Opener = NO_DRAFTER,
    ) -> Lane:
        """Measure what was not measured before. Lanes share `failed_stores`. `opener`: opens what drafts for the
        context of the lane. Raises ModelError.
        """
        if exact:
            settings = replace(settings, n_slots=1, n_cells=settings.n_ctx)
        busy = others_run()
        wait_briefly(busy)  # else measuring on a busy machine can take a hundred times as long
        context, tuning = tune(model, settings, exact)
        try:
            drafter, refusal = _opened(opener, context)
            lane = cls(model, context, tuning, exact, failed_stores, drafter, busy)
            lane.opener = opener
            lane.warnings += [refusal] if refusal else []
            return lane
        except BaseException:
            context.close()
            raise

    @property
    def capability(self) -> Capability:
        """What drafts the model can verify, and why."""
        return self.scheduler.forward.capability

    def policy(self, name: str) -> Policy:
        """A policy of this name for one request; what the policy learns is shared by all requests of the lane. Any
        thread.
        """
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies.setdefault(name, make_policy(name, self.tuning.curve))
        return policy.fork()

    def sources(self, slot: Slot) -> Sources:
        """For a sequence that is admitted to a slot: those of the slot, which have its text indexed; or others, where a
        sequence that was sent back uses those and goes on in another slot.
        """
        sources = self._sources.get(slot.first_id)
        if sources is None or self._in_use(sources):
            sources = Sources([], self.model.n_vocab, failed_stores=self.failed_stores, spelling=self.model.vocabulary)
            self._sources[slot.first_id] = sources
        return sources

    def _in_use(self, sources: Sources) -> bool:
        sequences = (*self.scheduler.admitted, *self.scheduler.waiting)
        return any(sequence.has_begun and sequence.sources is sources for sequence in sequences)

    @property
    def threads(self) -> int:
        """Threads of the next forward pass."""
        return self._governor.level.threads if self._governor else self.context.threads

    def _levels(self) -> list[Level]:
        """Those of the governor. The number of threads stays where the user gave it. In exact mode it also stays unless
        the complete self-test found the same bits with any number.
        """
        given = self.context.settings.threads > 0
        fewer = not given and (not self.exact or self.tuning.any_threads)
        return levels(self.context.threads, fewer, can_wait_briefly())

    def begin_pass(self, number: int) -> None:
        """Prepare a forward pass. `number`: a name for `abort`."""
        self.context.number_decodes(number)
        if self._governor is not None:  # the pass before may have been that of another lane
            wait_briefly(self._governor.level.brief)

    def keep_sessions(self, limit: int) -> None:
        """Keep the cells of texts on disk, in the user's cache, up to `limit` bytes for all models together. Where that
        cannot be done, a warning.
        """
        made = saved.made_with(self.model, self.context.settings, self.exact)
        try:
            # Of a text, llama.cpp saves only the cells of the sliding window before its last token.
            part = min(PART, self.context.n_swa or PART)
            files = SessionFiles(cache_dir() / SESSIONS, made, limit, part=part)
        except OSError as error:
            self.warnings.append(f"no sessions are kept on disk: {error.filename}: {error.strerror}")
            return
        slots, shares = self.scheduler.slots, self.capability.shares
        self.sessions = self.scheduler.sessions = Sessions(files, slots.slots, shares)
        self.sessions.evict = slots.evict
        slots.before_loss = self.sessions.lose

    @property
    def idle_work_in(self) -> float | None:
        """Seconds until `use_idle_time` has something to do that it has not now; None: never, as it looks now."""
        return None if self.sessions is None else self.sessions.wakes_in()

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        if self.idle_work_in == 0:
            return True
        return self._self_test is not None or (self._drafts and self._calibration.has_idle_work)

    @property
    def _drafts(self) -> bool:
        """Whether it matters what a batch costs."""
        return self.capability.kind != "none"

    def after_pass(self, seconds: float) -> None:
        """A forward pass took `seconds`: change the number of threads, continue the self-test, or time a batch whose
        price is uncertain, if it is time to; save a little of an idle text.
        """
        if self.sessions is not None:
            self.sessions.after_pass(seconds)
        if (governor := self._governor) is not None:
            n_tokens = self.context.batch.n_tokens
            if n_tokens > LARGEST:
                governor.restart()
            elif governor.after_pass(n_tokens, seconds, self._plain_steps):
                self.context.use_threads(governor.level.threads)
                if self.drafter is not None:
                    self.drafter.use_threads(governor.level.threads)
        if (background := self._self_test) is not None:
            self._continue(lambda: background.after_pass(seconds))
        elif self._drafts:
            self._calibration.after_pass(seconds)

    def use_idle_time(self, seconds: float) -> None:
        """Save idle texts or continue the self-test for `seconds`, or time one batch whose price is uncertain."""
        if self.sessions is not None and self.idle_work_in == 0:
            self.sessions.use_idle_time(seconds)
        elif (background := self._self_test) is not None:
            self._continue(lambda: background.run(seconds))
        elif self._drafts:
            self._calibration.use_idle_time()

    def compare(self, seconds: float) -> None:
        """Run the self-test, while there are no requests, if it was never run: some seconds. In exact settings, go on
        with it for at most `seconds`. The prefix cache is lost.
        """
        if self.exact:
            over = time.perf_counter() + seconds
            while self._self_test is not None and (left := over - time.perf_counter()) > 0:
                self.use_idle_time(left)
            return
        if self.tuning.self_test:
            return
        self.scheduler.slots.forget()
        self.tuning.self_test = fast_self_test(self.model, self.context, self.capability).to_dict()

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure thoroughly, in a context of its own (`tune_thoroughly`). Used from the next start on."""
        self.tuning, result = tune_thoroughly(self.model, self.context.settings, self.tuning, report)
        return result

    def save_cells(self, path: Path) -> bool:
        """Write the cells of the longest text, while there are no requests; False, with a warning, where that fails."""
        slot = max(self.scheduler.slots.slots, key=lambda slot: slot.n_past)
        try:
            if saved.save(slot, path, saved.made_with(self.model, self.context.settings, self.exact)):
                return True
            problem = "llama.cpp cannot write them" if slot.n_past else "there are none"
        except OSError as error:
            problem = error.strerror or str(error)
        log.warning("the cells of the conversation are not kept in %s: %s", path, problem)
        return False

    def load_cells(self, path: Path) -> int:
        """Have the cells of `save_cells` in a slot, while there are no requests; how many, 0 with a warning where they
        cannot be used.
        """
        slot = self.scheduler.slots.slots[0]
        problem = saved.load(slot, path, saved.made_with(self.model, self.context.settings, self.exact))
        if problem:
            log.warning("the cells in %s are not used, the text is evaluated again: %s", path, problem)
            return 0
        return slot.n_past

    def close(self) -> None:
        """Store the learned costs and the rows of the self-test so far; free the cells."""
        try:
            if not self.model.closed:
                if self.sessions is not None:
                    self.sessions.close()
                self.tuning.store()
        finally:
            if self._self_test is not None:
                self._self_test.close()
            if self.drafter is not None:  # it may read the context of the target
                self.drafter.close()
            self.context.close()
            wait_briefly(False)

    def _plain_steps(self, passes: Mapping[int, int]) -> float:
        """What passes cost by the curve, in plain steps. `passes`: how many there were, by their number of tokens."""
        line = self.tuning.curve.at(sum(slot.n_past for slot in self.scheduler.slots.slots))
        return float(sum(count * line[n - 1] for n, count in passes.items()) / line[0])

    # The self-test in the background

    def _background(self) -> Background:
        settings = self.context.settings
        n_ctx, n_batch = min(self.context.n_ctx, N_CTX), min(self.context.n_batch, N_BATCH)
        own = replace(
            settings, n_ctx=n_ctx, n_cells=n_ctx, n_batch=n_batch, n_ubatch=min(self.context.n_ubatch, n_batch)
        )
        drafts = capability_of(self.model, self.context, exact=True)

        def make(context: ThreadedBackend) -> SelfTest:
            return exact_self_test(self.model, context, drafts, self.tuning.self_test)

        return Background(lambda: Context(self.model, own), make)

    def _continue(self, part: Callable[[], SelfTest | None]) -> None:
        """Run a part of the self-test and store its result, which decides about drafting when the test is complete."""
        try:
            test = part()
        except (DecodeFailed, ModelError) as error:
            self._end_self_test(f"`exact`: the self-test cannot be run ({error}); decoding plainly")
            return
        if test is None:
            return
        known = self.tuning.self_test.get("any_threads") == test.any_threads
        if known and not test.complete and test.comparison.rows <= self.tuning.rows_compared:
            return
        self.tuning.note_self_test(test.to_dict())
        self.tuning.store()
        if test.complete:
            self._end_self_test()

    def _end_self_test(self, failure: str = "") -> None:
        background, self._self_test = self._self_test, None
        assert background is not None
        background.close()
        capability, warning = _capability(self.model, self.context, self.tuning, self.exact)
        self.scheduler.forward.capability = capability
        if self._governor is not None:
            self._governor.levels = self._levels()
        if told := failure or warning:
            self.warnings.append(told)
            log.warning("%s", told)


class Lanes:
    """The lanes of an engine. `shared`: its own, for exact requests as well where the engine is exact.

    `exact` may be called from any thread, the rest from the one that decodes.
    """

    def __init__(self, shared: Lane) -> None:
        self.shared = shared
        self._exact: Lane | None = shared if shared.exact else None
        self._opening = threading.Lock()  # held while that lane is opened
        self._while_loading: list[str] = []

    def __iter__(self) -> Iterator[Lane]:
        """The lanes that are open."""
        yield self.shared
        if self._exact is not None and self._exact is not self.shared:
            yield self._exact

    def sequences(self) -> Iterator[Sequence]:
        """All that are admitted or wait."""
        for lane in self:
            yield from (*lane.scheduler.admitted, *lane.scheduler.waiting)

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
                settings = settings_for(shared.model.options, shared.context.n_ctx, shared.context.settings.threads)
                lane = Lane.open(shared.model, settings, True, shared.failed_stores, shared.opener)
                if shared.sessions is not None:
                    lane.keep_sessions(shared.sessions.files.limit)
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
        chosen = load_fallback.choose(
            model.path,
            model.n_gpu_layers,
            model.options,
            lambda options: contexts_to_try(options, TRIED_CONTEXT, threads, 1, None, exact=True),
        )
        if not chosen.warning:
            return
        if chosen.options.repack != model.options.repack:
            raise ModelError(f"{chosen.warning}; for exact requests open it with `repack=False`")
        self.warn(chosen.warning)
        log.warning("%s", chosen.warning)
        model.options = chosen.options  # flash attention off, in contexts that are made from now on

    def close(self) -> None:
        """Free all cells, the model and the draft model; again does nothing."""
        with self._opening:  # no context is opened of a model that is being freed
            for lane in self:
                lane.close()
            self.shared.model.close()


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


def _capability(model: Model, context: Context, tuning: Tuning, exact: bool) -> tuple[Capability, str]:
    capability = capability_of(model, context, exact)
    if exact and not tuning.exact and capability.kind != "none":
        if tuning.testing:
            return replace(capability, kind="none", reason=f"exact: {tuning.testing}"), ""
        warning = f"`exact`: {NO_EXACT_SETTINGS}; decoding plainly"
        return replace(capability, kind="none", reason=f"exact: {NO_EXACT_SETTINGS}"), warning
    if capability.kind == "none":
        return capability, f"drafting is off: {capability.reason}"
    return capability, ""
