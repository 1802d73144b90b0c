"""Own the contexts of an engine and the texts that they draft from. `Service`, `Batch` and streams drive it.

Contract: `prepare` and `abort` may be called from any thread, all else from the one that steps. Requests share one
context. The first exact request of an engine that is not exact opens a second one, of one slot: cells of other requests
act like holes, so such a request is alone on a context of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace

from rest_local import stop
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import Request, RequestState, Slot
from rest_local.decoding.decode_context import DecodeContext, open_exact
from rest_local.decoding.following import OpenDatastores
from rest_local.decoding.request import STRICT, Predictions, Strict
from rest_local.decoding.results import Statistics, Totals
from rest_local.decoding.scheduler import shifted
from rest_local.decoding.stream import Answer
from rest_local.decoding.verify import Relaxed, Verifier
from rest_local.drafting.sources import Sources
from rest_local.errors import CannotGenerate, ModelError, OptionError, PromptEmpty, PromptTooLong
from rest_local.llama.embedding import longest_text, pooling_of
from rest_local.llama.model import Model
from rest_local.llama.options import Sampling
from rest_local.llama.placeholders import text_of
from rest_local.llama.projector import Projector
from rest_local.llama.sampler import Sampler
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.policies import POLICIES
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.history import History
from rest_local.stop import Stop

# All requests may wait for an image so long, and a thread for the context of exact requests, before they look whether
# there is something else to do.
WAIT_S = 0.05
NO_PROJECTOR_HERE = "the model has no projector here, so it takes no images; give its `mmproj`"


class Decoder:
    """`contexts`: the one that requests share and, once it was needed, that of exact requests; none where the model
    reads texts in both directions (BERT), which makes vectors or scores and no text. `totals`: what was done so far.
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
        self.model, self.contexts, self.datastores = model, [context] if context else [], datastores
        self.n_ctx = context.backend.n_ctx if context else longest_text(model)
        self.predictions = Predictions(model.vocabulary, self.n_ctx)
        self.totals = Totals()
        self._config, self._projector, self._history = config, projector, history
        self._opening = threading.Lock()  # Held while the context for exact requests is opened.
        self._stop = Stop()  # Stops the thread that opens it.

    @property
    def context(self) -> DecodeContext:
        """Return what requests share: the cells, what a batch costs, its self-test. Raises CannotGenerate."""
        if not self.contexts:
            raise CannotGenerate(ranks=pooling_of(self.model) == "rank")
        return self.contexts[0]

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots that requests share; a reader in another thread sees a moment of them."""
        return self.contexts[0].scheduler.slots.slots if self.contexts else ()

    # Requests

    def prepare(self, request: Request, wake: Callable[[bool], None] | None = None) -> RequestState:
        """Make what `submit` takes. Everything that can be refused is refused here: PromptEmpty, PromptTooLong,
        OptionError, CannotGenerate, ModelError where the context for an exact request does not fit the memory.

        From any thread. The first exact request of an engine that is not exact takes seconds here, to open that context
        and, the first time, to measure; other requests go on meanwhile. `wake`: as of `RequestState`.
        """
        config, model, n_prompt = self._config, self.model, len(request.prompt)
        policy, exact = request.policy or config.policy, request.exact or self.context.exact
        request = replace(request, context_shift=request.context_shift or config.context_shift)
        if not n_prompt:
            raise PromptEmpty
        if n_prompt >= self.n_ctx and not request.context_shift:
            raise PromptTooLong(n_prompt, self.n_ctx)
        if request.images and self._projector is None:
            raise OptionError(f"images: {NO_PROJECTOR_HERE}")
        least = -math.inf if request.images else 0
        if any(not least <= token < model.n_vocab for token in request.prompt):
            raise OptionError(f"the prompt holds token ids outside 0..{model.n_vocab - 1}")
        if isinstance(policy, str) and policy not in POLICIES:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        self.datastores.named(request.datastores)
        relaxed = _relaxed(request.verify or config.verify, exact, request.sampling)
        request = replace(
            request,
            prompt=shifted(request.prompt, request.keep_tokens, self.n_ctx),
            prediction=self.predictions.take(request.prediction),
        )
        context = self._context_of(exact)
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
        answer.result.truncated = len(request.prompt) < n_prompt
        verifier = Verifier(
            sampler,
            ends,
            relaxed=relaxed,
            constraint=None if sampler.constraint.is_free else sampler.constraint,
            n_logprobs=request.logprobs,
            remaining=sampler.remaining if request.after_sampling and request.logprobs is not None else None,
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

    def _context_of(self, exact: bool) -> DecodeContext:
        """Return the context for such requests. The first exact request of an engine that is not exact opens another
        one, in seconds, which `Stop` ends in any thread that waits for it. Raises ModelError where it does not fit the
        memory, or the model is closed.
        """
        shared = self.context
        if shared.exact or not exact:
            return shared
        while not self._opening.acquire(timeout=WAIT_S):
            stop.check()
        try:
            if len(self.contexts) == 1:
                if self.model.closed:
                    raise ModelError(f"model {self.model.path}: is closed")
                with self._stop.here():
                    self.contexts.append(open_exact(shared))
            return self.contexts[1]
        finally:
            self._opening.release()

    def submit(self, state: RequestState) -> None:
        """Queue a prepared request, unless it was cancelled meanwhile; `step` until it is done."""
        if not state.done:
            self._context_of(state.request.exact).scheduler.submit(state)

    def cancel(self, state: RequestState) -> None:
        """End a request now, wherever it is."""
        for context in self.contexts:
            if state in context.scheduler.queue:
                context.scheduler.cancel(state)
                return
        state.finish("cancelled")

    # The loop

    def step(self, number: int = 0) -> bool:
        """Do one forward pass in each context that has work; False where none has. `number`: a name for `abort`."""
        if self.datastores.has_news:
            self.use_datastores()
        busy = [context for context in self.contexts if context.scheduler.busy]
        passes = False
        for context in busy:
            passes |= context.step(number) is not None
            if len(busy) > 1:
                context.scheduler.deliver()  # Text does not wait for the pass of the other one.
        if not passes and (awaited := [future for context in busy for future in context.scheduler.awaited]):
            wait(awaited, WAIT_S, FIRST_COMPLETED)
        return bool(busy)

    def abort(self, number: int | None = None) -> None:
        """Break off the current forward pass, from any thread. It is undone, and done again for requests that were not
        cancelled. With `number`: only the passes of the step of that number.
        """
        for context in self.contexts:
            context.backend.breaker.abort(number)

    def use_idle_time(self, seconds: float, number: int = 0) -> bool:
        """Go on, between requests, with measuring what `load` left; False if nothing is left. `number`: for `abort`."""
        idle = [context for context in self.contexts if context.idle_work_in == 0]
        for context in idle:
            context.use_idle_time(seconds, number)
        return bool(idle)

    @property
    def idle_work_in(self) -> float | None:
        """Return the seconds until there is idle work that there is not now; None: none is known."""
        return min((after for context in self.contexts if (after := context.idle_work_in) is not None), default=None)

    def forget(self) -> None:
        """Drop the kept prefixes: the next prompt is evaluated whole."""
        for context in self.contexts:
            context.scheduler.slots.forget()

    def use_datastores(self) -> None:
        """Draft from the datastores that were offered from now on, running requests as well. Not while a request is
        stepped: with a service, by way of `Service.run`.
        """
        for context in self.contexts:
            context.scheduler.deliver()  # Where tokens come from is read from the stores that they were drafted from.
        self.datastores.take()
        for context in self.contexts:
            failed, in_use = context.sources.failed, self.datastores.in_use
            failed[:] = [store for store in failed if not isinstance(store, Datastore) or store in in_use]
            for state in context.scheduler.queue:
                if isinstance(sources := state.speculation.sources, Sources):
                    sources.use(self.datastores.named(state.request.datastores, still=True), self._history)

    def close(self) -> None:
        """End all requests, keep what is to be kept, and free everything; again does nothing."""
        self._stop.set()

        def free() -> None:
            if self._projector:
                self._projector.close()
            with self._opening:  # No context is opened of a model that is being freed.
                for context in self.contexts:
                    context.close()
                self.model.close()

        with ExitStack() as stack:  # In reverse order, each whatever the others raise, an interrupt included.
            stack.callback(self.datastores.close)
            stack.callback(free)
            if self._history is not None:
                stack.callback(self._history.close)
            for context in self.contexts:
                stack.callback(context.scheduler.cancel_all)


def _relaxed(verify: Relaxed | Strict | None, exact: bool, sampling: Sampling) -> Relaxed | None:
    """Return the rule of relaxed verification, None for strict. Raises OptionError for what cannot go with it."""
    if verify is None or verify == STRICT:
        return None
    if exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if sampling.grammar is not None or sampling.logit_bias or sampling.penalizes:
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return verify
