"""One context and all that decodes on it: what it can verify, what it costs, its policies, its slots.

Contract: an engine has one lane, and a second, of one slot, for requests that ask for exactness on an engine that is
not exact: cells of others act like holes there, so such a request is alone on a context of its own (DESIGN.md
section 4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from rest_local.calibration.cost import LARGEST
from rest_local.calibration.measuring import Measured, Progress
from rest_local.calibration.self_test import N_BATCH, N_CTX, Background, SelfTest
from rest_local.calibration.settings import capability_of
from rest_local.calibration.threads import ThreadGovernor
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
from rest_local.drafting.draft_model import DraftModel, Follower
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import DecodeFailed, ModelError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import Rope
from rest_local.planning.auto import Auto
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

log = logging.getLogger("rest_local.engine")
NO_EXACT_SETTINGS = "no settings of this backend verify drafts bit for bit"


class Lane:
    """`warnings`: what is off, and why. An exact lane whose self-test is not complete decodes plainly and continues it
    in the background; drafting begins when it has found nothing.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        tuning: Tuning,
        exact: bool,
        aside: list[Searchable] | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model, self.context, self.tuning, self.exact = model, context, tuning, exact
        capability, warning = _capability(model, context, tuning, exact)
        self.warnings = [told for told in (warning, _beyond_training(model, context)) if told]
        self.auto = Auto(tuning.curve, has_draft_model=draft_model is not None)
        self._policies: dict[str, Policy] = {Auto.name: self.auto}
        self.scheduler = Scheduler(context, capability, tuning.curve)
        self.aside: list[Searchable] = [] if aside is None else aside
        self.draft_model = draft_model
        self._sources: dict[int, Sources] = {}  # by slot: what is indexed of its text stays with it
        self._self_test = self._background() if exact and tuning.testing else None
        adapts = not exact and not context.settings.threads and context.threads > 1
        self._governor = ThreadGovernor(context.threads) if adapts else None
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
        aside: list[Searchable] | None = None,
        draft_model: DraftModel | None = None,
    ) -> Lane:
        """Measures what was not measured before. `aside`: stores that failed, shared by lanes, as is `draft_model`.
        Raises ModelError.
        """
        if exact:
            settings = replace(settings, n_slots=1, n_cells=settings.n_ctx)
        context, tuning = tune(model, settings, exact)
        try:
            return cls(model, context, tuning, exact, aside, draft_model)
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
            follower = Follower(self.draft_model) if self.draft_model else None
            sources = Sources([], self.model.n_vocab, aside=self.aside, follower=follower)
            self._sources[slot.first_id] = sources
        return sources

    def _in_use(self, sources: Sources) -> bool:
        sequences = (*self.scheduler.admitted, *self.scheduler.waiting)
        return any(sequence.has_begun and sequence.sources is sources for sequence in sequences)

    @property
    def threads(self) -> int:
        """Of the next forward pass."""
        return self._governor.threads if self._governor else self.context.threads

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        return self._self_test is not None or (self._drafts and self._calibration.has_idle_work)

    @property
    def _drafts(self) -> bool:
        """Whether it matters what a batch costs."""
        return self.capability.kind != "none"

    def after_pass(self, seconds: float) -> None:
        """A forward pass took `seconds`: the number of threads may change, and a part of the self-test may follow, or
        a batch whose price is uncertain.
        """
        if (governor := self._governor) is not None:
            n_tokens = self.context.batch.n_tokens
            if n_tokens > LARGEST:
                governor.restart()
            elif governor.after_pass(n_tokens, seconds, self._plain_steps):
                self.context.use_threads(governor.threads)
        if (background := self._self_test) is not None:
            self._continue(lambda: background.after_pass(seconds))
        elif self._drafts:
            self._calibration.after_pass(seconds)

    def use_idle_time(self, seconds: float) -> None:
        """Continue the self-test for so long, or time one batch whose price is uncertain."""
        if (background := self._self_test) is not None:
            self._continue(lambda: background.run(seconds))
        elif self._drafts:
            self._calibration.use_idle_time()

    def compare(self) -> None:
        """Run the self-test of fast settings, while nothing is asked, if it was never run: some seconds. Kept prefixes
        are lost.
        """
        if self.exact or self.tuning.self_test:
            return
        self.scheduler.slots.forget()
        self.tuning.self_test = fast_self_test(self.model, self.context, self.capability).to_dict()

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure thoroughly, in a context of its own: `tune_thoroughly`. What is stored is used from the next start
        on.
        """
        self.tuning, result = tune_thoroughly(self.model, self.context.settings, self.tuning, report)
        return result

    def close(self) -> None:
        """Keep what was learned of the costs, and the rows of the self-test so far; free the cells."""
        try:
            if not self.model.closed:
                self.tuning.store()
        finally:
            if self._self_test is not None:
                self._self_test.close()
            self.context.close()

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

        def make(context: Backend) -> SelfTest:
            return exact_self_test(self.model, context, drafts, self.tuning.self_test)

        return Background(lambda: Context(self.model, own), make)

    def _continue(self, part: Callable[[], SelfTest | None]) -> None:
        """Runs a part; what it found is kept, and decides about drafting when nothing is left to compare."""
        try:
            test = part()
        except (DecodeFailed, ModelError) as error:
            self._end_self_test(f"--exact: the self-test cannot be run ({error}); decoding plainly")
            return
        if test is None or not (test.complete or test.comparison.rows > self.tuning.rows_compared):
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
        if told := failure or warning:
            self.warnings.append(told)
            log.warning("%s", told)


def _beyond_training(model: Model, context: Context) -> str:
    """A warning where the context is longer than what the model was trained for, and nothing stretches it."""
    if not 0 < model.n_ctx_train < context.n_ctx or model.is_recurrent or model.options.rope != Rope():
        return ""
    return (
        f"a context of {context.n_ctx} tokens: the model was trained for {model.n_ctx_train}, and gets worse behind; "
        "lower --ctx, or give --rope-scaling or its like"
    )


def _capability(model: Model, context: Context, tuning: Tuning, exact: bool) -> tuple[Capability, str]:
    capability = capability_of(model, context, exact)
    if exact and not tuning.exact and capability.kind != "none":
        if tuning.testing:
            return replace(capability, kind="none", reason=f"exact: {tuning.testing}"), ""
        warning = f"--exact: {NO_EXACT_SETTINGS}; decoding plainly"
        return replace(capability, kind="none", reason=f"exact: {NO_EXACT_SETTINGS}"), warning
    if capability.kind == "none":
        return capability, f"drafting is off: {capability.reason}"
    return capability, ""
