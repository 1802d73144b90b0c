"""One request for an answer: its options, checked when it is made as far as no model is needed for that.

`Request` has the fields, their meaning and their checks. `RequestOptions` and `ChatOptions` repeat only the names and
types, for the keyword arguments of `Engine.generate` and `Engine.chat`; a test compares them.

`Predictions` makes tokens of the prediction of a request, as many as are useful, in bounded time and memory: text or
ids in, int32 ids of the model out. An answer cannot be longer than the context, so a longer prediction cannot be
followed to its end. More tokens than the context holds are kept, because the answer may begin further on. Without a
limit 10 MB of text took 13 to 18 s and up to 800 MB before the first token; 65 536 tokens of code take 0.1 to 0.3 s (4k
and 152k vocabulary) and some 10 MB.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.verify import Relaxed
from rest_local.errors import OptionError
from rest_local.llama.options import Sampling
from rest_local.llama.placeholders import spans
from rest_local.llama.projector import ImageChunk
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.policy import Policy

log = logging.getLogger("rest_local.decoding")

MOST_LOGPROBS = 100
LEAST_LIMIT = 1 << 16  # Tokens: 16 contexts of the usual 4 096.
Strict = Literal["strict"]
STRICT: Strict = "strict"


@dataclass(frozen=True)
class Request:
    """One generation. Token ids are the model's own.

    Attributes:
        prompt: evaluated first; at least one token
        images: what the negative ids in the prompt stand for (`Engine.image_prompt` makes both); text follows the last
        max_tokens: the answer has at most as many tokens; 0 only evaluates the prompt
        sampling: how tokens are chosen, including the grammar and the biases
        stop: the answer ends before the first of these texts
        stop_tokens: the answer ends before the first of these tokens, as before an end token
        min_tokens: no end token is chosen before the answer has as many tokens
        ignore_end: end tokens are never chosen
        prediction: tokens that the answer is likely to repeat, such as the old file of an edit (`Engine.request` makes
            them from text). They are only drafted from, so they change the speed and not the answer
        logprobs: None, or how many of the likeliest tokens to report for each token (0: only the token itself)
        origins: report where each drafted token comes from
        progress: report how much of the prompt is evaluated, in pieces without text (`Piece.progress`)
        policy: name of a drafting policy, or a policy of your own; None for the engine's
        verify: "strict" or `Relaxed(k, ratio)`; None for the engine's
        datastores: names of the engine's datastores to draft from, None for all
        keep_prefix: reuse what the KV cache already holds of the prompt
        session: a name of the conversation, which is then kept on disk however short it is (`EngineConfig.sessions`);
            None: it is not kept there
        owner: only requests of the same owner share what the KV cache holds of this one, or have it restored from disk
        client: whose request it is: clients get equal shares of the slots, however many requests they have

    Raises:
        OptionError: a number is out of range
    """

    prompt: Sequence[int]
    images: tuple[ImageChunk, ...] = ()
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_end: bool = False
    prediction: Sequence[int] | NDArray[np.int32] = ()
    logprobs: int | None = None
    origins: bool = False
    progress: bool = False
    policy: str | Policy | None = None
    verify: Relaxed | Strict | None = None
    datastores: tuple[str, ...] | None = None
    keep_prefix: bool = True
    session: str | None = ""
    owner: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.verify, str) and self.verify != STRICT:
            raise OptionError(f"verify {self.verify}: give {STRICT!r} or Relaxed(k, ratio), or None for the engine's")
        for name in ("max_tokens", "min_tokens"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}: give 0 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise OptionError(f"logprobs is {self.logprobs}: give 0 to {MOST_LOGPROBS}")
        if self.images:
            known = {chunk.ids for chunk in self.images}
            if any(tuple(self.prompt[begin:end]) not in known for begin, end in spans(self.prompt)):
                raise OptionError("images: the prompt holds ids of an image that is not among them")
            if self.prompt and self.prompt[-1] < 0:
                raise OptionError("images: text has to follow the last image of a prompt")


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.generate`: the fields of `Request`, without the prompt."""

    images: Sequence[ImageChunk]
    max_tokens: int
    sampling: Sampling
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    min_tokens: int
    ignore_end: bool
    prediction: str | Sequence[int] | NDArray[np.int32]
    logprobs: int | None
    origins: bool
    progress: bool
    policy: str | Policy | None
    verify: Relaxed | Strict | None
    datastores: Sequence[str] | None
    keep_prefix: bool
    session: str | None
    owner: str
    client: str


class ChatOptions(RequestOptions, total=False):
    """The keyword arguments of `Engine.chat`: those of `Engine.generate` and what only a conversation has."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    json_schema: Mapping[str, Any] | bool | None
    template_variables: Mapping[str, Any] | None


CHAT_ONLY = ChatOptions.__annotations__.keys() - RequestOptions.__annotations__.keys()
"""The arguments of `Chat`; all others are those of a request."""


class Predictions:
    """Makes the tokens of predictions for one engine, in any thread. `most`: tokens that are kept of one prediction."""

    def __init__(self, vocabulary: Vocabulary, n_ctx: int) -> None:
        self.most = max(n_ctx, LEAST_LIMIT)
        self._vocabulary = vocabulary
        self._warned = False

    def tokenize(self, text: str) -> NDArray[np.int32]:
        """Return the tokens of a text. After `most` of them the text is not read any further."""
        return self._cut(self._vocabulary.tokenize(text, most=self.most))

    def take(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids up to the first that the model does not have, at most `most` of them."""
        ids = self._cut(np.asarray(tokens[: self.most + 1]))
        unknown = np.flatnonzero((ids < 0) | (ids >= self._vocabulary.size))
        return ids[: unknown[0] if len(unknown) else None].astype(np.int32)

    def _cut(self, ids: NDArray[Any]) -> NDArray[Any]:
        if len(ids) > self.most and not self._warned:
            self._warned = True
            log.warning("a prediction is longer than %d tokens; only its beginning is drafted from", self.most)
        return ids[: self.most]
