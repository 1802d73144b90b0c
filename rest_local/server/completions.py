"""The calls that have a text as prompt: completions and embeddings.

- `POST /v1/completions` is OpenAI's older call. It also fills gaps, with `suffix` or with the model's tokens for them.
- `POST /v1/embeddings` answers 501 for a model that makes no embeddings, `POST /v1/rerank` always.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.request import Request
from rest_local.errors import PromptTooLong
from rest_local.llama.embedding import Embedder, pooling
from rest_local.server.answer_fields import completion_logprobs
from rest_local.server.answering import Answered, Asked, Generating, OpenAIAnswer, Part
from rest_local.server.bodies import MAX_PROMPTS, CompletionBody, EmbeddingBody, parse
from rest_local.server.errors import ApiError
from rest_local.server.prompts import infill_tokens, plain_prompts, prompt_text
from rest_local.server.requests import grammar_of, longest_prompt, request_of, shifts_context
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response


async def completions(request: HttpRequest) -> Response:
    """OpenAI's completions: one prompt or several, one answer to each or several."""
    asked = Generating.of(request, await parse(request, CompletionBody))
    completion = Completion(asked)
    if completion.echoes_logprobs:
        requests = await asked.state.workers.run(request, completion.requests)
        prompts, top = completion.to_score()
        completion.scores = await asked.state.scoring.scores(request, asked.service, prompts, top)
        streams = await asked.submit(request, lambda: requests)
    else:
        streams = await asked.submit(request, completion.requests)
    return await completion.answer(streams.streams).respond(request, streams)


class Completion:
    """One completion: `requests` must be called first, in a worker thread, then `answer`. Knows no HTTP.

    `scores`: by prompt, where it `echoes_logprobs`; to be set before `answer`.
    """

    def __init__(self, asked: Asked[CompletionBody]) -> None:
        self._asked = asked
        self._top = _top_logprobs(asked.body)
        self._prompts: list[list[int]] = []
        self.scores: list[list[TokenLogprobs]] = []

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the answer contains the log-probabilities of the prompts."""
        return bool(self._asked.body.echo) and self._top is not None

    def requests(self) -> list[Request]:
        """One for each choice. Raises ApiError, OptionError, PromptTooLong."""
        engine, body, n = self._asked.engine, self._asked.body, self._asked.body.n or 1
        self._prompts = _prompts(engine, body, n)
        grammar = grammar_of(body)
        return [
            request_of(engine, body, prompt, logprobs=self._top, grammar=grammar, choice=choice)
            for prompt in self._prompts
            for choice in range(n)
        ]

    def to_score(self) -> tuple[list[list[int]], int]:
        """The prompts to score, and how many of the likeliest tokens to report. Raises PromptTooLong, ApiError 400."""
        _check_length(self._asked.engine, self._asked.body, self._prompts)
        return self._prompts, self._top or 0

    def answer(self, answered: Sequence[Answered]) -> CompletionAnswer:
        """The answer. `answered`: for each of the requests."""
        return CompletionAnswer(self._asked, answered, self._prompts, self.scores)


def _prompts(engine: Engine, body: CompletionBody, n: int) -> list[list[int]]:
    if body.suffix:
        if not isinstance(body.prompt, str):
            raise ApiError(400, "suffix: the prompt must be one text", param="suffix")
        return [infill_tokens(engine, body.prompt, body.suffix, answer=max(body.max_tokens or 0, 0))]
    return plain_prompts(engine, body.prompt, MAX_PROMPTS // n, longest_prompt(engine, body))


def _top_logprobs(body: CompletionBody) -> int | None:
    """Number of alternatives; None without log-probabilities."""
    if isinstance(body.logprobs, bool):
        return 0 if body.logprobs else None
    return body.logprobs


def _check_length(engine: Engine, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
    """Raises PromptTooLong, or ApiError 400 where a context shift shortens the prompt: that cannot be scored."""
    longest = max(map(len, prompts))
    if longest <= engine.n_ctx:
        return
    if not shifts_context(engine, body):
        raise PromptTooLong(longest, engine.n_ctx)
    raise ApiError(
        400,
        f"echo with logprobs: the prompt has {longest} tokens and the context holds {engine.n_ctx}; a context shift "
        "shortens it for an answer, but all of it cannot be scored; leave out echo or logprobs, or shorten it",
        code="context_length_exceeded",
        param="prompt",
    )


class CompletionAnswer(OpenAIAnswer[CompletionBody]):
    """Answers as text. `scores`: by prompt, where prompts are echoed with log-probabilities."""

    ID_PREFIX = "cmpl"
    EVENT_KIND = "text_completion"

    def __init__(
        self,
        asked: Asked[CompletionBody],
        answered: Sequence[Answered],
        prompts: Sequence[Sequence[int]],
        scores: Sequence[Sequence[TokenLogprobs]],
    ) -> None:
        super().__init__(asked, answered, per_prompt=asked.body.n or 1)
        self._prompts, self._scores = prompts, scores
        self._sent = [0] * len(self.choices)  # characters, for text_offset

    def begin(self) -> list[bytes]:
        if not self.body.echo:
            return []
        return [self._chunk(i, self._echo(i), logprobs=self._echo_logprobs(i)) for i in range(len(self.choices))]

    def advance(self, number: int, part: Part) -> list[bytes]:
        if not (part.text or part.origins or part.logprobs):
            return []
        logprobs = None
        if part.logprobs:
            logprobs = completion_logprobs(self.engine.model.vocabulary, part.logprobs, self._sent[number])
        self._sent[number] += len(part.text)
        return [self._chunk(number, part.text, logprobs=logprobs, **part.extension)]

    def complete(self, number: int) -> list[bytes]:
        return [self._chunk(number, "", finish_reason=self.finish_reason(number), **self._closing(number))]

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "text": (self._echo(number) if self.body.echo else "") + choice.text,
                "logprobs": self._logprobs(number),
                "finish_reason": self.finish_reason(number),
            }
            for number, choice in enumerate(self.choices)
        ]
        return self._head(self.EVENT_KIND) | {"choices": choices} | self._counts()

    def _prompt(self, number: int) -> Sequence[int]:
        return self._prompts[number // self.per_prompt]

    def _echo(self, number: int) -> str:
        if isinstance(self.body.prompt, str):
            return self.body.prompt
        return prompt_text(self.engine.model.vocabulary, self._prompt(number))

    def _echo_logprobs(self, number: int) -> dict[str, Any] | None:
        self._sent[number] = len(self._echo(number))
        if _top_logprobs(self.body) is None:
            return None
        return completion_logprobs(self.engine.model.vocabulary, self._scored(number), 0, self._prompt(number)[0])

    def _logprobs(self, number: int) -> dict[str, Any] | None:
        if _top_logprobs(self.body) is None:
            return None
        generated = self.choices[number].logprobs
        if not self.body.echo:
            return completion_logprobs(self.engine.model.vocabulary, generated, 0)
        entries = [*self._scored(number), *generated]
        return completion_logprobs(self.engine.model.vocabulary, entries, 0, self._prompt(number)[0])

    def _scored(self, number: int) -> Sequence[TokenLogprobs]:
        return self._scores[number // self.per_prompt]

    def _chunk(self, index: int, text: str, **fields: Any) -> bytes:
        return self._event(index, {"text": text}, **fields)


async def embeddings(request: HttpRequest) -> Response:
    """OpenAI's embeddings: one vector of length 1 for each input."""
    body = await parse(request, EmbeddingBody)
    state = state_of(request)
    service, engine = state.loaded()
    embedding = Embedding(engine, body, state.check_model(body.model))

    def embed(prompt: list[int]) -> NDArray[np.float32]:
        # In the engine's thread, one text at a time: other requests wait for one text, not for all of them.
        return service.run(lambda engine: _embedder(state, engine).embed(prompt))

    return json_response(await state.workers.run(request, lambda: embedding.answer(embed)))


