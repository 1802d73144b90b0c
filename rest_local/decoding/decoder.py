"""Own the context of an engine and the texts that it drafts from. `Service`, `RunningBatch` and streams drive it.

Contract: `prepare` and `abort` may be called from any thread, all else from the one that steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace

from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import Request, RequestState, Slot
from rest_local.decoding.decode_context import DecodeContext
from rest_local.decoding.following import OpenDatastores
from rest_local.decoding.request import STRICT, Predictions, Strict
from rest_local.decoding.results import Statistics, Totals
from rest_local.decoding.stream import Answer
from rest_local.decoding.verify import Relaxed, Verifier
from rest_local.drafting.sources import Sources
from rest_local.errors import CannotGenerate, OptionError, PromptEmpty, PromptTooLong
from rest_local.llama.embedding import longest_text
from rest_local.llama.model import Model
from rest_local.llama.options import Sampling
from rest_local.llama.placeholders import text_of
from rest_local.llama.projector import Projector
from rest_local.llama.sampler import Sampler
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.policies import POLICIES
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.history import History

WAIT_S = 0.05  # So long all requests may wait for an image before commands are looked at again.
NO_PROJECTOR_HERE = "the model has no projector here, so it takes no images; give its `mmproj`"


class Decoder:
    """Answers the requests of an engine, one forward pass at a time. `totals`: what was done so far.

    `context`: None if the model reads texts in both directions (BERT), which makes vectors or scores and no text.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        context: DecodeContext | None,
        datastores: OpenDatastores,
        projector: Projector | None,
        history: History | None,
    ) -> None:
        self.model, self._context, self.datastores = model, context, datastores
        self.n_ctx = context.backend.n_ctx if context else longest_text(model)
        self.predictions = Predictions(model.vocabulary, self.n_ctx)
        self.totals = Totals()
        self._config, self._projector, self._history = config, projector, history

    @property
    def context(self) -> DecodeContext:
        """Return what requests share: the cells, what a batch costs, its self-test. Raises CannotGenerate."""
        if self._context is None:
            raise CannotGenerate
        return self._context

    @property
    def generates(self) -> bool:
        """Return True if there is a context, and text can be generated."""
        return self._context is not None

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots that requests share. To a reader in another thread they may change meanwhile."""
        return self._context.scheduler.slots.slots if self._context else ()

    # Requests

    def prepare(self, request: Request, wake: Callable[[bool], None] | None = None) -> RequestState:
        """Make the state of a request for `submit`. From any thread. `wake`: as of `RequestState`.

        Everything that can be refused is refused here: raises PromptEmpty, PromptTooLong, OptionError, CannotGenerate.
        """
        config, model, context, n_prompt = self._config, self.model, self.context, len(request.prompt)
        policy = request.policy or config.policy
        if not n_prompt:
            raise PromptEmpty
        if n_prompt >= self.n_ctx:
            raise PromptTooLong(n_prompt, self.n_ctx)
        if request.images and self._projector is None:
            raise OptionError(f"images: {NO_PROJECTOR_HERE}")
        least = -math.inf if request.images else 0
        if any(not least <= token < model.n_vocab for token in request.prompt):
            raise OptionError(f"the prompt holds token ids outside 0..{model.n_vocab - 1}")
        if isinstance(policy, str) and policy not in POLICIES:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        self.datastores.named(request.datastores)
        relaxed = _relaxed(request.verify or config.verify, context.exact, request.sampling)
        request = replace(request, prediction=self.predictions.take(request.prediction))
        most = context.backend.n_ubatch
        for chunk in request.images:
            if not chunk.causal and len(chunk) > most:
                raise OptionError(
                    f"images: an image of {len(chunk)} tokens is evaluated at once, and a batch has {most}; open the "
                    "model with a larger `n_ubatch`"
                )
        vocabulary = model.vocabulary
        sampler = Sampler(vocabulary, request.sampling, min_tokens=request.min_tokens, ignore_end=request.ignore_end)
        sampler.observe(text_of(request.prompt) if request.images else request.prompt)
        ends, stops = vocabulary.is_end, frozenset(request.stop_tokens)
        if stops:
            ends = lambda token: token in stops or vocabulary.is_end(token)  # noqa: E731
        answer = Answer(Statistics(), Detokenizer(vocabulary.piece), request.max_tokens, request.stop, ends)
        verifier = Verifier(
            sampler,
            ends,
            relaxed=relaxed,
            constraint=None if sampler.constraint.is_free else sampler.constraint,
            n_logprobs=request.logprobs,
        )

        def connect(slot: Slot) -> Sources:
            sources = context.sources.take(slot, context.scheduler.queue)
            sources.use(self.datastores.named(request.datastores, still=True), self._history)
            return sources

        def finished(state: RequestState) -> None:
            result, statistics = state.answer.result, state.statistics
            plain_ms = statistics.plain_step_ms(context.tuning.curve, context.tuning.final)
            if plain_ms:
                result.draft = replace(result.draft, plain_step_ms=plain_ms + context.auto.shared.driver.step)
            self.totals.add(statistics, len(result.tokens))
            if self._history is not None:
                self._history.add(result.tokens)

        def spell(tokens: Sequence[int]) -> str:
            return b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace")

        return RequestState(
            request,
            context.policy(policy) if isinstance(policy, str) else policy,
            verifier,
            answer,
            connect,
            finished,
            wake=wake,
            decode=spell if request.origins else None,
            encode=self._projector.rows if self._projector else None,
            is_control=vocabulary.is_control,
        )

    def submit(self, state: RequestState) -> None:
        """Queue a prepared request, unless it was cancelled meanwhile; `step` until it is done."""
        if not state.done:
            self.context.scheduler.submit(state)

    def cancel(self, state: RequestState) -> None:
        """End a request now, wherever it is."""
        scheduler = self.context.scheduler
        if state in scheduler.queue:
            scheduler.cancel(state)
        else:
            state.finish("cancelled")

    # The loop

    def step(self, number: int = 0) -> bool:
        """Do one forward pass. Return False if there is no work. `number`: a name for `abort`."""
        if self.datastores.has_news:
            self.use_datastores()
        if self._context is None or not self._context.scheduler.busy:
            return False
        if self._context.step(number) is None and (awaited := self._context.scheduler.awaited):
            wait(awaited, WAIT_S, FIRST_COMPLETED)
        return True

    def abort(self, number: int | None = None) -> None:
        """Break off the current forward pass, from any thread. With `number`: only the passes of that step.

        The pass is undone, and done again for requests that were not cancelled.
        """
        if self._context:
            self._context.backend.breaker.abort(number)

    def use_idle_time(self, seconds: float) -> bool:
        """Save idle texts between requests. Return False if there is nothing to save now."""
        if self._context is None or self.idle_work_in != 0:
            return False
        self._context.use_idle_time(seconds)
        return True

    @property
    def idle_work_in(self) -> float | None:
        """Return the seconds until there is idle work. 0: there is some now. None: none is known."""
        return self._context.idle_work_in if self._context else None

    def forget(self) -> None:
        """Free the cells of idle slots, so that the next prompt is evaluated whole."""
        if self._context:
            self._context.scheduler.slots.forget()

    def use_datastores(self) -> None:
        """Draft from the datastores that were offered, for running requests as well.

        Not while a request is stepped: with a service, call it through `Service.run`.
        """
        if self._context:
            self._context.scheduler.deliver()  # The origins of tokens are read from the stores that drafted them.
        self.datastores.take()
        if self._context:
            failed, in_use = self._context.sources.failed, self.datastores.in_use
            failed[:] = [store for store in failed if not isinstance(store, Datastore) or store in in_use]
            for state in self._context.scheduler.queue:
                if isinstance(sources := state.speculation.sources, Sources):
                    sources.use(self.datastores.named(state.request.datastores, still=True), self._history)

    def close(self) -> None:
        """End all requests, store what is to be kept, and free everything. A second call does nothing."""

        def free() -> None:
            if self._projector:
                self._projector.close()
            if self._context:
                self._context.close()
            self.model.close()

        with ExitStack() as stack:  # They run in reverse order, each whatever the others raise, even an interrupt.
            stack.callback(self.datastores.close)
            stack.callback(free)
            if self._history is not None:
                stack.callback(self._history.close)
            if self._context:
                stack.callback(self._context.scheduler.cancel_all)


def _relaxed(verify: Relaxed | Strict | None, exact: bool, sampling: Sampling) -> Relaxed | None:
    """Return the rule of relaxed verification, None for strict. Raises OptionError for options that exclude it."""
    if verify is None or verify == STRICT:
        return None
    if exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if sampling.grammar is not None or sampling.logit_bias or sampling.penalizes:
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return verify
