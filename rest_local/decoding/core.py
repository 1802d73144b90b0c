"""The inside of an `Engine`: the lanes, the datastores, the persisted learning, and the sequences that use them.

Contract: `Engine`, its streams and `Service` drive it: `prepare` from any thread, then `submit` and `step` on one
thread until the sequence is done. It takes requests of token ids; text, conversations and what users read about an
engine are in `engine`.

`PersistedLearning` is what an engine keeps for later runs: the answers of a model to draft from, and how often drafts
were accepted.

- `open` when an engine opens, `add` after each answer, `close` when it closes.
- The vocabulary and the model's own description decide where the files are, not the model's path. So a model file that
  was moved keeps them, and quantizations with the same name share them.
- Errors are never fatal and never change an answer. The history and the memory of the planner warn where something is
  wrong with their files, and the engine goes on without them.

The functions `open_...` open what an engine needs, in order: settings that work here, the model, its projector, its
datastores, the draft model, the lane. Everything that was opened is registered with the caller's exit stack, so an
error at any place closes it all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rest_local.calibration.settings import contexts_to_try, settings_for
from rest_local.catalog.stores import model_file, projector_of
from rest_local.decoding import sequence as decoding
from rest_local.decoding.config import (
    AUTO_PROJECTOR,
    NO_DRAFT_MODEL,
    NO_PROJECTOR,
    TRAINED,
    EngineConfig,
)
from rest_local.decoding.counts import Statistics, Totals
from rest_local.decoding.following import Follower
from rest_local.decoding.lane import WITHOUT_DRAFTER, Lane, Lanes
from rest_local.decoding.offers import Offers
from rest_local.decoding.request import STRICT, Predictions, Request, Strict
from rest_local.decoding.scheduler import shifted
from rest_local.decoding.stream import Answer
from rest_local.decoding.transcripts import turn_renderer
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.models.head_kinds import check_is_model
from rest_local.drafting.models.opening import NO_DRAFTER, Opener, has_usable_mtp, mtp_inside, opener_of
from rest_local.drafting.sources import Searchable, Sources
from rest_local.errors import (
    DatastoreError,
    DatastoreVocabulary,
    ModelError,
    ModelInvalid,
    ModelNotFound,
    OptionError,
    ProjectorInvalid,
    PromptEmpty,
    PromptTooLong,
)
from rest_local.kv_cache.slot import Slot
from rest_local.llama import load_fallback
from rest_local.llama.context import ContextSettings
from rest_local.llama.gguf import trained_context
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Sampling
from rest_local.llama.placeholders import text_of
from rest_local.llama.projector import Projector
from rest_local.llama.sampler import Sampler
from rest_local.llama.vocabulary import Detokenizer
from rest_local.paths import cache_dir
from rest_local.planning.acceptance import Acceptance, recall, remember
from rest_local.planning.policies import POLICIES
from rest_local.planning.policy import Policy
from rest_local.retrieval.building.indexing import build_from_sources, recorded_sources
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.history import History, history_home
from rest_local.retrieval.home import datastore_path


def open_model(config: EngineConfig, undo: ExitStack) -> tuple[Model, str]:
    """The model with options that were tried in a child process, and a warning about what they gave up, if anything.
    Raises ModelError, OptionError.
    """
    path = model_file(config.model)

    def contexts(tried: ModelOptions) -> list[ContextSettings]:
        size = config.context_length(trained_context(path, tried))
        return contexts_to_try(tried, size, config.threads or 0, config.slots, config.cells, config.exact)

    n_ctx = None if config.n_ctx == TRAINED else config.n_ctx  # as for `trial.attempt`
    try:
        chosen = load_fallback.choose(path, config.n_gpu_layers, config.options, contexts, n_ctx)
    except ModelInvalid:
        check_is_model(path)
        raise
    mtp, refusal = False, ""
    if config.draft_model is None:
        mtp, refusal = has_usable_mtp(path, chosen.options, chosen.n_gpu_layers)
    model = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options, mtp=mtp)
    undo.callback(model.close)
    return model, "; ".join(filter(None, (chosen.warning, refusal)))


WAIT_S = 0.05  # for an image that all requests wait for, before commands are looked at again


def open_projector(config: EngineConfig, model: Model, undo: ExitStack) -> tuple[Projector | None, str]:
    """The projector for images, and a warning where one that was found with the model cannot be used. Raises
    ProjectorInvalid for one that was named.
    """
    named = config.mmproj
    if named is None or named == NO_PROJECTOR:
        return None, ""
    path = projector_of(model.path) if named == AUTO_PROJECTOR else named
    if path is None:
        return None, ""
    try:
        return undo.enter_context(Projector.open(path, model, threads=config.threads or 0)), ""
    except ProjectorInvalid as error:
        if named != AUTO_PROJECTOR:
            raise
        return None, f"images are refused: {error}"


Unusable = Callable[[str | Path, DatastoreError, Model], bool]
"""Called with a datastore that cannot be opened. True: open it again; False: leave it out. It may raise the error."""


def open_datastores(config: EngineConfig, model: Model, undo: ExitStack, unusable: Unusable) -> list[Datastore]:
    """The datastores by name or path. Raises DatastoreError."""
    known = model.vocabulary.identity
    mmap = None if model.options.mmap else False
    stores: list[Datastore] = []
    waiting = list(config.datastores)
    while waiting:
        path = datastore_path(waiting[0])
        try:
            store = Datastore.open(path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)
        except DatastoreError as error:
            if not unusable(waiting[0], error, model):
                del waiting[0]
        else:
            stores.append(undo.enter_context(store))
            del waiting[0]
    return stores


def _build_missing(config: EngineConfig) -> Unusable:
    """Refuses, except that it builds what `config.build_missing` allows."""

    def unusable(name: str | Path, error: DatastoreError, model: Model) -> bool:
        if not (config.build_missing and isinstance(error, DatastoreVocabulary)):
            raise error
        recipe, sources = {"model": str(model.path.absolute())}, recorded_sources(datastore_path(name))
        render = turn_renderer(model, sources)
        build_from_sources(name, sources, vocabulary=model.vocabulary, recipe=recipe, replace=False, render=render)
        return True

    return unusable


def open_lane(config: EngineConfig, model: Model, undo: ExitStack) -> Lane:
    """The context that requests share, and the draft model, which is opened before it. A draft model that cannot be
    used costs a warning. Raises ModelError.
    """
    size = config.context_length(model.n_ctx_train)
    threads = config.threads or 0
    settings = settings_for(model.options, size, threads, config.slots, config.cells)
    opener, refusal = _opener(config, model, size)
    try:
        lane = Lane.open(model, settings, config.exact, opener=opener)
    except ModelError as error:
        if opener is NO_DRAFTER:
            raise
        opener.close()  # both may be too much for the memory
        refusal = f"{WITHOUT_DRAFTER}: next to it the model cannot be evaluated ({error})"
        lane = Lane.open(model, settings, config.exact)
    undo.callback(lane.close)
    if refusal:
        lane.warnings.append(refusal)
    return lane


def _opener(config: EngineConfig, model: Model, size: int) -> tuple[Opener, str]:
    """What opens a drafter for the model, and a warning if it is refused: no draft is worth an answer. Raises
    ModelNotFound, because the user is told of a mistyped name at once.
    """
    if config.draft_model is None:
        return (mtp_inside(model) if model.with_mtp else NO_DRAFTER), ""
    if config.draft_model == NO_DRAFT_MODEL:
        return NO_DRAFTER, ""
    path, threads, layers = model_file(config.draft_model), config.threads or 0, config.draft_gpu_layers
    try:
        return opener_of(path, model, size, config.slots + 1, threads, layers), ""
    except ModelNotFound:
        raise
    except (ModelError, OptionError) as error:
        return NO_DRAFTER, f"{WITHOUT_DRAFTER}: {error}"


NO_PROJECTOR_HERE = "the model has no projector here, so it takes no images; give its `mmproj`"
log = logging.getLogger("rest_local.history")

NAME_LENGTH = 40
MODEL_LENGTH = 200  # a file can call itself anything


class PersistedLearning:
    """That of one engine. `history`: earlier answers, to search."""

    def __init__(self, history: History, acceptance: Acceptance, memory: Path) -> None:
        self.history = history
        self._acceptance, self._memory = acceptance, memory

    @classmethod
    def open(cls, model: Model, acceptance: Acceptance) -> PersistedLearning | None:
        """Open what there is for a model, and add the stored counts to `acceptance`. None where no directory can be
        made. Reads up to 32 MB.
        """
        key = key_of(model)
        try:
            path, memory = history_home() / key, acceptance_path(key)
        except OSError as error:
            log.warning("no history is kept: %s: %s", error.filename, error.strerror)
            return None
        recall(memory, acceptance)
        about = {"model": model.name[:MODEL_LENGTH], "description": model.description}
        identity = VocabularyId(*model.vocabulary.identity)
        return cls(History.open(path, identity, about, mmap=model.options.mmap), acceptance, memory)

    def add(self, answer: Sequence[int]) -> None:
        """Add the tokens of one answer, complete or not. Writes now and then, which takes some 50 ms."""
        self.history.add(answer)

    def close(self) -> None:
        """Write what is new; a second call does nothing. Waits a few seconds at most for other processes."""
        self.history.close()
        remember(self._memory, self._acceptance)


def key_of(model: Model) -> str:
    """The name of a model's files: legible; another one for another vocabulary, name or shape, and with adapters."""
    shape: list[object] = [model.vocabulary.hash, model.name, model.n_params, model.n_layer, model.n_embd]
    if model.adapters.identity:  # not without adapters: keys of older versions stay valid
        shape.append(model.adapters.identity)
    legible = re.sub(r"[^a-z0-9]+", "-", model.name.lower())[:NAME_LENGTH].strip("-") or "model"
    return f"{legible}-{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]}"