@dataclass(frozen=True)
class Embedding:
    """One request for embeddings. `model`: the name to answer with. Knows no HTTP. Raises ApiError 501 if the model
    makes no embeddings.
    """

    engine: Engine
    body: EmbeddingBody
    model: str

    def __post_init__(self) -> None:
        if pooling(self.engine.model) is None:
            raise ApiError(
                501, "the model makes no embeddings; serve one that was trained for them", code="no_embeddings"
            )

    def answer(self, embed: Callable[[list[int]], NDArray[np.float32]]) -> dict[str, Any]:
        """OpenAI's object. `embed` gives the vector of one text. Raises ApiError 400, PromptTooLong, and what `embed`
        raises.
        """
        body, size = self.body, self.engine.model.n_embd
        prompts = plain_prompts(self.engine, body.input, MAX_PROMPTS, field="input")
        if body.dimensions is not None and body.dimensions > size:
            raise ApiError(400, f"dimensions: the model has {size}", param="dimensions")
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(embed(prompt), body)}
            for index, prompt in enumerate(prompts)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "model": self.model, "data": data, "usage": usage}


async def rerank(request: HttpRequest) -> Response:
    """The response of llama-server for a model that cannot rerank. No reranking model is supported here."""
    raise ApiError(501, "rerank is not supported; use a server with a reranking model", code="no_reranking")


def _embedder(state: State, engine: Engine) -> Embedder:
    """The embedder, made for the first request, because it takes memory."""
    if state.embedder is None:
        state.embedder = Embedder(engine.model)
    return state.embedder


def _encoded(vector: NDArray[np.float32], body: EmbeddingBody) -> Any:
    """The vector as the body requests it. A shortened vector is scaled to length 1 again."""
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        length = float(np.linalg.norm(vector))
        vector = vector / np.float32(length) if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
