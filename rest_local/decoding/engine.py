"""The engine: a model, its memory cells, its datastores and its history, and generations one after another.

    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="")
        print(stream.result.draft["mat"])

Contract: one generation at a time, on one thread. The prefix that a prompt shares with the last one is kept in the
cells. What `policy`, datastores, history and drafting do can change the speed of an answer; in exact mode not a bit of
it, in fast mode a token only at a near-tie (DESIGN.md section 4).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.backend import Capability
from rest_local.decoding.earlier import Earlier
from rest_local.decoding.generation import Generation
from rest_local.decoding.slot import Slot
from rest_local.decoding.stream import Piece, Result, Stream
from rest_local.decoding.tuning import Tuning, capability_of, settings_for, tune
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.sources import Sources
from rest_local.errors import ModelError, OptionError
from rest_local.llama.context import Context
from rest_local.llama.detokenizer import Detokenizer
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling import Sampling
from rest_local.llama.template import render
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.cost import CostCurve
from rest_local.planning.policies import POLICIES, make_policy
from rest_local.planning.policy import Policy
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path

__all__ = ["Engine", "Piece", "Result", "Stream"]

log = logging.getLogger("rest_local.engine")

DEFAULT_CONTEXT = 4096


class Engine:
    """Make one with `Engine.load`; a context manager. Not thread safe."""

    def __init__(
        self,
        model: Model,
        context: Context,
        tuning: Tuning,
        datastores: Sequence[Datastore],
        policy: str,
        exact: bool,
        history: bool = False,
        verify: str = "strict",
    ) -> None:
        self.model = model
        self.capability: Capability = capability_of(model, context, exact)
        self.warnings: list[str] = []
        if exact and not tuning.exact and self.capability.kind != "none":
            reason = "no settings of this backend verify drafts bit for bit"
            self.capability = Capability("none", f"exact: {reason}")
            self.warnings.append(f"--exact: {reason}; decoding plainly")
        elif self.capability.kind == "none":
            self.warnings.append(f"drafting is off: {self.capability.reason}")
        self.tuning = tuning
        self.policy = policy
        self.exact = exact
        self.verify = verify
        self._context = context
        self._datastores = list(datastores)
        self._policies = {name: make_policy(name, tuning.curve) for name in POLICIES}
        self._slot = Slot(context)
        auto = self._policies["auto"]
        self._earlier = Earlier.open(model, auto.acceptance) if history and isinstance(auto, Auto) else None
        self._sources = Sources(self._datastores, model.n_vocab, self._earlier.history if self._earlier else None)
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
        options: ModelOptions | None = None,
    ) -> Engine:
        """Open a model (None: the demo model) and datastores by name or path; measure the cost curve the first time.

        `n_ctx`: tokens of context, None for 4 096 or what the model was trained for, if that is less. `exact`: chains
        only, in settings in which drafting provably gives the same bits. `history`: draft from what this model
        answered before, in any process, and keep what it answers now and what was accepted; off unless asked for (the
        command line asks), because it writes the answers to disk. `verify`: `strict`, or `relaxed[:K,RATIO]`, which
        lets retrieved tokens pass that are nearly as likely as the likeliest (`rest_local.decoding.verify`) and so
        changes answers. `options`: how the model is loaded and computed, LoRA adapters included; what it leaves open
        is measured and chosen. Takes the model's load time and, the first time, a few seconds of measuring. Raises
        ModelError, DatastoreError, OptionError.
        """
        _relaxed(verify, exact)
        if policy not in POLICIES:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        options = options or ModelOptions()
        opened = Model.open(model or demo_model(), n_gpu_layers=n_gpu_layers, options=options)
        stores: list[Datastore] = []
        context: Context | None = None
        try:
            identity = opened.vocabulary.identity
            for name in datastores:
                path = datastore_path(name)
                stores.append(Datastore.open(path, vocabulary_hash=identity.hash, vocabulary_name=identity.name))
            most = n_ctx or min(DEFAULT_CONTEXT, opened.n_ctx_train or DEFAULT_CONTEXT)
            wanted = settings_for(options, most, threads or 0)
            context, tuning = tune(opened, wanted, exact)
            return cls(opened, context, tuning, stores, policy, exact, history, verify)
        except BaseException:
            for store in stores:
                store.close()
            if context:
                context.close()
            opened.close()
            raise

    @property
    def cost_curve(self) -> CostCurve:
        return self.tuning.curve

    @property
    def settings(self) -> dict[str, Any]:
        """What the engine computes with: context settings, threads in use, exact, policy, verify."""
        return {
            **self.tuning.settings.to_dict(),
            "threads": self._context.threads,
            "threads_batch": self._context.threads_batch,
            "n_ctx": self._context.n_ctx,
            "exact": self.exact,
            "policy": self.policy,
            "verify": self.verify,
        }

    @property
    def self_test(self) -> dict[str, Any]:
        """Rows compared with plain decoding in these settings, differences, flips per 10 000 and the largest gap."""
        return self.tuning.self_test

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[np.int32],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        policy: str | Policy | None = None,
        prediction: str | Sequence[int] = "",
        verify: str | None = None,
    ) -> Stream:
        """Evaluate the prompt and return a stream of at most `max_tokens` tokens; a text prompt's special tokens count.

        `prediction`: text that the answer is likely to repeat, such as the old file of an edit. It only makes drafts.
        `policy`: a name, one of your own, or None for that of `load`. `verify`: as for `load`, None for what was given
        there; relaxed changes the answer, `draft["relaxed"]` counts how often. It looks at the model's own
        probabilities, so grammars, biases and penalties refuse it.

        The stream that ran before is cancelled. Raises PromptEmpty, PromptTooLong, OptionError, DecodeFailed.
        """
        if max_tokens < 0:
            raise OptionError(f"{max_tokens} tokens: give 0 or more")
        chosen = self._policy(self.policy if policy is None else policy)
        relaxed = _relaxed(self.verify if verify is None else verify, self.exact, sampling)
        if self._running:
            self._running.cancel()
        vocabulary = self.model.vocabulary
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if any(not 0 <= t < self.model.n_vocab for t in tokens):
            raise OptionError(f"the prompt holds token ids outside 0..{self.model.n_vocab - 1}")
        sampler = Sampler(vocabulary, sampling or Sampling())
        generation = Generation(
            self._context,
            self._slot,
            chosen,
            self._sources,
            sampler,
            self.capability,
            vocabulary.is_end,
            relaxed,
        )
        try:
            generation.start(tokens)
            self._sources.predict(self._predicted(prediction))
            sampler.observe(tokens)
        except BaseException:
            sampler.close()
            raise

        def finished() -> None:
            sampler.close()
            if self._earlier:
                self._earlier.add(stream.result.tokens)

        stream = Stream(generation, Detokenizer(vocabulary.piece), max_tokens, tuple(stop), finished)
        self._running = stream
        return stream

    def _policy(self, policy: str | Policy) -> Policy:
        if not isinstance(policy, str):
            return policy
        if policy not in self._policies:
            raise OptionError(f"policy {policy}: choose one of {', '.join(POLICIES)}")
        return self._policies[policy]

    def _predicted(self, prediction: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a prediction; ids that the model does not have end it."""
        if isinstance(prediction, str):
            return self.model.vocabulary.tokenize(prediction, special=False).tolist() if prediction else ()
        outside = next((i for i, t in enumerate(prediction) if not 0 <= t < self.model.n_vocab), len(prediction))
        return prediction[:outside]

    def tokenize(self, text: str) -> list[int]:
        """Token ids with the model's start token and parsed special tokens; a start token the text has is not
        doubled.
        """
        vocabulary = self.model.vocabulary
        tokens: list[int] = vocabulary.tokenize(text, special=True, add_special=True).tolist()
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

    def forget(self) -> None:
        """Drop the kept prefix: the next prompt is evaluated whole."""
        self._slot.clear()

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        if self._running:
            self._running.cancel()
        try:
            if not self.model.closed:
                self.tuning.store()
            if self._earlier:
                self._earlier.close()
        finally:  # an interrupt while a lock is waited for frees them all the same
            self._context.close()
            for store in self._datastores:
                store.close()
            self.model.close()

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