def acceptance_path(key: str) -> Path:
    """Where the planner's memory of a model is. Raises OSError where the cache directory cannot be made."""
    return cache_dir() / "acceptance" / f"{key}.json"


class EngineCore:
    """Opens what the config says, and owns it until `close`. `lane`: the one that requests share; `totals`: what was
    done since it was opened. Raises ModelError, DatastoreError, OptionError.
    """

    generates = True

    def __init__(self, config: EngineConfig, unusable: Unusable | None = None) -> None:
        self.config = config
        with ExitStack() as undo:
            self.model, warning = open_model(config, undo)
            self.projector, no_images = open_projector(config, self.model, undo)
            self.datastores = open_datastores(config, self.model, undo, unusable or _build_missing(config))
            self.lane = open_lane(config, self.model, undo)
            if config.sessions:
                self.lane.keep_sessions(config.sessions)
            self.lanes = Lanes(self.lane)
            for told in filter(None, (warning, no_images)):
                self.lanes.warn(told)
            self._failed_stores: list[Searchable] = self.lane.failed_stores
            self._persisted = PersistedLearning.open(self.model, self.lane.auto.acceptance) if config.history else None
            self.totals = Totals()
            self.predictions = Predictions(self.model.vocabulary, self.n_ctx)
            self.offers = Offers()
            self.follower = Follower(self, map(datastore_path, config.datastores)) if config.follow else None
            undo.pop_all()
        if self.follower:
            self.follower.start()

    @property
    def n_ctx(self) -> int:
        """Tokens of context of one request."""
        return self.lane.context.n_ctx

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots that requests share; a reader in another thread sees a moment of them."""
        return self.lane.scheduler.slots.slots

    def prepare(self, request: Request) -> decoding.Sequence:
        """A sequence to `submit`. Everything that can be refused is refused here: PromptEmpty, PromptTooLong,
        OptionError, ModelError where the context for an exact request does not fit the memory.

        From any thread. The first exact request of an engine that is not exact takes seconds here, to open that context
        and, the first time, to measure; other requests go on meanwhile.
        """
        n_prompt, policy = len(request.prompt), request.policy or self.config.policy
        exact = request.exact or self.lane.exact
        request = replace(request, context_shift=request.context_shift or self.config.context_shift)
        self._check(request, policy)
        relaxed = _relaxed(request.verify or self.config.verify, exact, request.sampling)
        request = replace(
            request,
            prompt=shifted(request.prompt, request.keep_tokens, self.n_ctx),
            prediction=self.predictions.take(request.prediction),
        )
        lane = self.lanes.exact() if exact else self.lane
        self._check_images(request, lane)
        vocabulary = self.model.vocabulary
        sampler = Sampler(vocabulary, request.sampling, min_tokens=request.min_tokens, ignore_end=request.ignore_end)
        sampler.observe(text_of(request.prompt) if request.images else request.prompt)
        answer = Answer(
            Statistics(), Detokenizer(vocabulary.piece), request.max_tokens, request.stop, vocabulary.is_end
        )
        answer.result.truncated = len(request.prompt) < n_prompt
        return decoding.Sequence(
            request,
            lane.policy(policy) if isinstance(policy, str) else policy,
            sampler,
            answer,
            partial(self._connect, lane, request.datastores),
            vocabulary.is_end,
            partial(self._count, lane),
            relaxed=relaxed,
            constraint=None if sampler.constraint.is_free else sampler.constraint,
            decode=self._decode if request.origins else None,
            remaining=sampler.remaining if request.after_sampling and request.logprobs is not None else None,
            encode=self.projector.rows if self.projector else None,
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

    def _check_images(self, request: Request, lane: Lane) -> None:
        most = lane.context.n_ubatch
        for chunk in request.images:
            if not chunk.causal and len(chunk) > most:
                raise OptionError(
                    f"images: an image of {len(chunk)} tokens is evaluated at once, and a batch has {most}; open the "
                    "model with a larger `n_ubatch`"
                )

    def _connect(self, lane: Lane, names: Sequence[str] | None, slot: Slot) -> Sources:
        """The sources of a sequence that is admitted to a slot."""
        sources = lane.sources(slot)
        sources.use(self._stores(names, still=True), self._persisted.history if self._persisted else None)
        return sources

    def _count(self, lane: Lane, sequence: decoding.Sequence) -> None:
        """A sequence of that lane has ended."""
        result = sequence.result
        tokens = result.tokens
        plain_ms = sequence.statistics.plain_step_ms(lane.tuning.curve, lane.tuning.final)
        if plain_ms:
            result.draft = replace(result.draft, plain_step_ms=plain_ms + lane.auto.driver.step)
        self.totals.add(sequence.statistics, len(tokens))
        if self._persisted:
            self._persisted.add(tokens)

    def submit(self, sequence: decoding.Sequence) -> None:
        """Queue a prepared sequence; `step` until it is done."""
        lane = self.lanes.exact() if sequence.request.exact else self.lane
        lane.scheduler.submit(sequence)

    def step(self, number: int = 0) -> bool:
        """One forward pass in each lane that has work; False where none has. `number`: a name for `abort`."""
        self.catch_up()
        busy = [lane for lane in self.lanes if lane.scheduler.busy]
        passes = 0
        for lane in busy:
            lane.begin_pass(number)
            begun = time.perf_counter()
            if lane.scheduler.step():
                passes += 1
                if not lane.scheduler.was_image:
                    lane.after_pass(time.perf_counter() - begun)
            if len(busy) > 1:
                lane.scheduler.deliver()  # text does not wait for the pass of the other lane
        if not passes and (awaited := [future for lane in busy for future in lane.scheduler.awaited]):
            wait(awaited, WAIT_S, FIRST_COMPLETED)
        return bool(busy)

    def statistics(self) -> dict[str, Any]:
        """As `Engine.statistics`."""
        return {
            **self.totals.to_dict(),
            "passes": sum(lane.scheduler.generating for lane in self.lanes),
            "cells_used": sum(slot.n_past for slot in self.slots),
            "cells": self.lane.context.n_cells,
            "cost_curve_age_s": round(self.lane.tuning.age, 1),
        }

    def stall_for(self, milliseconds: float) -> None:
        """What a part of a prompt may add to a step of sequences that generate."""
        self.lane.scheduler.stall_ms = milliseconds

    def use_idle_time(self, seconds: float) -> bool:
        """Between requests: continue for so long what `load` left to be measured; False where nothing is left."""
        idle = [lane for lane in self.lanes if lane.has_idle_work]
        for lane in idle:
            lane.use_idle_time(seconds)
        return bool(idle)

    @property
    def idle_work_in(self) -> float | None:
        """Seconds until there is idle work that there is not now; None: none is known."""
        return min((wait for lane in self.lanes if (wait := lane.idle_work_in) is not None), default=None)

    def save_no_sessions(self) -> None:
        """After an unexpected error: what the cells hold is not known."""
        for lane in self.lanes:
            if lane.sessions is not None:
                lane.sessions.stop_saving()

    def cancel(self, sequence: decoding.Sequence) -> None:
        """End a sequence now, wherever it is."""
        for lane in self.lanes:
            if lane.scheduler.has(sequence):
                lane.scheduler.cancel(sequence)
                return
        sequence.finish("cancelled")

    def abort(self, number: int | None = None) -> None:
        """Break off the current forward pass, from any thread. It is undone, and done again for requests that were not
        cancelled. With `number`: only the passes of the step of that number.
        """
        for lane in self.lanes:
            lane.context.abort(number)

    def cancel_all(self) -> None:
        """End every sequence."""
        for lane in self.lanes:
            lane.scheduler.cancel_all()

    def catch_up(self) -> None:
        """Use the datastores that were offered, between two steps."""
        if self.offers:
            self.use(self.offers.take(self.datastores))

    def use(self, datastores: Sequence[Datastore]) -> None:
        """Draft from these from now on, in current requests as well. Call it between two steps. The datastores that
        were used before can then be closed by their owner.
        """
        for lane in self.lanes:
            lane.scheduler.deliver()  # where tokens come from is read from the stores that they were drafted from
        self.datastores = list(datastores)
        self._failed_stores[:] = [
            store for store in self._failed_stores if not isinstance(store, Datastore) or store in datastores
        ]
        history = self._persisted.history if self._persisted else None
        for sequence in self.lanes.sequences():
            sources = sequence.sources if sequence.has_begun else None
            if isinstance(sources, Sources):
                sources.use(self._stores(sequence.request.datastores, still=True), history)

    def _decode(self, tokens: Sequence[int]) -> str:
        pieces = map(self.model.vocabulary.piece, tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def _stores(self, names: Sequence[str] | None, still: bool = False) -> list[Datastore]:
        """The datastores of these names. Raises OptionError for one that is not open. `still`: leave such names out,
        because a datastore may be closed or opened anew while a request waits.
        """
        if names is None:
            return self.datastores
        stores = self.datastores if still else self.offers.current(self.datastores)
        known = {store.path.name: store for store in stores}
        missing = [name for name in names if name not in known]
        if missing and not still:
            raise OptionError(f"datastore {missing[0]!r} is not open here; open are: {', '.join(known) or 'none'}")
        return [known[name] for name in names if name in known]

    def trim(self) -> None:
        """Let go of what lookups have mapped of the datastores (`Datastore.trim`); between two steps."""
        for store in self.datastores:
            store.trim()

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        if self.follower:
            self.follower.close()
        self.offers.close()
        self.cancel_all()
        try:
            if self._persisted:
                self._persisted.close()
        finally:  # an interrupt while a lock is waited for frees them all the same
            if self.projector:
                self.projector.close()
            self.lanes.close()
            for store in self.datastores:
                store.close()


def _relaxed(verify: Relaxed | Strict | None, exact: bool, sampling: Sampling) -> Relaxed | None:
    """The rule of relaxed verification, None for strict. OptionError for what cannot go together with it."""
    if verify is None or verify == STRICT:
        return None
    if exact:
        raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
    if sampling.grammar is not None or sampling.logit_bias or sampling.penalizes:
        raise OptionError("verify relaxed cannot be combined with a grammar, logit biases or penalties")
    return verify
