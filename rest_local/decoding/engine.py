"""The engine: a model, its memory cells, its datastores and its history, and the generations that use them.

    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="")
        print(stream.result.draft.tokens_per_step)

Contract: on one thread; `rest_local.decoding.service` gives it a thread of its own. With one slot, a generation ends
the one before; with more, as many run in the same forward passes. The prefix that a prompt shares with an earlier one
is kept in the cells. What `policy`, datastores, history and drafting do can change the speed of an answer; in exact
mode not a bit of it, in fast mode a token only at a near-tie (DESIGN.md section 4).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import CostCurve
from rest_local.calibration.measuring import Measured, Progress
from rest_local.decoding import sequence as decoding
from rest_local.decoding.chat import Chat
from rest_local.decoding.config import EngineConfig, EngineOptions
from rest_local.decoding.counts import Statistics, Totals
from rest_local.decoding.lane import Lane, Lanes
from rest_local.decoding.opening import open_datastores, open_lane, open_model
from rest_local.decoding.persistence import PersistedLearning
from rest_local.decoding.predicted import Predictions
from rest_local.decoding.request import STRICT, ChatOptions, Request, RequestOptions, Strict
from rest_local.decoding.scheduler import shifted
from rest_local.decoding.stream import Answer, Piece, Result
from rest_local.decoding.streaming import ChatStream, Stream
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import OptionError, PromptEmpty, PromptTooLong
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.detokenizer import Detokenizer
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling import Sampling
from rest_local.planning.policies import POLICIES
from rest_local.retrieval.datastore import Datastore

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Engine", "Piece", "Result", "Stream"]

S = TypeVar("S", bound=Stream)

log = logging.getLogger("rest_local.engine")


class Engine:
    """Make one with `Engine.load` or from an `EngineConfig`; a context manager, which closes it at the end.

    Not thread safe, but for `request`, `prepare` and what only reads: `Service` gives it a thread of its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Open the model and the datastores; estimate the cost curve the first time.

        Takes the load time of the model and, the first time, up to 15 plain steps; `tune` measures thoroughly. Raises
        ModelError, DatastoreError, OptionError.
        """
        self.config = config
        self.policy, self.verify, self.context_shift = config.policy, config.verify, config.context_shift
        with ExitStack() as undo:
            self.model, warning = open_model(config, undo)
            self.datastores = open_datastores(config, self.model, undo)
            self._lane = open_lane(config, self.model, undo)
            self._lanes = Lanes(self._lane)
            if warning:
                self._lanes.warn(warning)
            self._failed_stores: list[Searchable] = self._lane.failed_stores
            self._persisted = PersistedLearning.open(self.model, self._lane.auto.acceptance) if config.history else None
            self.totals = Totals()
            self.predictions = Predictions(self.model.vocabulary, self.n_ctx)
            self._running: Stream | None = None
            undo.pop_all()

    @classmethod
    def load(cls, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> Engine:
        """Open a model (None: the demo model) with the fields of `EngineConfig`. Raises as the constructor."""
        return cls(EngineConfig(model=model, **options))

    @property
    def warnings(self) -> list[str]:
        """What is off, and why; the first exact request of an engine that is not exact may add to them."""
        return self._lanes.warnings

    @property
    def exact(self) -> bool:
        """Whether every request is decoded in settings that give the bits of plain decoding."""
        return self._lane.exact

    @property
    def capability(self) -> Capability:
        """What drafts the model can verify, and why."""
        return self._lane.capability

    @property
    def n_ctx(self) -> int:
        """Tokens of context of one request."""
        return self._lane.context.n_ctx

    @property
    def slots(self) -> Sequence[Slot]:
        """Those that requests share; a reader in another thread sees a moment of them."""
        return self._lane.scheduler.slots.slots

    def statistics(self) -> dict[str, Any]:
        """Totals since it was opened (`Totals`), and now: tokens in the cells of all slots (shared ones for each),
        how many cells there are, and the age of the cost curve in seconds.
        """
        return {
            **self.totals.to_dict(),
            "cells_used": sum(slot.n_past for slot in self.slots),
            "cells": self._lane.context.n_cells,
            "cost_curve_age_s": round(self._lane.tuning.age, 1),
        }

    @property
    def part_seconds(self) -> list[float]:
        """What the newest forward passes that held a part of a prompt took."""
        return list(self._lane.scheduler.part_seconds)

    @property
    def cost_curve(self) -> CostCurve:
        return self._lane.tuning.curve

    @property
    def calibration(self) -> dict[str, Any]:
        """How far the cost curve can be trusted: final or provisional, its age, noise and uncertainty by size."""
        return self._lane.tuning.state()

    def compare(self) -> None:
        """Run the self-test of `self_test`, if it was never run: some seconds, while nothing is asked."""
        self._lane.compare()

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure the cost curve thoroughly, while nothing is asked, and keep it for the next start: about 700 plain
        steps. Raises ModelError, and ValueError where the clock stands still.
        """
        return self._lane.tune(report)

    @property
    def settings(self) -> dict[str, Any]:
        """What the engine computes with: context settings, threads in use, exact, policy, verify."""
        return {
            **self._lane.tuning.settings.to_dict(),
            "threads": self._lane.context.threads,
            "threads_batch": self._lane.context.threads_batch,
            "n_ctx": self.n_ctx,
            "n_batch": self._lane.context.n_batch,
            "n_ubatch": self._lane.context.n_ubatch,
            "exact": self.exact,
            "policy": self.policy,
            "verify": str(self.verify or STRICT),
            "draft_model": str(self._lane.draft_model.model.path) if self._lane.draft_model else None,
        }

    @property
    def threads_in_use(self) -> int:
        """Threads of the next forward pass: fewer than `settings` says while other programs want the processors."""
        return self._lane.threads

    @property
    def self_test(self) -> dict[str, Any]:
        """Rows compared with plain decoding in these settings, differences, flips per 10 000 and the largest gap; empty
        where nothing was compared yet (`compare`).
        """
        return self._lane.tuning.self_test

    def generate(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Stream:
        """Evaluate the prompt and return the stream of its continuation. `options`: the fields of `Request`.

        On an engine of one slot, the stream that ran before is cancelled. Raises PromptEmpty, PromptTooLong,
        OptionError, DecodeFailed.
        """
        return self._begin(Stream(self, self.prepare(self.request(prompt, **options))))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> ChatStream:
        """Continue a conversation: the answer of the model to `messages`, as a stream whose `message` is the answer in
        OpenAI's form.

        `messages`: in OpenAI's form, rendered by the model's own chat template.
        `tools`: functions that the model may call, in OpenAI's form. `tool_choice`: `auto`, `none`, `required`, or an
        object that names the function to call. `parallel_tool_calls`: a forced call may be several.
        `json_schema`: the schema that the text of the answer has to be valid for; True for any JSON object.
        `template_variables`: further names for the template, such as `enable_thinking`.
        All others are the fields of `Request`. A context shift keeps the tools and the system prompt, unless
        `keep_tokens` is given.

        Raises what `generate` raises, ModelError where the model has no chat template, and TemplateFailed.
        """
        request, chat = self.chat_request(messages, **options)
        return self._begin(ChatStream(self, self.prepare(request), chat))

    def request(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Request:
        """The request that `generate` makes of its arguments, for `Service.submit`. From any thread.

        Special tokens in a text prompt count as such. Of a prediction that is longer than the context and longer than
        65 536 tokens only the beginning is used, with one warning in the log. Raises OptionError, PromptTooLong.
        """
        given: dict[str, Any] = {**options}
        if isinstance(prompt, str):
            shifts = self.context_shift or options.get("context_shift", False)
            prompt = self.tokenize(prompt, most=None if shifts else self.n_ctx)
        if isinstance(prediction := options.get("prediction"), str):
            given["prediction"] = self.predictions.tokenize(prediction)
        for name in ("stop", "datastores"):
            if isinstance(given.get(name), str):
                raise OptionError(f"{name}: give a sequence of texts, not one text")
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return Request([int(token) for token in prompt], **given)

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        json_schema: Mapping[str, Any] | bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Request, Chat]:
        """The request that `chat` makes of its arguments, and what makes a message of its result. From any thread.
        Raises as `request`, ModelError, TemplateFailed.
        """
        chat = Chat(
            self.model,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            json_schema=json_schema,
            template_variables=template_variables,
        )
        sampling = options.get("sampling", Sampling())
        if chat.grammar is not None:
            if sampling.grammar is not None:
                raise OptionError("sampling: a forced tool call or json_schema is a grammar as well; give one of them")
            options["sampling"] = replace(sampling, grammar=chat.grammar)
        if "keep_tokens" not in options and (self.context_shift or options.get("context_shift", False)):
            options["keep_tokens"] = len(self.tokenize(chat.beginning()))
        return self.request(chat.prompt, **options), chat

    def _begin(self, stream: S) -> S:
        """Evaluate the prompt of a stream. Raises what the request ends with."""
        if self._running and len(self._lane.scheduler.slots.slots) == 1:
            self._running.cancel()
        self._running, sequence = stream, stream.sequence
        try:
            self.submit(sequence)
            while not sequence.done and (not sequence.is_admitted or sequence.is_prefilling):
                self.step()
            if sequence.error:
                raise sequence.error
        except BaseException:
            stream.cancel()
            raise
        return stream

    def prepare(self, request: Request) -> decoding.Sequence:
        """A sequence to `submit`. Everything that can be refused is refused here: PromptEmpty, PromptTooLong,
        OptionError, ModelError where the context for an exact request does not fit the memory.

        From any thread. The first exact request of an engine that is not exact takes seconds here, to open that context
        and, the first time, to measure; those who are being served go on meanwhile.
        """
        if not len(request.prompt):
            raise PromptEmpty
        shift, n_prompt = request.context_shift or self.context_shift, len(request.prompt)
        if n_prompt >= self.n_ctx and not shift:
            raise PromptTooLong(n_prompt, self.n_ctx)
        if any(not 0 <= token < self.model.n_vocab for token in request.prompt):
            raise OptionError(f"the prompt holds token ids outside 0..{self.model.n_vocab - 1}")
        request = replace(request, prompt=shifted(request.prompt, request.keep_tokens, self.n_ctx))
        chosen = request.policy or self.policy
        if isinstance(chosen, str) and chosen not in POLICIES:
            raise OptionError(f"policy {chosen}: choose one of {', '.join(POLICIES)}")
        exact = request.exact or self.exact
        relaxed = _relaxed(request.verify or self.verify, exact, request.sampling)
        self._stores(request.datastores)
        lane = self._lanes.exact() if exact else self._lane
        vocabulary = self.model.vocabulary
        sampler = Sampler(vocabulary, request.sampling, min_tokens=request.min_tokens, ignore_end=request.ignore_end)
        sampler.observe(request.prompt)
        answer = Answer(
            Statistics(), Detokenizer(vocabulary.piece), request.max_tokens, request.stop, vocabulary.is_end
        )
        answer.result.truncated = len(request.prompt) < n_prompt
        return decoding.Sequence(
            replace(request, prediction=self.predictions.take(request.prediction), context_shift=shift),
            lane.policy(chosen) if isinstance(chosen, str) else chosen,
            sampler,
            answer,
            partial(self._connect, lane, request.datastores),
            vocabulary.is_end,
            self._count,
            relaxed=relaxed,
            constraint=None if sampler.constraint.is_free else sampler.constraint,
            decode=self._decode if request.origins else None,
        )

    def _connect(self, lane: Lane, names: Sequence[str] | None, slot: Slot) -> Sources:
        """The sources of a sequence that is admitted to a slot."""
        sources = lane.sources(slot)
        sources.use(self._stores(names, still=True), self._persisted.history if self._persisted else None)
        return sources

    def _count(self, sequence: decoding.Sequence) -> None:
        """A sequence has ended."""
        tokens = sequence.result.tokens
        self.totals.add(sequence.statistics, len(tokens))
        if self._persisted:
            self._persisted.add(tokens)

    def submit(self, sequence: decoding.Sequence) -> None:
        """Queue a prepared sequence; `step` until it is done."""
        lane = self._lanes.exact() if sequence.request.exact else self._lane
        lane.scheduler.submit(sequence)

    def step(self, number: int = 0) -> bool:
        """One forward pass in each lane that has work; False where none has. `number`: a name for `abort`."""
        busy = [lane for lane in self._lanes if lane.scheduler.busy]
        for lane in busy:
            lane.context.number_decodes(number)
            begun = time.perf_counter()
            lane.scheduler.step()
            lane.after_pass(time.perf_counter() - begun)
            if len(busy) > 1:
                lane.scheduler.deliver()  # text does not wait for the pass of the other lane
        return bool(busy)

    def use_idle_time(self, seconds: float) -> bool:
        """Between requests: continue for so long what `load` left to be measured; False where nothing is left."""
        idle = [lane for lane in self._lanes if lane.has_idle_work]
        for lane in idle:
            lane.use_idle_time(seconds)
        return bool(idle)

    def cancel(self, sequence: decoding.Sequence) -> None:
        """End a sequence now, wherever it is."""
        for lane in self._lanes:
            if lane.scheduler.has(sequence):
                lane.scheduler.cancel(sequence)
                return
        sequence.finish("cancelled")

    def abort(self, number: int | None = None) -> None:
        """Break off the forward pass under way, from any thread: it is undone, and done again where somebody waits.
        With `number`, the passes of the step of that number only.
        """
        for lane in self._lanes:
            lane.context.abort(number)

    def cancel_all(self) -> None:
        """End every sequence."""
        for lane in self._lanes:
            lane.scheduler.cancel_all()

    def use(self, datastores: Sequence[Datastore]) -> None:
        """Draft from these from now on, requests under way as well; between two steps. Those used before can be closed
        then, by their owner.
        """
        for lane in self._lanes:
            lane.scheduler.deliver()  # where tokens come from is read from the stores that they were drafted from
        self.datastores = list(datastores)
        self._failed_stores[:] = [
            store for store in self._failed_stores if not isinstance(store, Datastore) or store in datastores
        ]
        history = self._persisted.history if self._persisted else None
        for sequence in self._lanes.sequences():
            sources = sequence.sources if sequence.has_begun else None
            if isinstance(sources, Sources):
                sources.use(self._stores(sequence.request.datastores, still=True), history)

    def _decode(self, tokens: Sequence[int]) -> str:
        pieces = map(self.model.vocabulary.piece, tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def _stores(self, names: Sequence[str] | None, still: bool = False) -> list[Datastore]:
        """Those of these names. Raises OptionError for one that is not open; `still`: those that are open, since a
        datastore may be closed or opened anew while a request waits.
        """
        if names is None:
            return self.datastores
        known = {store.path.name: store for store in self.datastores}
        missing = [name for name in names if name not in known]
        if missing and not still:
            raise OptionError(f"datastore {missing[0]!r} is not open here; open are: {', '.join(known) or 'none'}")
        return [known[name] for name in names if name in known]

    def tokenize(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids with the model's start token and parsed special tokens; a start token the text has is not
        doubled. Raises PromptTooLong where there are more than `most`, as soon as that is known: the number it tells is
        then an estimate, from how much of the text that many took.
        """
        vocabulary = self.model.vocabulary
        tokens: list[int] = vocabulary.tokenize(text, special=True, add_special=True, most=most).tolist()
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

    def trim(self) -> None:
        """Let go of what lookups have mapped of the datastores (`Datastore.trim`); between two steps."""
        for store in self.datastores:
            store.trim()

    def forget(self) -> None:
        """Drop the kept prefixes: the next prompt is evaluated whole."""
        for lane in self._lanes:
            lane.scheduler.slots.forget()

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        self.cancel_all()
        try:
            if self._persisted:
                self._persisted.close()
        finally:  # an interrupt while a lock is waited for frees them all the same
            self._lanes.close()
            for store in self.datastores:
                store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _relaxed(verify: Relaxed | Strict | None, exact: bool, sampling: Sampling) -> Relaxed | None:
    """The rule of relaxed verification, None for strict. OptionError for what cannot go together with it."""
    if verify is None or verify == STRICT:
        return None
    if exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if sampling.grammar is not None or sampling.logit_bias or sampling.penalizes:
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return verify
