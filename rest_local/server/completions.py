"""POST /v1/completions: OpenAI's older call, also for gaps, by `suffix` or with tokens spelled out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.request import Request
from rest_local.errors import PromptTooLong
from rest_local.server.answering import Answering, Part, submitted
from rest_local.server.answers import completion_logprobs, new_id, timings, usage
from rest_local.server.bodies import MAX_PROMPTS, CompletionBody
from rest_local.server.errors import ApiError
from rest_local.server.grammars import grammar_of
from rest_local.server.parsing import parse
from rest_local.server.prompts import infill_tokens, plain_prompts, prompt_text
from rest_local.server.requests import longest_prompt, request_of, shifts_context
from rest_local.server.running import DONE, event
from rest_local.server.state import state_of


async def completions(request: HttpRequest) -> Response:
    """OpenAI's completions: several prompts, several answers to each."""
    body = await parse(request, CompletionBody)
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(body.model)
    n = body.n or 1
    top = _wanted_logprobs(body)
    prompts: list[list[int]] = []
    scores: list[list[TokenLogprobs]] = []

    def prepare() -> list[Request]:
        prompts.extend(_prompts(engine, body, n))
        grammar = grammar_of(body)
        return [
            request_of(engine, body, prompt, logprobs=top, grammar=grammar, choice=choice)
            for prompt in prompts
            for choice in range(n)
        ]

    if body.echo and top is not None:
        requests = await state.workers.run(request, prepare)
        _check_length(engine, body, prompts)
        scores = await state.scoring.scores(request, service, prompts, top)
        running = await submitted(request, service, lambda: requests)
    else:
        running = await submitted(request, service, prepare)
    answer = CompletionAnswer(state, engine, body, running, model=model, per_prompt=n)
    answer.prompts, answer.scores = prompts, scores
    return await answer.respond(request)


def _prompts(engine: Engine, body: CompletionBody, n: int) -> list[list[int]]:
    if body.suffix:
        if not isinstance(body.prompt, str):
            raise ApiError(400, "suffix: the prompt has to be one text", param="suffix")
        return [infill_tokens(engine, body.prompt, body.suffix, answer=max(body.max_tokens or 0, 0))]
    return plain_prompts(engine, body.prompt, MAX_PROMPTS // n, longest_prompt(engine, body))


def _wanted_logprobs(body: CompletionBody) -> int | None:
    if isinstance(body.logprobs, bool):
        return 0 if body.logprobs else None
    return body.logprobs


def _check_length(engine: Engine, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
    """Raises PromptTooLong; ApiError 400 where the answer alone would be given, from a shortened prompt."""
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


class CompletionAnswer(Answering):
    """Answers as text."""

    body: CompletionBody
    prompts: list[list[int]]
    scores: list[list[TokenLogprobs]]  # by prompt, where they are echoed with log-probabilities

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._id, self._created = new_id("cmpl"), int(time.time())
        self._sent = [0] * len(self.choices)  # characters, for text_offset

    def begin(self) -> list[bytes]:
        if not self.body.echo:
            return []
        return [self._chunk(i, self._echo(i), self._echo_logprobs(i)) for i in range(len(self.choices))]

    def advance(self, number: int, part: Part) -> list[bytes]:
        if not (part.text or part.origins or part.logprobs):
            return []
        logprobs = None
        if part.logprobs:
            logprobs = completion_logprobs(self.engine.model.vocabulary, part.logprobs, self._sent[number])
        self._sent[number] += len(part.text)
        return [self._chunk(number, part.text, logprobs, **part.told)]

    def complete(self, number: int) -> list[bytes]:
        more: dict[str, Any] = {}
        if not self._asked_usage and not self.remaining:
            more = self._counts()
        if self.tells:
            more["rest_local"] = {"draft": self.results[number].draft.to_dict()}
        return [self._chunk(number, "", finish_reason=self.finish_reason(number), **more)]

    def end(self) -> list[bytes]:
        if not self._asked_usage:
            return [DONE]
        return [event(self._head() | {"choices": []} | self._counts()), DONE]

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
        return self._head() | {"choices": choices} | self._counts()

    @property
    def _asked_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _counts(self) -> dict[str, Any]:
        counts = usage(self.results, self.per_prompt, self.body.prediction is not None, self.shows_steps)
        return {"usage": counts, "timings": timings(self.results, self.shows_steps)}

    def _prompt(self, number: int) -> list[int]:
        return self.prompts[number // self.per_prompt]

    def _echo(self, number: int) -> str:
        if isinstance(self.body.prompt, str):
            return self.body.prompt
        return prompt_text(self.engine.model.vocabulary, self._prompt(number))

    def _echo_logprobs(self, number: int) -> dict[str, Any] | None:
        self._sent[number] = len(self._echo(number))
        if _wanted_logprobs(self.body) is None:
            return None
        return completion_logprobs(self.engine.model.vocabulary, self._scored(number), 0, self._prompt(number)[0])

    def _logprobs(self, number: int) -> dict[str, Any] | None:
        if _wanted_logprobs(self.body) is None:
            return None
        said = self.choices[number].logprobs
        if not self.body.echo:
            return completion_logprobs(self.engine.model.vocabulary, said, 0)
        entries = [*self._scored(number), *said]
        return completion_logprobs(self.engine.model.vocabulary, entries, 0, self._prompt(number)[0])

    def _scored(self, number: int) -> list[TokenLogprobs]:
        return self.scores[number // self.per_prompt]

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self.model}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head() | {"choices": [choice]} | more)
