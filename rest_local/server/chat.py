"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.chat.conversation import fixed_beginning
from rest_local.chat.images import Images, take_images
from rest_local.chat.tools import (
    AnswerFormat,
    AnswerParser,
    CallStart,
    Content,
    Delta,
    Reasoning,
    message_of,
    tools_of,
)
from rest_local.decoding.core import NO_PROJECTOR_HERE
from rest_local.decoding.images import ImagePrompt
from rest_local.decoding.request import Request
from rest_local.errors import OptionError
from rest_local.server.answer_fields import chat_logprobs
from rest_local.server.answering import Answered, Asked, Generating, OpenAIAnswer, Part
from rest_local.server.bodies import ChatBody, NamedTool, parse
from rest_local.server.errors import ApiError
from rest_local.server.prompts import chat_text, template_of
from rest_local.server.requests import chat_grammar, longest_prompt, request_of, shifts_context
from rest_local.server.state import state_of
from rest_local.server.streaming import json_response


async def chat_completions(request: HttpRequest) -> Response:
    """OpenAI's chat, with llama-server's additions."""
    asked = Generating.of(request, await parse(request, ChatBody))
    chat = Chat(asked)
    streams = await asked.submit(request, chat.requests)
    return await chat.answer(streams.streams).respond(request, streams)


async def input_tokens(request: HttpRequest) -> Response:
    """How many tokens a chat would give the model. Nothing is generated."""
    chat = Chat(Generating.of(request, await parse(request, ChatBody)))
    count = await state_of(request).workers.run(request, chat.count)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


class Chat:
    """One chat: `requests` must be called first, in a worker thread, then `answer` or `parser`. Knows no HTTP.

    `begun`: text with which the client has begun the answer; the model goes on after it. Raises ApiError 501 if the
    model has no chat template.
    """

    def __init__(self, asked: Asked[ChatBody], *, begun: str = "") -> None:
        self._asked, self._engine, self._body, self._begun = asked, asked.engine, asked.body, begun
        self._tools = tools_of(asked.body.tools) if asked.body.tool_choice != "none" else []
        self._form = AnswerFormat.of(template_of(self._engine).source, self._engine.model.vocabulary.special_token)
        self._prompt = self._rendered = self._opening = ""

    def count(self) -> int:
        """Tokens of the prompt, also where it is longer than the context. Raises OptionError, TemplateFailed."""
        messages, images = self._messages()
        return len(self._tokens(self._begin(messages, images), images)[0])

    def requests(self) -> list[Request]:
        """One for each choice. Raises ApiError, OptionError, TemplateFailed."""
        engine, body = self._engine, self._body
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        messages, images = self._messages()
        self._prompt = self._begin(messages, images)
        prompt, chunks = self._tokens(self._prompt, images, longest_prompt(engine, body))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
        grammar = chat_grammar(body, self._form, self._tools, choice, self._prompt)
        kept = 0
        if shifts_context(engine, body) and body.n_keep is None:  # keep the tools and the system prompt
            kept = len(self._tokens(fixed_beginning(messages, self._prompt, self._render), images)[0])
        return [
            request_of(engine, body, prompt, images=chunks, logprobs=logprobs, grammar=grammar, choice=i, kept=kept)
            for i in range(body.n or 1)
        ]

    def _messages(self) -> tuple[list[Any], Images]:
        """The messages, with marks in the places of images. Raises OptionError for images without a projector."""
        messages, images = take_images([message.model_dump(exclude_none=True) for message in self._body.messages])
        if images and self._engine.projector is None:
            raise OptionError(f"{images.first_place}: {NO_PROJECTOR_HERE}")
        return messages, images

    def _begin(self, messages: Sequence[Mapping[str, Any]], images: Images) -> str:
        """The prompt, with what the client has begun of the answer."""
        self._rendered = self._render(messages)
        images.check_all_in(self._rendered)
        self._opening = self._form.opening(self._rendered) if self._begun else ""
        return self._rendered + self._opening + self._begun

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        begins = self._body.add_generation_prompt is not False
        return chat_text(self._engine, messages, self._tools, self._body.chat_template_kwargs, begins)

    def parser(self) -> AnswerParser:
        """What splits the text of one answer."""
        parser = self._form.parser(self._tools, self._rendered)
        parser.feed(self._opening)
        return parser

    def _tokens(self, text: str, images: Images, most: int | None = None) -> ImagePrompt:
        if images:
            return self._engine.image_prompt(text, images, most=most)
        return self._engine.tokenize(text, most=most), ()

    def answer(self, answered: Sequence[Answered]) -> ChatAnswer:
        """The answer. `answered`: for each of the requests."""
        return ChatAnswer(self._asked, answered, [self.parser() for _ in answered])


def _openai(delta: Delta) -> dict[str, Any]:
    """The delta as OpenAI's field of an event."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class ChatAnswer(OpenAIAnswer[ChatBody]):
    """Answers as messages. `parsers`: one for each answer, which splits its text into content, reasoning and calls."""

    ID_PREFIX = "chatcmpl"
    EVENT_KIND = "chat.completion.chunk"

    def __init__(self, asked: Asked[ChatBody], answered: Sequence[Answered], parsers: Sequence[AnswerParser]) -> None:
        super().__init__(asked, answered, per_prompt=asked.body.n or 1)
        self.parsers = parsers

    def begin(self) -> list[bytes]:
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self.choices))]

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [self._chunk(number, {}, **fields)]

    def advance(self, number: int, part: Part) -> list[bytes]:
        deltas = self.parsers[number].feed(part.text)
        fields = part.extension
        if not (deltas or part.logprobs or part.origins):
            return []
        logprobs = chat_logprobs(self.engine.model.vocabulary, part.logprobs) if part.logprobs else None
        first = _openai(deltas[0]) if deltas else {}
        rest = [self._chunk(number, _openai(delta)) for delta in deltas[1:]]
        return [self._chunk(number, first, logprobs=logprobs, **fields), *rest]

    def complete(self, number: int) -> list[bytes]:
        deltas = self.parsers[number].finish(cut=self.finish_reason(number) == "length")
        reason = self._finish_reason(number)
        last = self._chunk(number, {}, finish_reason=reason, **self._closing(number))
        return [*(self._chunk(number, _openai(delta)) for delta in deltas), last]

    def whole(self) -> dict[str, Any]:
        messages = [
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
            for number, deltas in enumerate(messages)
        ]
        return self._head("chat.completion") | {"choices": choices} | self._counts()

    def _finish_reason(self, number: int) -> str:
        reason = self.finish_reason(number)
        return "tool_calls" if reason == "stop" and self.parsers[number].calls else reason

    def _logprobs(self, number: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.engine.model.vocabulary, self.choices[number].logprobs)

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        return self._event(index, {"delta": delta}, **fields)
