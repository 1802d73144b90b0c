"""The engine: a model with its KV cache, datastores and history, and the calls that generate with it.

    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="")
        print(stream.result.draft.tokens_per_step)

Contract:

- An engine belongs to one thread; `Service` gives it a thread of its own.
- With one slot, a request cancels the one before. With more slots, as many run in the same forward passes.
- The prefix that a prompt shares with an earlier one stays in the KV cache.
- Drafting, the policy, datastores and history change the speed of an answer. In exact mode they change no bit of it, in
  fast mode a token only at a near-tie (DESIGN.md section 4).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local.chat.images import Images
from rest_local.chat.tools import tools_of
from rest_local.decoding.batch import Finished, answers
from rest_local.decoding.chat import Chat
from rest_local.decoding.config import EngineConfig, EngineOptions
from rest_local.decoding.decoder import NO_PROJECTOR_HERE, Decoder
from rest_local.decoding.following import Follower, OpenDatastores
from rest_local.decoding.images import ImagePrompt, image_prompt
from rest_local.decoding.opening import (
    Unusable,
    open_context,
    open_datastores,
    open_encoder,
    open_history,
    open_model,
    open_projector,
    with_context,
)
from rest_local.decoding.request import CHAT_ONLY, STRICT, ChatOptions, Request, RequestOptions
from rest_local.decoding.stream import Piece, Result
from rest_local.decoding.streaming import ChatStream, Stream
from rest_local.errors import OptionError, PromptTooLong
from rest_local.llama.options import Sampling
from rest_local.llama.projector import Projector
from rest_local.llama.sampling_defaults import SamplingDefaults, recommended
from rest_local.retrieval.home import datastore_path
from rest_local.stop import Closing

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Engine", "Piece", "Result", "Stream"]

S = TypeVar("S", bound=Stream)


class Engine(Closing):
    """A model that is open and drafts. Make one with `Engine.load`, and use `with` or `close`.

    Not thread safe, except `request`, `chat_request` and what only reads: `Service` gives it a thread of its own.

    Attributes:
        model: the weights and the vocabulary
        projector: what lets prompts contain images, None if they are refused
        datastores: those that requests draft from (`in_use`); other threads offer datastores for the next step there
        decoder: what decodes: `decoder.context` has the cells, the self-test, and what a batch costs
        sampling: how the commands sample a request, by what it names: `sampling(top_k=20)` is a `Sampling` whose other
            fields are those of the config, else what the model's file recommends, else llama.cpp's defaults
        closing: what is closed with the engine, the newest first
    """

    def __init__(self, config: EngineConfig, unusable: Unusable | None = None) -> None:
        """Open the model and the datastores; estimate the cost curve the first time.

        Takes the load time of the model and, the first time, up to 15 plain steps.

        Args:
            config: what to open, and how
            unusable: decides about a datastore that cannot be opened; by default its error is raised

        Raises:
            ModelError: the model cannot be loaded
            DatastoreError: a datastore cannot be opened
            OptionError: an option has a value that cannot be
        """
        self.config = config
        self.projector: Projector | None = None
        self.follower: Follower | None = None
        self.closing = ExitStack()
        self._running: Stream | None = None
        encoder = open_encoder(config)
        if encoder is not None:
            self.model, self.sampling, self.datastores = encoder, SamplingDefaults(config.sampling), OpenDatastores()
            self.decoder = Decoder(config, encoder, None, self.datastores, None, None)
            self.closing.callback(self.decoder.close)
            return
        config = with_context(config)
        with ExitStack() as undo:
            self.model, warning = open_model(config, undo)
            self.projector, no_images = open_projector(config, self.model, undo)
            stores = open_datastores(config, self.model, undo, unusable)
            self.datastores = OpenDatastores(stores)
            context = open_context(config, self.model, undo)
            advice, ignored = recommended(self.model.metadata)
            self.sampling = SamplingDefaults(config.sampling, advice)
            context.warnings[:0] = filter(None, (warning, no_images, *ignored))
            history = open_history(self.model) if config.history else None
            self.decoder = Decoder(config, self.model, context, self.datastores, self.projector, history)
            self.closing.callback(self.decoder.close)
            if config.follow:
                self.follower = Follower(self.model, self.datastores, map(datastore_path, config.datastores))
                self.closing.callback(self.follower.close)
            undo.pop_all()
        if self.follower:
            self.follower.start()

    @classmethod
    def load(cls, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> Engine:
        """Open a model.

        Args:
            model: a path or a name; None is the default model
            options: the other fields of `EngineConfig`

        Returns:
            An engine, which `close` or the end of a `with` block frees.

        Raises:
            ModelError, DatastoreError, OptionError: as the constructor
        """
        return cls(EngineConfig(model=model, **options))

    @property
    def warnings(self) -> list[str]:
        """Return what is switched off, and why."""
        return list(dict.fromkeys(self.decoder.context.warnings)) if self.decoder.generates else []

    @property
    def n_ctx(self) -> int:
        """Return the tokens of context of one request, or of one text that becomes a vector."""
        return self.decoder.n_ctx

    def statistics(self) -> dict[str, Any]:
        """Return totals since it was opened (`Totals`), and what there is now: tokens in the cells of all slots (shared
        ones for each), how many cells there are, and the age of the cost curve in seconds.
        """
        context, slots = self.decoder.context if self.decoder.generates else None, self.decoder.slots
        return {
            **self.decoder.totals.to_dict(),
            "passes": context.scheduler.times.generating if context else 0,
            "cells_used": sum(slot.n_past for slot in slots),
            "cells": context.backend.n_cells if context else 0,
            "checkpoint_bytes": sum(slot.checkpoints.size for slot in slots),
            "cost_curve_age_s": round(context.tuning.age, 1) if context else 0.0,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the engine computes with: context settings, threads in use, exact, policy, verify."""
        context = self.decoder.context
        return {
            **context.tuning.settings.to_dict(),
            "threads": context.backend.threads,
            "threads_batch": context.backend.threads_batch,
            "n_ctx": self.n_ctx,
            "n_batch": context.backend.n_batch,
            "n_ubatch": context.backend.n_ubatch,
            "exact": context.exact,
            "policy": self.config.policy,
            "verify": str(self.config.verify or STRICT),
            "draft_model": context.drafter.path if context.drafter else None,
        }

    def generate(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Stream:
        """Evaluate the prompt and return the stream of its continuation.

        On an engine of one slot, the stream that ran before is cancelled.

        Args:
            prompt: text, in which special tokens count as such, or token ids
            options: the fields of `Request`

        Returns:
            A stream, which goes on while it is iterated or waited for.

        Raises:
            PromptEmpty, PromptTooLong: the context cannot hold the prompt and a token of the answer
            OptionError: an option has a value that cannot be
            DecodeFailed: llama.cpp could not evaluate the prompt
        """
        return self._begin(Stream, self.request(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> ChatStream:
        """Continue a conversation with the answer of the model.

        Args:
            messages: in OpenAI's form, rendered by the model's own chat template. Parts of type `image_url` hold images
                as `data:` URLs if the model has a projector. The model goes on after the text of a last message of the
                assistant, and the answer has what comes after it.
            options: the fields of `Request`, and
                `tools`, functions that the model may call, in OpenAI's form;
                `tool_choice`, which is `auto`, `none`, `required`, or an object that names the function to call;
                `parallel_tool_calls`, whether a forced call may be several;
                `json_schema`, the schema that the text of the answer has to be valid for, or True for any JSON object;
                `template_variables`, further names for the template, such as `enable_thinking`

        Returns:
            A stream whose `message` is the answer in OpenAI's form.

        Raises:
            ModelError: the model has no chat template
            TemplateFailed: its template refuses the conversation
            PromptEmpty, PromptTooLong, OptionError, DecodeFailed: as of `generate`
        """
        request, chat = self.chat_request(messages, **options)
        return self._begin(ChatStream, request, chat)

    def batch(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Answer many requests, as many at a time as there are slots.

        An error ends the request that it belongs to, and no other. Closing the iterator cancels what runs. The answers
        of an engine of one slot are decoded one after another: give `slots`.

        Args:
            requests: of `request` or `chat_request`. A list is decoded in an order in which prompts that begin alike
                are neighbours, and any other iterable in its order, taken as slots become free.

        Yields:
            Each answer as it ends, with its number among `requests`.
        """
        return answers(self.decoder, requests)

    def request(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Request:
        """Make the request that `generate` makes of its arguments, for `Service.submit`. From any thread.

        Args:
            prompt: text, in which special tokens count as such, or token ids
            options: the fields of `Request`. Of a prediction that is longer than the context and longer than 65 536
                tokens only the beginning is used, with one warning in the log.

        Raises:
            OptionError: an option has a value that cannot be
            PromptTooLong: the text has more tokens than the context
        """
        given: dict[str, Any] = {**options}
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt, most=self.n_ctx)
        if isinstance(prediction := options.get("prediction"), str):
            given["prediction"] = self.decoder.predictions.tokenize(prediction)
        if "images" in options:
            given["images"] = tuple(options["images"])
        for name in ("stop", "stop_tokens", "datastores"):
            if isinstance(given.get(name), str):
                raise OptionError(f"{name}: give a sequence, not one text")
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return Request([int(token) for token in prompt], **given)

    def chat_request(self, messages: Sequence[Mapping[str, Any]], **given: Unpack[ChatOptions]) -> tuple[Request, Chat]:
        """Make the request that `chat` makes. From any thread.

        Args:
            messages: as of `chat`
            given: as the options of `chat`

        Returns:
            The request, and the `Chat` that makes its result a message.

        Raises:
            ModelError, TemplateFailed, OptionError, PromptTooLong: as of `chat`
        """
        options: dict[str, Any] = {**given}
        of_chat = {name: options.pop(name) for name in CHAT_ONLY & options.keys()}
        chat = Chat(self.model, messages, **of_chat | {"tools": tools_of(of_chat.get("tools"))})
        sampling = options.get("sampling", Sampling())
        if (grammar := chat.grammar()) is not None:
            if sampling.grammar is not None:
                raise OptionError("sampling: a forced tool call or json_schema is a grammar as well; give one of them")
            options["sampling"] = replace(sampling, grammar=grammar)
        prompt, chunks = self.image_prompt(chat.prompt, chat.images, most=self.n_ctx)
        if chunks:
            options["images"] = chunks
        return self.request(prompt, **options), chat

    def image_prompt(self, text: str, images: Images | Mapping[str, bytes], *, most: int | None = None) -> ImagePrompt:
        """Return the tokens of a text with images: `prompt` and `images` of a request. From any thread.

        Takes a tenth of a second for each image that is new.

        Args:
            text: with a text such as `<image>` where an image stands
            images: by that text the bytes of a file in PNG, JPEG, GIF or WebP
            most: tokens that the result may have

        Raises:
            OptionError: there is no projector, or something cannot be read as an image
            PromptTooLong: there are more than `most` tokens
        """
        if not images:
            return self.tokenize(text, most=most), ()
        given = images if isinstance(images, Images) else Images(dict(images))
        if self.projector is None:
            raise OptionError(NO_PROJECTOR_HERE, given.first_place)
        return image_prompt(self.model.vocabulary, self.projector, text, given.data, given.places, most)

    def _begin(self, make: Callable[..., S], request: Request, *more: Chat) -> S:
        """Evaluate a prompt and return its stream. Raises the error that ends the request."""
        decoder, state = self.decoder, self.decoder.prepare(request)
        stream = make(state, partial(_step_until, decoder), decoder.cancel, *more)
        if self._running and len(decoder.slots) == 1:
            self._running.cancel()
        self._running = stream
        try:
            decoder.submit(state)
            _step_until(decoder, lambda: state.done or (state.text.has_slot and not state.text.is_prefilling))
            if stream.error:
                raise stream.error
        except BaseException:
            stream.cancel()
            raise
        return stream

    def tokenize(self, text: str, *, most: int | None = None) -> list[int]:
        """Return token ids with the model's start token and parsed special tokens. A start token in the text is not
        doubled.

        Args:
            text: any text
            most: tokens that the text may have

        Raises:
            PromptTooLong: there are more than `most`, as soon as that is known. The number in it is then an estimate,
                from the part of the text that was tokenized.
        """
        vocabulary = self.model.vocabulary
        tokens: list[int] = vocabulary.tokenize(text, special=True, add_special=True, most=most).tolist()
        if most is not None and len(tokens) > most:
            read = sum(len(vocabulary.piece(token)) for token in tokens)
            estimate = round(len(tokens) * len(text.encode("utf-8", "replace")) / max(read, 1))
            raise PromptTooLong(max(estimate, len(tokens)), most, estimated=estimate > len(tokens))
        if len(tokens) > 1 and tokens[0] == tokens[1] == vocabulary.ids.bos:
            del tokens[0]
        if not tokens and vocabulary.ids.bos is not None:
            tokens = [vocabulary.ids.bos]
        return tokens

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation in the model's chat template, up to where the answer begins, as `chat` evaluates it.

        Args:
            messages: as of `chat`, without images

        Raises:
            ModelError, OptionError, TemplateFailed: as of `chat`
        """
        return Chat(self.model, messages).prompt

    def close(self) -> None:
        """Store what is to be kept, and free cells, weights and datastores. A second call does nothing."""
        self.closing.close()


def _step_until(decoder: Decoder, until: Callable[[], bool], timeout: float | None = None) -> bool:
    """Do forward passes until `until()` is true. Return False if `timeout` seconds are over before that."""
    over = math.inf if timeout is None else time.monotonic() + timeout
    while not until():
        if time.monotonic() >= over:
            return False
        decoder.step()
    return True
