"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.server.answering import Answering, Part, submitted
from rest_local.server.answers import chat_logprobs, new_id, timings, usage
from rest_local.server.bodies import ChatBody
from rest_local.server.errors import ApiError
from rest_local.server.grammars import grammar_of
from rest_local.server.parsing import parse
from rest_local.server.prompts import chat_text
from rest_local.server.requests import request_of
from rest_local.server.running import DONE, event
from rest_local.server.state import state_of


async def chat_completions(request: HttpRequest) -> Response:
    """OpenAI's chat, with what llama-server adds."""
    body = await parse(request, ChatBody)
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(body.model)
    n = body.n or 1
    running = await submitted(service, lambda: _requests(engine, body, n))
    return await ChatAnswer(state, engine, body, running, model=model, per_prompt=n).respond(request)


def _requests(engine: Engine, body: ChatBody, n: int) -> list[Request]:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    asks_tools = body.tools if body.tool_choice != "none" else None
    text = chat_text(
        engine, body.messages, asks_tools, body.chat_template_kwargs, body.add_generation_prompt is not False
    )
    prompt = engine.tokenize(text)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = grammar_of(body)
    return [request_of(engine, body, prompt, logprobs=logprobs, grammar=grammar, choice=i) for i in range(n)]


class ChatAnswer(Answering):
    """Answers as messages."""

    body: ChatBody

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._id, self._created = new_id("chatcmpl"), int(time.time())
        self._messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""} for _ in self.choices]

    def begin(self) -> list[bytes]:
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self.choices))]

    def advance(self, number: int, part: Part) -> list[bytes]:
        delta = {"content": part.text} if part.text or not part.origins else {"content": ""}
        self._messages[number]["content"] += part.text
        if not (part.text or part.origins or part.logprobs):
            return []
        more: dict[str, Any] = {"rest_local": {"tokens": part.origins}} if part.origins else {}
        logprobs = chat_logprobs(self.engine.model.vocabulary, part.logprobs) if part.logprobs else None
        return [self._chunk(number, delta, logprobs=logprobs, **more)]

    def complete(self, number: int) -> list[bytes]:
        more: dict[str, Any] = {}
        if not self._asked_usage and not self.remaining:
            more = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        if self.tells:
            more["rest_local"] = {"draft": self.results[number].draft}
        return [self._chunk(number, {}, finish_reason=self._finish_reason(number), **more)]

    def end(self) -> list[bytes]:
        if not self._asked_usage:
            return [DONE]
        counts = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        return [event(self._head("chat.completion.chunk") | {"choices": []} | counts), DONE]

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "message": message,
                "logprobs": self._logprobs(number),
                "finish_reason": self._finish_reason(number),
            }
            for number, message in enumerate(self._messages)
        ]
        counts = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        return self._head("chat.completion") | {"choices": choices} | counts

    @property
    def _asked_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _usage(self) -> dict[str, Any]:
        return usage(self.results, self.per_prompt, self.body.prediction is not None)

    def _finish_reason(self, number: int) -> str:
        return self.results[number].finish_reason

    def _logprobs(self, number: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.engine.model.vocabulary, self.choices[number].logprobs)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"rest-local-{self.state.started}",
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]} | more)
