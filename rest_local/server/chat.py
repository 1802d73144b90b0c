"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.chat.conversation import fixed_beginning
from rest_local.chat.tools import AnswerFormat, AnswerParser, CallStart, Content, Delta, Reasoning, message_of
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.server.answering import Answering, Part, submitted
from rest_local.server.answers import chat_logprobs, new_id, timings, usage
from rest_local.server.bodies import ChatBody, Message, NamedTool
from rest_local.server.errors import ApiError
from rest_local.server.grammars import chat_grammar
from rest_local.server.parsing import parse
from rest_local.server.prompts import chat_text, offered, template_of
from rest_local.server.requests import longest_prompt, request_of, shifts_context
from rest_local.server.running import DONE, event
from rest_local.server.state import state_of


async def chat_completions(request: HttpRequest) -> Response:
    """OpenAI's chat, with what llama-server adds."""
    body = await parse(request, ChatBody)
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(body.model)
    chat = _Chat(engine, body)
    running = await submitted(request, service, chat.requests)
    answer = ChatAnswer(state, engine, body, running, model=model, per_prompt=chat.n)
    answer.parsers = [chat.parser() for _ in running.tickets]
    return await answer.respond(request)


class _Chat:
    """What one body asks for. `requests` is called first, in a thread."""

    def __init__(self, engine: Engine, body: ChatBody) -> None:
        self.n = body.n or 1
        self._engine, self._body = engine, body
        self._tools = offered(body.tools) if body.tool_choice != "none" else []
        self._form = AnswerFormat.of(template_of(engine).source, engine.model.vocabulary.special_token)
        self._prompt = ""

    def requests(self) -> list[Request]:
        """One for each choice. Raises ApiError, OptionError, TemplateFailed."""
        engine, body = self._engine, self._body
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        self._prompt = self._render(body.messages)
        prompt = engine.tokenize(self._prompt, most=longest_prompt(engine, body))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
        grammar = chat_grammar(body, self._form, self._tools, choice, self._prompt)
        kept = self._kept() if shifts_context(engine, body) and body.n_keep is None else 0
        return [
            request_of(engine, body, prompt, logprobs=logprobs, grammar=grammar, choice=i, kept=kept)
            for i in range(self.n)
        ]

    def _render(self, messages: Sequence[Message]) -> str:
        begins = self._body.add_generation_prompt is not False
        return chat_text(self._engine, messages, self._tools, self._body.chat_template_kwargs, begins)

    def _kept(self) -> int:
        """Tokens of the tools and the system prompt, which a context shift keeps."""
        messages = [message.model_dump(exclude_none=True) for message in self._body.messages]
        text = fixed_beginning(
            messages, self._prompt, lambda said: self._render(list(map(Message.model_validate, said)))
        )
        return len(self._engine.tokenize(text))

    def parser(self) -> AnswerParser:
        """Tells the text of one answer from its reasoning and its calls."""
        return self._form.parser(self._tools, self._prompt)


def _openai(delta: Delta) -> dict[str, Any]:
    """A delta as the field of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class ChatAnswer(Answering):
    """Answers as messages."""

    body: ChatBody
    parsers: list[AnswerParser]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._id, self._created = new_id("chatcmpl"), int(time.time())

    def begin(self) -> list[bytes]:
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self.choices))]

    def advance(self, number: int, part: Part) -> list[bytes]:
        deltas = self.parsers[number].feed(part.text)
        more = part.told
        if not part.logprobs and not more:
            return [self._chunk(number, _openai(delta)) for delta in deltas]
        logprobs = chat_logprobs(self.engine.model.vocabulary, part.logprobs) if part.logprobs else None
        first = _openai(deltas[0]) if deltas else {}
        rest = [self._chunk(number, _openai(delta)) for delta in deltas[1:]]
        return [self._chunk(number, first, logprobs=logprobs, **more), *rest]

    def complete(self, number: int) -> list[bytes]:
        deltas = self.parsers[number].finish(cut=self.finish_reason(number) == "length")
        more: dict[str, Any] = {}
        if not self._asked_usage and not self.remaining:
            more = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        if self.tells:
            more["rest_local"] = {"draft": self.results[number].draft.to_dict()}
        last = self._chunk(number, {}, finish_reason=self._finish_reason(number), **more)
        return [*(self._chunk(number, _openai(delta)) for delta in deltas), last]

    def end(self) -> list[bytes]:
        if not self._asked_usage:
            return [DONE]
        counts = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        return [event(self._head("chat.completion.chunk") | {"choices": []} | counts), DONE]

    def whole(self) -> dict[str, Any]:
        said = [
            [*parser.feed(choice.text), *parser.finish(cut=self.finish_reason(number) == "length")]
            for number, (parser, choice) in enumerate(zip(self.parsers, self.choices, strict=True))
        ]
        choices = [
            {
                "index": number,
                "message": message_of(deltas),
                "logprobs": self._logprobs(number),
                "finish_reason": self._finish_reason(number),
            }
            for number, deltas in enumerate(said)
        ]
        counts = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        return self._head("chat.completion") | {"choices": choices} | counts

    @property
    def _asked_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _usage(self) -> dict[str, Any]:
        return usage(self.results, self.per_prompt, self.body.prediction is not None, self.shows_steps)

    def _finish_reason(self, number: int) -> str:
        reason = self.finish_reason(number)
        return "tool_calls" if reason == "stop" and self.parsers[number].calls else reason

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
