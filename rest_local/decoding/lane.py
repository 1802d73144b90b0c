"""One context and all that decodes on it: what it can verify, what it costs, its policies, its slots.

Contract: an engine has one lane, and a second, of one slot, for requests that ask for exactness on an engine that is
not exact: cells of others act like holes there, so such a request is alone on a context of its own (DESIGN.md
section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rest_local.decoding.backend import Capability
from rest_local.decoding.generation import Generation
from rest_local.decoding.job import OwnedChooser
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.slot import Slot
from rest_local.decoding.tuning import Tuning, capability_of, tune
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.draft_model import DraftModel, Follower
from rest_local.drafting.sources import Searchable, Sources
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import Rope
from rest_local.planning.auto import Auto
from rest_local.planning.policies import POLICIES, make_policy
from rest_local.planning.policy import Policy
from rest_local.retrieval.datastore import Datastore


class Lane:
    """`warnings`: what is off, and why."""

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
        self.capability, warning = _capability(model, context, tuning, exact)
        self.warnings = [told for told in (warning, _beyond_training(model, context)) if told]
        self.policies: dict[str, Policy] = {name: make_policy(name, tuning.curve) for name in POLICIES}
        auto = self.policies["auto"]
        assert isinstance(auto, Auto)
        auto.has_draft_model = draft_model is not None
        self.scheduler = Scheduler(context, self.capability, tuning.curve)
        self.aside: list[Searchable] = [] if aside is None else aside
        self.draft_model = draft_model
        self._sources: dict[int, Sources] = {}  # by slot: what is indexed of its text stays with it

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

    def generation(
        self,
        slot: Slot,
        policy: Policy,
        sampler: OwnedChooser,
        relaxed: Relaxed | None,
        stores: Sequence[Datastore],
        history: Searchable | None,
    ) -> Generation:
        """A request's, in its slot."""
        sources = self._sources.get(slot.first_id)
        if sources is None or self._in_use(sources):
            follower = Follower(self.draft_model) if self.draft_model else None
            sources = Sources([], self.model.n_vocab, aside=self.aside, follower=follower)
            self._sources[slot.first_id] = sources
        sources.ask(stores, history)
        ends: Callable[[int], bool] = self.model.vocabulary.is_end
        return Generation(self.context, slot, policy, sources, sampler, self.capability, ends, relaxed)

    def _in_use(self, sources: Sources) -> bool:
        """Whether they follow somebody who began in this slot and, once sent back, went on in another."""
        jobs = (*self.scheduler.admitted, *self.scheduler.waiting)
        return any(job.generation is not None and job.generation.sources is sources for job in jobs)

    def close(self) -> None:
        """Keep what was learned of the costs; free the cells."""
        try:
            if not self.model.closed:
                self.tuning.store()
        finally:
            self.context.close()


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
        reason = "no settings of this backend verify drafts bit for bit"
        return replace(capability, kind="none", reason=f"exact: {reason}"), f"--exact: {reason}; decoding plainly"
    if capability.kind == "none":
        return capability, f"drafting is off: {capability.reason}"
    return capability, ""
