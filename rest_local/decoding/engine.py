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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import CostCurve
from rest_local.calibration.measuring import Measured, Progress
from rest_local.chat.images import Images, take_images
from rest_local.decoding.batch import Finished, answers
from rest_local.decoding.config import EngineConfig, EngineOptions
from rest_local.decoding.core import NO_PROJECTOR_HERE, Unusable
from rest_local.decoding.images import ImagePrompt, image_prompt
from rest_local.decoding.lane import Lane
from rest_local.decoding.offers import Offers
from rest_local.decoding.pooled import open_core
from rest_local.decoding.request import CHAT_ONLY, STRICT, ChatOptions, Request, RequestOptions
from rest_local.decoding.stream import Piece, Result
from rest_local.decoding.streaming import Chat, ChatStream, Stream
from rest_local.errors import OptionError, PromptTooLong
from rest_local.kv_cache.backend import Capability
from rest_local.llama.model import Model
from rest_local.llama.options import Sampling
from rest_local.llama.projector import Projector
from rest_local.retrieval.datastore import Datastore

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Engine", "Piece", "Result", "Stream"]

S = TypeVar("S", bound=Stream)


class Engine:
    """Make one with `Engine.load` or from an `EngineConfig`; a context manager, which closes it at the end.

    Not thread safe, except `request`, `chat_request` and what only reads: `Service` gives it a thread of its own.
    """

    def __init__(self, config: EngineConfig, unusable: Unusable | None = None) -> None:
        """Open the model and the datastores; estimate the cost curve the first time.

        unusable: decides about a datastore that cannot be opened, by default its error is raised. Takes the load time
        of the model and, the first time, up to 15 plain steps; `tune` measures thoroughly. Raises ModelError,
        DatastoreError, OptionError.
        """
        self._core = open_core(config, unusable)
        self._running: Stream | None = None
        self._at_close = ExitStack()

    @classmethod
    def load(cls, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> Engine:
        """Open a model (None: the demo model) with the fields of `EngineConfig`. Raises as the constructor."""
        return cls(EngineConfig(model=model, **options))

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    @property
    def model(self) -> Model:
        return self._core.model

    @property
    def projector(self) -> Projector | None:
        """What lets prompts contain images; None where they are refused."""
        return self._core.projector

    @property
    def generates(self) -> bool:
        """Whether the model makes text; one that reads in both directions makes vectors only (`decoding.pooled`)."""
        return self._core.generates

    @property
    def datastores(self) -> list[Datastore]:
        """The datastores that requests draft from."""
        return self._core.datastores

    @property
    def warnings(self) -> list[str]:
        """What is switched off, and why. The first exact request of an engine that is not exact may add to them."""
        return self._core.lanes.warnings

    @property
    def exact(self) -> bool:
        """Whether every request is decoded in settings that give the bits of plain decoding."""
        return self._core.lane.exact

    @property
    def capability(self) -> Capability:
        """What drafts the model can verify, and why."""
        return self._core.lane.capability

    @property
    def n_ctx(self) -> int:
        """Tokens of context of one request."""
        return self._core.n_ctx

    def statistics(self) -> dict[str, Any]:
        """Totals since it was opened (`Totals`), and now: tokens in the cells of all slots (shared ones for each),
        how many cells there are, and the age of the cost curve in seconds.
        """
        return self._core.statistics()

    @property
    def cost_curve(self) -> CostCurve:
        return self._core.lane.tuning.curve

    @property
    def calibration(self) -> dict[str, Any]:
        """The state of the cost curve: final or provisional, its age, noise and uncertainty by batch size."""
        return self._core.lane.tuning.state()

    def compare(self, seconds: float = math.inf) -> None:
        """Run the self-test of `self_test`, if it was never run: some seconds, for an exact engine at most `seconds`.
        Only while no request runs.
        """
        self._core.lane.compare(seconds)

    def tune(self, report: Progress | None = None) -> Measured:
        """Measure the cost curve thoroughly and keep it for the next start: about 700 plain steps. Only while no
        request runs. Raises ModelError, and ValueError where the clock stands still.
        """
        return self._core.lane.tune(report)

    @property
    def settings(self) -> dict[str, Any]:
        """What the engine computes with: context settings, threads in use, exact, policy, verify."""
        return {
            **self._core.lane.tuning.settings.to_dict(),
            "threads": self._core.lane.context.threads,
            "threads_batch": self._core.lane.context.threads_batch,
            "n_ctx": self.n_ctx,
            "n_batch": self._core.lane.context.n_batch,
            "n_ubatch": self._core.lane.context.n_ubatch,
            "exact": self.exact,
            "policy": self.config.policy,
            "verify": str(self.config.verify or STRICT),
            "draft_model": self._core.lane.drafter.path if self._core.lane.drafter else None,
        }

    @property
    def threads_in_use(self) -> int:
        """Threads of the next forward pass: fewer than `settings` says while other programs want the processors."""
        return self._core.lane.threads

    @property
    def self_test(self) -> dict[str, Any]:
        """Rows compared with plain decoding in these settings, differences, flips per 10 000 and the largest gap; empty
        where nothing was compared yet (`compare`). In exact settings also `any_threads`: whether rows that were
        computed with different numbers of threads were compared, without a difference.
        """
        return self._core.lane.tuning.self_test

    def generate(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Stream:
        """Evaluate the prompt and return the stream of its continuation. `options`: the fields of `Request`.

        On an engine of one slot, the stream that ran before is cancelled. Raises PromptEmpty, PromptTooLong,
        OptionError, DecodeFailed.
        """
        return self._begin(
            Stream(self._core.prepare(self.request(prompt, **options)), self._step_until, self._core.cancel)
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> ChatStream:
        """Continue a conversation: the answer of the model to `messages`, as a stream whose `message` is the answer in
        OpenAI's form.

        `messages`: in OpenAI's form, rendered by the model's own chat template. Parts of type `image_url` hold images
        as `data:` URLs, where the model has a projector.
        `tools`: functions that the model may call, in OpenAI's form. `tool_choice`: `auto`, `none`, `required`, or an
        object that names the function to call. `parallel_tool_calls`: a forced call may be several.
        `json_schema`: the schema that the text of the answer has to be valid for; True for any JSON object.
        `template_variables`: further names for the template, such as `enable_thinking`.
        All others are the fields of `Request`. A context shift keeps the tools and the system prompt, unless
        `keep_tokens` is given.

        Raises what `generate` raises, ModelError where the model has no chat template, and TemplateFailed.
        """
        request, chat = self.chat_request(messages, **options)
        return self._begin(ChatStream(self._core.prepare(request), self._step_until, self._core.cancel, chat))

    def batch(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Answer many requests (of `request` or `chat_request`), as many at a time as there are slots, and yield each
        as it ends, with its number among `requests`. An error ends the request that it belongs to, and no other.

        A list is decoded in an order in which prompts that begin alike are neighbours; any other iterable in its order,
        taken as slots become free. Closing the iterator cancels what runs. The answers of an engine of one slot are
        decoded one after another: give `slots`.
        """
        return answers(self._core, requests)

    def request(self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]) -> Request:
        """The request that `generate` makes of its arguments, for `Service.submit`. From any thread.

        Special tokens in a text prompt count as such. Of a prediction that is longer than the context and longer than
        65 536 tokens only the beginning is used, with one warning in the log. Raises OptionError, PromptTooLong.
        """
        given: dict[str, Any] = {**options}
        if isinstance(prompt, str):
            shifts = self.config.context_shift or options.get("context_shift", False)
            prompt = self.tokenize(prompt, most=None if shifts else self.n_ctx)
        if isinstance(prediction := options.get("prediction"), str):
            given["prediction"] = self._core.predictions.tokenize(prediction)
        if "images" in options:
            given["images"] = tuple(options["images"])
        for name in ("stop", "datastores"):
            if isinstance(given.get(name), str):
                raise OptionError(f"{name}: give a sequence of texts, not one text")
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return Request([int(token) for token in prompt], **given)

    def chat_request(self, messages: Sequence[Mapping[str, Any]], **given: Unpack[ChatOptions]) -> tuple[Request, Chat]:
        """The request that `chat` makes of its arguments, and what makes a message of its result. From any thread.
        Raises as `request`, ModelError, TemplateFailed.
        """
        options: dict[str, Any] = {**given}
        messages, images = take_images(messages)
        chat = Chat(self.model, messages, **{name: options.pop(name) for name in CHAT_ONLY & options.keys()})
        sampling = options.get("sampling", Sampling())
        if chat.grammar is not None:
            if sampling.grammar is not None:
                raise OptionError("sampling: a forced tool call or json_schema is a grammar as well; give one of them")
            options["sampling"] = replace(sampling, grammar=chat.grammar)
        if "keep_tokens" not in options and (self.config.context_shift or options.get("context_shift", False)):
            options["keep_tokens"] = len(self.image_prompt(chat.beginning(), images)[0])
        if not images:
            return self.request(chat.prompt, **options), chat
        images.check_all_in(chat.prompt)
        prompt, chunks = self.image_prompt(chat.prompt, images)
        return self.request(prompt, images=chunks, **options), chat

    def image_prompt(self, text: str, images: Images | Mapping[str, bytes], *, most: int | None = None) -> ImagePrompt:
        """The tokens of a text with images: `prompt` and `images` of a request. From any thread.

        `images`: by the text that stands for each of them in `text`, such as `<image>`, the bytes of a file in PNG,
        JPEG, GIF or WebP. `most`: tokens. Takes a tenth of a second for each image that is new. Raises OptionError
        where there is no projector, and for what cannot be read as an image; PromptTooLong.
        """
        if not images:
            return self.tokenize(text, most=most), ()
        given = images if isinstance(images, Images) else Images(dict(images))
        if self.projector is None:
            raise OptionError(NO_PROJECTOR_HERE, given.first_place)
        return image_prompt(self.model.vocabulary, self.projector, text, given.data, given.places, most)

    def _begin(self, stream: S) -> S:
        """Evaluate the prompt of a stream. Raises what the request ends with."""
        if self._running and len(self._core.slots) == 1:
            self._running.cancel()
        self._running, sequence = stream, stream.sequence
        try:
            self._core.submit(sequence)
            self._step_until(lambda: sequence.done or (sequence.is_admitted and not sequence.is_prefilling))
            if sequence.error:
                raise sequence.error
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
            self._core.step()
        return True

    def tokenize(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids with the model's start token and parsed special tokens. A start token in the text is not doubled.

        Raises PromptTooLong where there are more than `most`, as soon as that is known. The number in it is then an
        estimate, from the part of the text that was tokenized.
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

    def forget(self) -> None:
        """Drop the kept prefixes: the next prompt is evaluated whole."""
        for lane in self._core.lanes:
            lane.scheduler.slots.forget()

    def save_cells(self, path: Path) -> bool:
        """Write what the KV cache holds of a text to a file, for `load_cells` of a later engine; False, with a warning
        in the log, where that fails or nothing is held. Only while no request runs. Takes the space of the cells.
        """
        return self._core.lane.save_cells(path)

    def load_cells(self, path: Path) -> int:
        """Have the text of `save_cells` in the KV cache, so that a prompt that begins with it need not be evaluated;
        how many tokens. Cells that are damaged, of another model, of other settings or of another build of llama.cpp
        are left out with a warning in the log. Only while no request runs.
        """
        return self._core.lane.load_cells(path)

    @property
    def sessions_lane(self) -> Lane | None:
        """The lane whose slots can be saved to files; None without `sessions`."""
        return self._core.lane if self._core.lane.sessions is not None else None

    @property
    def offers(self) -> Offers:
        """Where other threads put datastores for the next step."""
        return self._core.offers

    def catch_up(self) -> None:
        """Use the `offers` now. Not while a request is stepped: with a service, by way of `Service.run`."""
        self._core.catch_up()

    def look_for_commits(self) -> None:
        """With `follow`: look for new commits of the datastores now and not at the next time. From any thread."""
        if self._core.follower:
            self._core.follower.look_soon()

    def use_datastores(self, datastores: Sequence[Datastore]) -> None:
        """Draft from these from now on, running requests as well. Those used before are the caller's to close then.
        Not while a request is stepped: with a service, by way of `Service.run`.
        """
        self._core.use(datastores)

    def at_close(self, call: Callable[[], object]) -> None:
        """Call it when the engine is closed, first."""
        self._at_close.callback(call)

    def close(self) -> None:
        """Keep what is to be kept; free cells, weights and datastores now; again does nothing."""
        try:
            self._at_close.close()
        finally:
            self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
