"""The engine: a model, its memory cells, its datastores and its history, and the generations that use them.

    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="")
        print(stream.result.draft["mat"])

Contract: on one thread; `rest_local.decoding.service` gives it a thread of its own. With one slot, a generation ends
the one before; with more, as many run in the same forward passes. The prefix that a prompt shares with an earlier one
is kept in the cells. What `policy`, datastores, history and drafting do can change the speed of an answer; in exact
mode not a bit of it, in fast mode a token only at a near-tie (DESIGN.md section 4).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import CostCurve
from rest_local.calibration.measuring import Measured, Progress
from rest_local.calibration.tuning import contexts_to_try, settings_for
from rest_local.chat.template import render
from rest_local.decoding.earlier import Earlier
from rest_local.decoding.generation import Generation, Statistics
from rest_local.decoding.job import Job
from rest_local.decoding.lane import Lane
from rest_local.decoding.lanes import Lanes
from rest_local.decoding.predicted import Predictions
from rest_local.decoding.request import Request
from rest_local.decoding.shift import shifted
from rest_local.decoding.stream import Answer, Piece, Result
from rest_local.decoding.totals import Totals
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.draft_model import DraftModel
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import ModelError, OptionError, PromptEmpty, PromptTooLong
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama import ladder
from rest_local.llama.detokenizer import Detokenizer
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling import Sampling
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.policies import POLICIES
from rest_local.planning.policy import Policy
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path

__all__ = ["Engine", "Piece", "Result", "Stream"]

log = logging.getLogger("rest_local.engine")

DEFAULT_CONTEXT = 4096


class Stream:
    """Iterate it for pieces; afterwards `result` is complete. Until then it holds what has come so far."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        return self._job.result

    @property
    def statistics(self) -> Statistics:
        return self._job.answer.statistics

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End now; the text so far stays in `result`, the engine is free for the next."""
        self._engine.cancel(self._job)

    def _run(self) -> Iterator[Piece]:
        try:
            while True:
                yield from self._job.take()
                if self._job.done:
                    yield from self._job.take()
                    break
                self._engine.step()
        finally:
            self.cancel()
        if self._job.error:
            raise self._job.error


class Engine:
    """Make one with `Engine.load`; a context manager. Not thread safe, but for `prepare` and what only reads.

    `predictions`: makes the tokens of a `Request.prediction` from text.
    """

    def __init__(
        self,
        lane: Lane,
        datastores: Sequence[Datastore],
        policy: str,
        history: bool = False,
        verify: str = "strict",
        context_shift: bool = False,
    ) -> None:
        self.model = lane.model
        self.context_shift = context_shift
        self.policy, self.verify = policy, verify
        self.datastores = list(datastores)
        self._lane = lane
        self._lanes = Lanes(lane)
        self._aside: list[Searchable] = lane.aside
        auto = lane.policies["auto"]
        self._earlier = Earlier.open(self.model, auto.acceptance) if history and isinstance(auto, Auto) else None
        self.totals = Totals()
        self.predictions = Predictions(self.model.vocabulary, self.n_ctx)
        self._running: Stream | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        datastores: Sequence[str | Path] = (),
        policy: str = "auto",
        n_ctx: int | None = None,
        threads: int | None = None,
        n_gpu_layers: int | None = None,
        exact: bool = False,
        history: bool = False,
        verify: str = "strict",
        slots: int = 1,
        cells: int | None = None,
        context_shift: bool = False,
        options: ModelOptions | None = None,
        draft_model: str | Path | None = None,
        draft_gpu_layers: int | None = None,
    ) -> Engine:
        """Open a model (None: the demo model) and datastores by name or path; estimate the cost curve the first time.

        `n_ctx`: tokens of context, 0 for what the model was trained for, None for that or 4 096, whichever is less.
        `exact`: chains only, in settings in which drafting provably gives the same bits. `history`: draft from what
        this model answered before, in any process, and keep what it answers now and what was accepted; off unless asked
        for (the command line asks), because it writes the answers to disk. `verify`: `strict`, or `relaxed[:K,RATIO]`,
        which lets retrieved tokens pass that are nearly as likely as the likeliest (`rest_local.decoding.verify`) and
        so changes answers. `slots`: generations at the same time; with `exact` they take turns. `cells`: tokens of
        memory for all of them together, None for a whole context each.
        `context_shift`: an answer that fills the context, and a prompt that is longer, go on without the oldest text.
        `options`: how the model is loaded and computed, LoRA adapters included; what it leaves open is measured and
        chosen. `draft_model`: a smaller model of the same vocabulary, which adds what it would say to the drafts of
        `auto` where that pays.
        Takes the model's load time and, the first time, up to 15 plain steps; `tune` measures thoroughly. Raises
        ModelError, DatastoreError, OptionError.
        """
        _relaxed(verify, exact)
        if policy not in POLICIES:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        with ExitStack() as undo:
            path = model or demo_model()
            chosen = ladder.choose(
                path,
                n_gpu_layers,
                options or ModelOptions(),
                lambda tried: contexts_to_try(tried, n_ctx or DEFAULT_CONTEXT, threads or 0, slots, cells, exact),
                n_ctx,
            )
            opened = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options)
            undo.callback(opened.close)
            vocabulary = opened.vocabulary
            stores = []
            for name in datastores:
                place, known = datastore_path(name), vocabulary.identity
                mmap = None if opened.options.mmap else False
                store = Datastore.open(place, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)
                stores.append(undo.enter_context(store))
            trained = opened.n_ctx_train or DEFAULT_CONTEXT
            size = n_ctx or (trained if n_ctx == 0 else min(DEFAULT_CONTEXT, trained))
            settings = settings_for(opened.options, size, threads or 0, slots, cells)
            drafter: DraftModel | None = None
            if draft_model is not None:
                drafter = DraftModel.open(
                    draft_model, vocabulary, size, slots + 1, threads=threads or 0, n_gpu_layers=draft_gpu_layers
                )
                undo.callback(drafter.close)
            lane = Lane.open(opened, settings, exact, draft_model=drafter)
            undo.callback(lane.close)
            engine = cls(lane, stores, policy, history, verify, context_shift)
            if chosen.warning:
                engine._lanes.warn(chosen.warning)
            undo.pop_all()
            return engine

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
            "verify": self.verify,
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

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[np.int32],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        policy: str | Policy | None = None,
        prediction: str | Sequence[int] | NDArray[np.int32] = "",
        verify: str | None = None,
        keep_tokens: int = 0,
    ) -> Stream:
        """Evaluate the prompt and return a stream of at most `max_tokens` tokens; a text prompt's special tokens count.

        `prediction`: text that the answer is likely to repeat, such as the old file of an edit. It only makes drafts;
        of one longer than `predictions.most` tokens only the beginning is used, with one warning in the log.
        `policy`: a name, one of your own, or None for that of `load`. `verify`: as for `load`, None for what was given
        there; relaxed changes the answer, `draft["relaxed"]` counts how often. It looks at the model's own
        probabilities, so grammars, biases and penalties refuse it. `keep_tokens`: of the prompt, what a context shift
        keeps.

        The stream that ran before is cancelled. Raises PromptEmpty, PromptTooLong, OptionError, DecodeFailed.
        """
        if isinstance(prediction, str):
            prediction = self.predictions.tokenize(prediction)
        request = Request(
            self.tokenize(prompt, most=None if self.context_shift else self.n_ctx)
            if isinstance(prompt, str)
            else [int(t) for t in prompt],
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            stop=tuple(stop),
            prediction=prediction,
            verify=verify,
            keep_tokens=keep_tokens,
        )
        job = self.prepare(request, policy)
        if self._running and len(self._lane.scheduler.slots.slots) == 1:
            self._running.cancel()
        stream = self._running = Stream(self, job)
        try:
            self.submit(job)
            while not job.done and (job.generation is None or job.prefilling):
                self.step()
            if job.error:
                raise job.error
        except BaseException:
            stream.cancel()
            raise
        return stream

    def prepare(self, request: Request, policy: str | Policy | None = None) -> Job:
        """A job to `submit`. Everything that can be refused is refused here: PromptEmpty, PromptTooLong, OptionError,
        ModelError where the context for an exact request does not fit the memory.

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
        chosen = policy or request.policy or self.policy
        if isinstance(chosen, str) and chosen not in POLICIES:
            raise OptionError(f"policy {chosen}: choose one of {', '.join(POLICIES)}")
        exact = request.exact or self.exact
        relaxed = _relaxed(request.verify or self.verify, exact, request.sampling)
        self._stores(request.datastores)
        if exact:
            self._lanes.exact()
        vocabulary = self.model.vocabulary
        sampler = Sampler(vocabulary, request.sampling, min_tokens=request.min_tokens, ignore_end=request.ignore_end)
        sampler.observe(request.prompt)

        def make(slot: Slot) -> Generation:
            lane = self._lanes.exact() if exact else self._lane
            own = lane.policies[chosen].fork() if isinstance(chosen, str) else chosen
            history = self._earlier.history if self._earlier else None
            stores = self._stores(request.datastores, still=True)
            generation = lane.generation(slot, own, sampler, relaxed, stores, history)
            generation.statistics = statistics
            generation.constraint = None if sampler.constraint.is_free else sampler.constraint
            generation.logprobs = request.logprobs
            generation.decode = self._decode if request.origins else None
            return generation

        def finished(result: Result) -> None:
            self.totals.add(statistics, result)
            if self._earlier:
                self._earlier.add(result.tokens)

        statistics = Statistics()
        answer = Answer(statistics, Detokenizer(vocabulary.piece), request.max_tokens, request.stop, vocabulary.is_end)
        answer.result.truncated = len(request.prompt) < n_prompt
        request = replace(
            request,
            prediction=self.predictions.take(request.prediction),
            context_shift=shift,
        )
        return Job(request, sampler, answer, make, finished)

    def submit(self, job: Job) -> None:
        """Queue a prepared job; `step` until it is done."""
        self._lanes.submit(job)

    def step(self, number: int = 0) -> bool:
        """One forward pass for all that run, and one for an exact request; False where there is nothing to do.
        `number`: a name for `abort`.
        """
        return self._lanes.step(number)

    def use_idle_time(self, seconds: float) -> bool:
        """Between requests: continue for so long what `load` left to be measured; False where nothing is left."""
        return self._lanes.use_idle_time(seconds)

    def cancel(self, job: Job) -> None:
        """End a job now, wherever it is."""
        self._lanes.cancel(job)

    def abort(self, number: int | None = None) -> None:
        """Break off the forward pass under way, from any thread: it is undone, and done again where somebody waits.
        With `number`, the passes of the step of that number only.
        """
        self._lanes.abort(number)

    def cancel_all(self) -> None:
        """End every job."""
        self._lanes.cancel_all()

    def use(self, datastores: Sequence[Datastore]) -> None:
        """Draft from these from now on, requests under way as well; between two steps. Those used before can be closed
        then, by their owner.
        """
        self._lanes.deliver()  # where tokens come from is read from the stores that they were drafted from
        self.datastores = list(datastores)
        self._aside[:] = [store for store in self._aside if not isinstance(store, Datastore) or store in datastores]
        history = self._earlier.history if self._earlier else None
        for job in self._lanes.jobs():
            sources = job.generation.sources if job.generation else None
            if isinstance(sources, Sources):
                sources.use(self._stores(job.request.datastores, still=True), history)

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
        """The conversation in the model's own chat template, up to where the answer begins. Raises ModelError."""
        if not self.model.chat_template:
            raise ModelError(f"model {self.model.path}: has no chat template; use `rest-local generate`")
        piece = self.model.vocabulary.piece
        bos, eos = (
            piece(token).decode("utf-8", "replace") if token is not None else ""
            for token in (self.model.vocabulary.bos, self.model.vocabulary.eos)
        )
        return render(self.model.chat_template, messages, bos=bos, eos=eos, add_generation_prompt=True)

    def trim(self) -> None:
        """Let go of what lookups have mapped of the datastores (`Datastore.trim`); between two steps."""
        for store in self.datastores:
            store.trim()

    def forget(self) -> None:
        """Drop the kept prefixes: the next prompt is evaluated whole."""
        self._lanes.forget()

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        self.cancel_all()
        try:
            if self._earlier:
                self._earlier.close()
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


def _relaxed(verify: str, exact: bool, sampling: Sampling | None = None) -> Relaxed | None:
    """The rule that `verify` names, None for strict. OptionError for what cannot go together with it."""
    relaxed = Relaxed.parse(verify)
    if relaxed and exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if relaxed and sampling and (sampling.grammar is not None or sampling.logit_bias or sampling.penalizes):
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return relaxed
