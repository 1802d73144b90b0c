"""POST /v1/completions: OpenAI's older call. It also fills gaps, with `suffix` or with the model's tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.request import Request
from rest_local.errors import PromptTooLong
from rest_local.server.answer_fields import completion_logprobs
from rest_local.server.answering import Answered, Asked, Generating, OpenAIAnswer, Part
from rest_local.server.bodies import MAX_PROMPTS, CompletionBody, parse
from rest_local.server.errors import ApiError
from rest_local.server.prompts import infill_tokens, prompt_text, prompts_of
from rest_local.server.requests import grammar_of, longest_prompt, request_of, shifts_context


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
    return prompts_of(engine, body.prompt, MAX_PROMPTS // n, longest_prompt(engine, body))


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

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [self._chunk(number, "", **fields)]

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
