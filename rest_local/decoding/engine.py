"""The engine: a model with its KV cache, datastores and history, and the calls that generate with it.

    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="")
        print(stream.result.draft.tokens_per_step)

Contract:

- An engine belongs to one thread; `Service` and `AsyncEngine` give it a thread of its own.
- With one slot, a request cancels the one before. With more slots, as many run in the same forward passes.
- The prefix that a prompt shares with an earlier one stays in the KV cache.
- Drafting, the policy, datastores and history change the speed of an answer. In exact mode they change no bit of it, in
  fast mode a token only at a near-tie (DESIGN.md section 4).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import CostCurve
from rest_local.calibration.measuring import Measured, Progress
from rest_local.chat.images import Images
from rest_local.chat.tools import tools_of
from rest_local.decoding.batch import Finished, answers
from rest_local.decoding.chat import Chat
from rest_local.decoding.config import EngineConfig, EngineOptions
from rest_local.decoding.core import RequestState, Slot
from rest_local.decoding.decode_context import DecodeContext
from rest_local.decoding.following import DatastoreSwap, Follower
from rest_local.decoding.images import ImagePrompt, image_prompt
from rest_local.decoding.opening import (
    Unusable,
    build_missing,
    open_context,
    open_datastores,
    open_encoder,
    open_history,
    open_model,
    open_projector,
)
from rest_local.decoding.request import CHAT_ONLY, STRICT, ChatOptions, Predictions, Request, RequestOptions, Strict
from rest_local.decoding.results import Statistics, Totals
from rest_local.decoding.scheduler import shifted
from rest_local.decoding.stream import Answer, Piece, Result
from rest_local.decoding.streaming import ChatStream, Stream
from rest_local.decoding.verify import Relaxed, Verifier
from rest_local.drafting.sources import Sources
from rest_local.errors import CannotGenerate, ModelError, OptionError, PromptEmpty, PromptTooLong
from rest_local.kv_cache.backend import Capability
from rest_local.llama.embedding import longest_text, pooling_of
from rest_local.llama.options import Sampling
from rest_local.llama.placeholders import text_of
from rest_local.llama.projector import Projector
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling_defaults import SamplingDefaults, recommended
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.policies import POLICIES
from rest_local.planning.policy import Policy
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.history import History
from rest_local.retrieval.home import datastore_path
from rest_local.stop import Closing

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Engine", "Piece", "Result", "Stream"]

S = TypeVar("S", bound=Stream)
WAIT_S = 0.05  # for an image that all requests wait for, before commands are looked at again
NO_PROJECTOR_HERE = "the model has no projector here, so it takes no images; give its `mmproj`"


class Engine(Closing):
    """Make one with `Engine.load` or from an `EngineConfig`; a context manager, which closes it at the end.

    Not thread safe, except `request`, `chat_request`, `prepare` and what only reads: `Service` gives it a thread of its
    own.

    model        the weights and the vocabulary
    projector    what lets prompts contain images; None where they are refused
    datastores   those that requests draft from
    contexts     what decodes: the context that requests share and, once it was needed, that of exact requests; none
                 where the model reads texts in both directions (BERT), which makes vectors or scores and no text
    swap         where other threads put datastores for the next step
    totals       what was done since it was opened
    sampling     how the commands sample a request, by what it names: `sampling(top_k=20)` is a `Sampling` whose other
                 fields are those of the config, else what the model's file recommends, else llama.cpp's defaults
    """

    def __init__(self, config: EngineConfig, unusable: Unusable | None = None) -> None:
        """Open the model and the datastores; estimate the cost curve the first time.

        unusable: decides about a datastore that cannot be opened, by default its error is raised. Takes the load time
        of the model and, the first time, up to 15 plain steps; `tune` measures thoroughly. Raises
        ModelError, DatastoreError, OptionError.
        """
        self.config = config
        self.projector: Projector | None = None
        self.datastores: list[Datastore] = []
        self.contexts: list[DecodeContext] = []
        self.swap, self.totals = DatastoreSwap(), Totals()
        self.follower: Follower | None = None
        self._history: History | None = None
        self._warnings: list[str] = []  # of loading
        self.sampling = SamplingDefaults(config.sampling)
        self._running: Stream | None = None
        self._at_close = ExitStack()
        self._opening = threading.Lock()  # held while the context for exact requests is opened
        encoder = open_encoder(config)
        if encoder is not None:
            self.model = encoder
            self.predictions = Predictions(encoder.vocabulary, self.n_ctx)
            return
        with ExitStack() as undo:
            self.model, warning = open_model(config, undo)
            self.projector, no_images = open_projector(config, self.model, undo)
            self.datastores = open_datastores(config, self.model, undo, unusable or build_missing(config))
            context = open_context(config, self.model, undo)
            self.contexts.append(context)
            advice, ignored = recommended(self.model.metadata)
            self.sampling = SamplingDefaults(config.sampling, advice)
            self._warnings += filter(None, (warning, no_images, *ignored))
            if config.history:
                self._history = open_history(self.model)
            self.predictions = Predictions(self.model.vocabulary, self.n_ctx)
            if config.follow:
                self.follower = Follower(self, map(datastore_path, config.datastores))
            undo.pop_all()
        if self.follower:
            self.follower.start()

    @classmethod
    def load(cls, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> Engine:
        """Open a model (None: the default model) with the fields of `EngineConfig`. Raises as the constructor."""
        return cls(EngineConfig(model=model, **options))

    @property
    def generates(self) -> bool:
        """Whether the model makes text; one that reads in both directions makes vectors or scores only."""
        return bool(self.contexts)

    @property
    def context(self) -> DecodeContext:
        """What requests share: the cells, what a batch costs, its self-test. Raises CannotGenerate."""
        if not self.contexts:
            raise CannotGenerate(ranks=pooling_of(self.model) == "rank")
        return self.contexts[0]

    @property
    def warnings(self) -> list[str]:
        """What is switched off, and why. The first exact request of an engine that is not exact may add to them."""
        of_contexts = (warning for context in self.contexts for warning in context.warnings)
        return list(dict.fromkeys((*self._warnings, *of_contexts)))

    @property
    def exact(self) -> bool:
        """Whether every request is decoded in settings that give the bits of plain decoding."""
        return self.context.exact

    @property
    def capability(self) -> Capability:
        """What drafts the model can verify, and why."""
        return self.context.capability

    @property
    def n_ctx(self) -> int:
        """Tokens of context of one request, or of one text that becomes a vector."""
        return self.context.backend.n_ctx if self.contexts else longest_text(self.model)

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots that requests share; a reader in another thread sees a moment of them."""
        return self.contexts[0].scheduler.slots.slots if self.contexts else ()

    def statistics(self) -> dict[str, Any]:
        """Totals since it was opened (`Totals`), and now: tokens in the cells of all slots (shared ones for each),
        how many cells there are, and the age of the cost curve in seconds.
        """
        return {
            **self.totals.to_dict(),
            "passes": sum(context.scheduler.times.generating for context in self.contexts),
            "cells_used": sum(slot.n_past for slot in self.slots),
            "cells": self.context.backend.n_cells if self.contexts else 0,
            "checkpoint_bytes": sum(slot.checkpoints.size for slot in self.slots),
            "cost_curve_age_s": round(self.context.tuning.age, 1) if self.contexts else 0.0,
        }

    @property
    def cost_curve(self) -> CostCurve:
        return self.context.tuning.curve

    @property
    def calibration(self) -> dict[str, Any]:
        """The state of the cost curve: final or provisional, its age, noise and uncertainty by batch size."""
        return self.context.tuning.state()

    @property
    def self_test(self) -> dict[str, Any]:
        """Rows compared with plain decoding in these settings, differences, flips per 10 000 and the largest gap; empty
        where nothing was compared yet (`compare`).
        """
        return self.context.tuning.self_test

    def compare(self, seconds: float = math.inf) -> None:
        """Run the self-test of `self_test`, if it was never run: some seconds, for an exact engine at most `seconds`.
        Only while no request runs. The prefix cache is lost.
        """
        self.context.compare(seconds)

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure the cost curve thoroughly and keep it for the next start: about 700 plain steps. Only while no
        request runs. Raises ModelError, and ValueError where the clock stands still.
        """
        return self.context.tune(report)

    def save_cells(self, path: Path) -> bool:
        """Write what the KV cache holds of a text to a file, for `load_cells` of a later engine; False, with a warning
        in the log, where that fails or nothing is held. Only while no request runs. Takes the space of the cells.
        """
        return self.context.save_cells(path)

    def load_cells(self, path: Path) -> int:
        """Have the text of `save_cells` in the KV cache, so that a prompt that begins with it need not be evaluated;
        how many tokens. Cells that are damaged, of another model, of other settings or of another build of llama.cpp
        are left out with a warning in the log. Only while no request runs.
        """
        return self.context.load_cells(path)

    @property
    def settings(self) -> dict[str, Any]:
        """What the engine computes with: context settings, threads in use, exact, policy, verify."""
        context, backend = self.context, self.context.backend
        return {
            **context.tuning.settings.to_dict(),
            "threads": backend.threads,
            "threads_batch": backend.threads_batch,
            "n_ctx": self.n_ctx,
            "n_batch": backend.n_batch,
            "n_ubatch": backend.n_ubatch,
            "exact": self.exact,
            "policy": self.config.policy,
            "verify": str(self.config.verify or STRICT),
            "draft_model": context.drafter.path if context.drafter else None,
        }

    def generate(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Stream:
        """Evaluate the prompt and return the stream of its continuation. `options`: the fields of `Request`.

        On an engine of one slot, the stream that ran before is cancelled. Raises PromptEmpty, PromptTooLong,
        OptionError, DecodeFailed.
        """
        return self._begin(Stream(self.prepare(self.request(prompt, **options)), self._step_until, self.cancel))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> ChatStream:
        """Continue a conversation: the answer of the model to `messages`, as a stream whose `message` is the answer in
        OpenAI's form.

        `messages`: in OpenAI's form, rendered by the model's own chat template. Parts of type `image_url` hold images
        as `data:` URLs, where the model has a projector. The model goes on after the text of a last message of the
        assistant, and the answer has what comes after it.
        `tools`: functions that the model may call, in OpenAI's form. `tool_choice`: `auto`, `none`, `required`, or an
        object that names the function to call. `parallel_tool_calls`: a forced call may be several.
        `json_schema`: the schema that the text of the answer has to be valid for; True for any JSON object.
        `template_variables`: further names for the template, such as `enable_thinking`.
        All others are the fields of `Request`. A context shift keeps the tools and the system prompt, unless
        `keep_tokens` is given.

        Raises what `generate` raises, ModelError where the model has no chat template, and TemplateFailed.
        """
        request, chat = self.chat_request(messages, **options)
        return self._begin(ChatStream(self.prepare(request), self._step_until, self.cancel, chat))

    def batch(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Answer many requests (of `request` or `chat_request`), as many at a time as there are slots, and yield each
        as it ends, with its number among `requests`. An error ends the request that it belongs to, and no other.

        A list is decoded in an order in which prompts that begin alike are neighbours; any other iterable in its order,
        taken as slots become free. Closing the iterator cancels what runs. The answers of an engine of one slot are
        decoded one after another: give `slots`.
        """
        return answers(self, requests)

    def request(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Request:
        """The request that `generate` makes of its arguments, for `Service.submit`. From any thread.

        Special tokens in a text prompt count as such. Of a prediction that is longer than the context and longer than
        65 536 tokens only the beginning is used, with one warning in the log. Raises OptionError, PromptTooLong.
        """
        given: dict[str, Any] = {**options}
        if isinstance(prompt, str):
            shifts = self.config.context_shift or options.get("context_shift", False)
            prompt = self.tokenize(prompt, most=None if shifts else self.n_ctx, owner="")
        if isinstance(prediction := options.get("prediction"), str):
            given["prediction"] = self.predictions.tokenize(prediction)
        if "images" in options:
            given["images"] = tuple(options["images"])
        for name in ("stop", "stop_tokens", "datastores"):
            if isinstance(given.get(name), str):
                raise OptionError(f"{name}: give a sequence, not one text")
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return Request([int(token) for token in prompt], **given)

    def chat_request(self, messages: Sequence[Mapping[str, Any]], **given: Unpack[ChatOptions]) -> tuple[Request, Chat]:
        """The request that `chat` makes, and what makes its result a message. Any thread. Raises as `chat`."""
        options: dict[str, Any] = {**given}
        of_chat = {name: options.pop(name) for name in CHAT_ONLY & options.keys()}
        chat = Chat(self.model, messages, **of_chat | {"tools": tools_of(of_chat.get("tools"))})
        sampling = options.get("sampling", Sampling())
        if (grammar := chat.grammar()) is not None:
            if sampling.grammar is not None:
                raise OptionError("sampling: a forced tool call or json_schema is a grammar as well; give one of them")
            options["sampling"] = replace(sampling, grammar=grammar)
        shifts = self.config.context_shift or options.get("context_shift", False)
        if "keep_tokens" not in options and shifts:
            options["keep_tokens"] = len(self.image_prompt(chat.beginning(), chat.images)[0])
        most = None if shifts else self.n_ctx
        prompt, chunks = self.image_prompt(chat.prompt, chat.images, most=most, owner="")
        if chunks:
            options["images"] = chunks
        return self.request(prompt, **options), chat

    def image_prompt(
        self, text: str, images: Images | Mapping[str, bytes], *, most: int | None = None, owner: str | None = None
    ) -> ImagePrompt:
        """The tokens of a text with images: `prompt` and `images` of a request. From any thread.

        `images`: by the text that stands for each of them in `text`, such as `<image>`, the bytes of a file in PNG,
        JPEG, GIF or WebP. `most`: tokens. `owner`: as for `tokenize`. Takes a tenth of a second for each image that is
        new. Raises OptionError where there is no projector, and for what cannot be read as an image; PromptTooLong.
        """
        if not images:
            return self.tokenize(text, most=most, owner=owner), ()
        given = images if isinstance(images, Images) else Images(dict(images))
        if self.projector is None:
            raise OptionError(NO_PROJECTOR_HERE, given.first_place)
        return image_prompt(self.model.vocabulary, self.projector, text, given.data, given.places, most)

    def _begin(self, stream: S) -> S:
        """Evaluate the prompt of a stream. Raises what the request ends with."""
        if self._running and len(self.slots) == 1:
            self._running.cancel()
        self._running, state = stream, stream.state
        try:
            self.submit(state)
            self._step_until(lambda: state.done or (state.text.has_slot and not state.text.is_prefilling))
            if stream.error:
                raise stream.error
        except BaseException:
            stream.cancel()
            raise
        return stream

    def _step_until(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        """Do forward passes until then; False where `timeout` seconds were over before."""
        over = math.inf if timeout is None else time.monotonic() + timeout
        while not until():
            if time.monotonic() >= over:
                return False
            self.step()
        return True

    def tokenize(self, text: str, *, most: int | None = None, owner: str | None = None) -> list[int]:
        """Token ids with the model's start token and parsed special tokens. A start token in the text is not doubled.
        `owner`: as for `Vocabulary.tokenize`.

        Raises PromptTooLong where there are more than `most`, as soon as that is known. The number in it is then an
        estimate, from the part of the text that was tokenized.
        """
        vocabulary = self.model.vocabulary
        tokens: list[int] = vocabulary.tokenize(text, special=True, add_special=True, most=most, owner=owner).tolist()
        if most is not None and len(tokens) > most:
            read = sum(len(vocabulary.piece(token)) for token in tokens)
            estimate = round(len(tokens) * len(text.encode("utf-8", "replace")) / max(read, 1))
            raise PromptTooLong(max(estimate, len(tokens)), most, estimated=estimate > len(tokens))
        if len(tokens) > 1 and tokens[0] == tokens[1] == vocabulary.bos:
            del tokens[0]
        if not tokens and vocabulary.bos is not None:
            tokens = [vocabulary.bos]
        return tokens

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation in the model's own chat template, up to where the answer begins, as `chat` evaluates it.
        Raises ModelError, OptionError, TemplateFailed.
        """
        return Chat(self.model, messages).prompt

    def forget(self) -> None:
        """Drop the kept prefixes: the next prompt is evaluated whole."""
        for context in self.contexts:
            context.scheduler.slots.forget()

    # What `Service`, `Batch` and the streams drive

    def prepare(self, request: Request, wake: Callable[[bool], None] | None = None) -> RequestState:
        """A request to `submit`. Everything that can be refused is refused here: PromptEmpty, PromptTooLong,
        OptionError, CannotGenerate, ModelError where the context for an exact request does not fit the memory.

        From any thread. The first exact request of an engine that is not exact takes seconds here, to open that context
        and, the first time, to measure; other requests go on meanwhile.
        """
        n_prompt, policy = len(request.prompt), request.policy or self.config.policy
        exact = request.exact or self.exact
        request = replace(request, context_shift=request.context_shift or self.config.context_shift)
        self._check(request, policy)
        relaxed = _relaxed(request.verify or self.config.verify, exact, request.sampling)
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
        vocabulary = self.model.vocabulary
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
        return RequestState(
            request,
            context.policy(policy) if isinstance(policy, str) else policy,
            verifier,
            answer,
            partial(self._connect, context, request.datastores),
            partial(self._count, context),
            wake=wake,
            decode=self._decode if request.origins else None,
            encode=self.projector.rows if self.projector else None,
            is_control=vocabulary.is_control,
        )

    def _check(self, request: Request, policy: str | Policy) -> None:
        """Raises what is wrong with a request for this model and these datastores."""
        n_prompt = len(request.prompt)
        if not n_prompt:
            raise PromptEmpty
        if n_prompt >= self.n_ctx and not request.context_shift:
            raise PromptTooLong(n_prompt, self.n_ctx)
        if request.images and self.projector is None:
            raise OptionError(f"images: {NO_PROJECTOR_HERE}")
        least = -math.inf if request.images else 0
        if any(not least <= token < self.model.n_vocab for token in request.prompt):
            raise OptionError(f"the prompt holds token ids outside 0..{self.model.n_vocab - 1}")
        if isinstance(policy, str) and policy not in POLICIES:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        self._stores(request.datastores)

    def _context_of(self, exact: bool) -> DecodeContext:
        """The context for such requests. The first exact request of an engine that is not exact opens another one, in
        seconds. Raises ModelError where that does not fit the memory, or the model is closed.
        """
        shared = self.context
        if shared.exact or not exact:
            return shared
        with self._opening:
            if len(self.contexts) == 1:
                if self.model.closed:
                    raise ModelError(f"model {self.model.path}: is closed")
                self.contexts.append(shared.open_exact())
            return self.contexts[1]

    def _connect(self, context: DecodeContext, names: Sequence[str] | None, slot: Slot) -> Sources:
        """The sources of a request that is admitted to a slot."""
        sources = context.sources(slot)
        sources.use(self._stores(names, still=True), self._history)
        return sources

    def _count(self, context: DecodeContext, state: RequestState) -> None:
        """A request of that context has ended."""
        result, statistics = state.answer.result, state.statistics
        plain_ms = statistics.plain_step_ms(context.tuning.curve, context.tuning.final)
        if plain_ms:
            result.draft = replace(result.draft, plain_step_ms=plain_ms + context.auto.shared.driver.step)
        self.totals.add(statistics, len(result.tokens))
        if self._history is not None:
            self._history.add(result.tokens)

    def submit(self, state: RequestState) -> None:
        """Queue a prepared request; `step` until it is done."""
        self._context_of(state.request.exact).scheduler.submit(state)

    def step(self, number: int = 0) -> bool:
        """One forward pass in each context that has work; False where none has. `number`: a name for `abort`."""
        self.catch_up()
        busy = [context for context in self.contexts if context.scheduler.busy]
        passes = False
        for context in busy:
            passes |= context.step(number) is not None
            if len(busy) > 1:
                context.scheduler.deliver()  # text does not wait for the pass of the other one
        if not passes and (awaited := [future for context in busy for future in context.scheduler.awaited]):
            wait(awaited, WAIT_S, FIRST_COMPLETED)
        return bool(busy)

    def stall_for(self, milliseconds: float) -> None:
        """What a part of a prompt may add to a step of requests that generate."""
        for context in self.contexts[:1]:
            context.scheduler.prefill.stall_ms = milliseconds

    def use_idle_time(self, seconds: float, number: int = 0) -> bool:
        """Between requests: go on measuring what `load` left; False if nothing is left. `number`: for `abort`."""
        idle = [context for context in self.contexts if context.idle_work_in == 0]
        for context in idle:
            context.use_idle_time(seconds, number)
        return bool(idle)

    @property
    def idle_work_in(self) -> float | None:
        """Seconds until there is idle work that there is not now; None: none is known."""
        return min((after for context in self.contexts if (after := context.idle_work_in) is not None), default=None)

    def save_no_sessions(self) -> None:
        """After an unexpected error: what the cells hold is not known."""
        for context in self.contexts:
            if context.sessions is not None:
                context.sessions.stop_saving()

    def cancel(self, state: RequestState) -> None:
        """End a request now, wherever it is."""
        for context in self.contexts:
            if state in context.scheduler.queue:
                context.scheduler.cancel(state)
                return
        state.finish("cancelled")

    def abort(self, number: int | None = None) -> None:
        """Break off the current forward pass, from any thread. It is undone, and done again for requests that were not
        cancelled. With `number`: only the passes of the step of that number.
        """
        for context in self.contexts:
            context.abort(number)

    def catch_up(self) -> None:
        """Use the datastores that wait in `swap`, between two steps: with a service, by way of `Service.run`."""
        if self.swap:
            self.use_datastores(self.swap.take(self.datastores))

    def use_datastores(self, datastores: Sequence[Datastore]) -> None:
        """Draft from these from now on, running requests as well. Those used before are the caller's to close then.
        Not while a request is stepped: with a service, by way of `Service.run`.
        """
        for context in self.contexts:
            context.scheduler.deliver()  # where tokens come from is read from the stores that they were drafted from
        self.datastores = list(datastores)
        for context in self.contexts:
            context.failed_stores[:] = [
                store for store in context.failed_stores if not isinstance(store, Datastore) or store in datastores
            ]
            for state in context.scheduler.queue:
                if isinstance(sources := state.speculation.sources, Sources):
                    sources.use(self._stores(state.request.datastores, still=True), self._history)

    def _decode(self, tokens: Sequence[int]) -> str:
        pieces = map(self.model.vocabulary.piece, tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def _stores(self, names: Sequence[str] | None, still: bool = False) -> list[Datastore]:
        """The datastores of these names. Raises OptionError for one that is not open. `still`: leave such names out,
        because a datastore may be closed or opened anew while a request waits.
        """
        if names is None:
            return self.datastores
        stores = self.datastores if still else self.swap.current(self.datastores)
        known = {store.path.name: store for store in stores}
        missing = [name for name in names if name not in known]
        if missing and not still:
            raise OptionError(f"datastore {missing[0]!r} is not open here; open are: {', '.join(known) or 'none'}")
        return [known[name] for name in names if name in known]

    def trim(self) -> None:
        """Let go of what lookups have mapped of the datastores (`Datastore.trim`); between two steps."""
        for store in self.datastores:
            store.trim()

    def look_for_commits(self) -> None:
        """With `follow`: look for new commits of the datastores now and not at the next time. From any thread."""
        if self.follower:
            self.follower.look_soon()

    def at_close(self, call: Callable[[], object]) -> None:
        """Call it when the engine is closed, first."""
        self._at_close.callback(call)

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        with ExitStack() as stack:  # in reverse order, each whatever the others raise, an interrupt included
            for store in self.datastores:
                stack.callback(store.close)
            stack.callback(self._free)
            if self._history is not None:
                stack.callback(self._history.close)
            for context in self.contexts:
                stack.callback(context.scheduler.cancel_all)
            stack.callback(self.swap.close)
            if self.follower:
                stack.callback(self.follower.close)
            stack.callback(self._at_close.close)

    def _free(self) -> None:
        if self.projector:
            self.projector.close()
        with self._opening:  # no context is opened of a model that is being freed
            for context in self.contexts:
                context.close()
            self.model.close()


def _relaxed(verify: Relaxed | Strict | None, exact: bool, sampling: Sampling) -> Relaxed | None:
    """The rule of relaxed verification, None for strict. OptionError for what cannot go together with it."""
    if verify is None or verify == STRICT:
        return None
    if exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if sampling.grammar is not None or sampling.logit_bias or sampling.penalizes:
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return verify
