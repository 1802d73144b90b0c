"""Anthropic's Messages API in front of the chat of this server.

`conversation` makes a chat of the body, `rest_local.server.chat` makes the engine's request of that and the parser of
the answer, `blocks` makes Anthropic's content blocks of what the parser reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.chat.tools import AnswerParser
from rest_local.decoding.request import Request
from rest_local.server.answer_fields import new_id
from rest_local.server.answering import Answer, Answered, Asked, Generating, Part
from rest_local.server.bodies import ChatBody, parse
from rest_local.server.chat import Chat
from rest_local.server.errors import ApiError, anthropic_shape, headers_of
from rest_local.server.messages.blocks import Blocks, Event
from rest_local.server.messages.bodies import CountBody, MessagesBody
from rest_local.server.messages.conversation import Translated, serial, translated
from rest_local.server.operations import Routes, post
from rest_local.server.prompts import template_of
from rest_local.server.state import State, state_of
from rest_local.server.streaming import event, json_response

PING_SECONDS = 10.0
"""Between two events of a stream at most. Clients wait for a minute and longer; prompts can take several."""


async def create(request: HttpRequest) -> Response:
    """POST /v1/messages."""
    body = await parse(request, MessagesBody)
    state = state_of(request)
    made = await _translated(request, state, body)
    asked = Generating.of(request, made.body)
    chat = Chat(asked, begun=made.begun)
    requests: list[Request] = []

    def prepare() -> list[Request]:
        requests.extend(made.run(chat.requests))
        return requests

    streams = await asked.submit(request, prepare)
    answer = MessagesAnswer(asked, streams.streams, chat.parser(), len(requests[0].prompt), _blocks_of(body))
    return _with_headers(request, await answer.respond(request, streams))


async def count_tokens(request: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens: the tokens of the rendered prompt, exactly, in a worker thread."""
    body = await parse(request, CountBody)
    state = state_of(request)
    made = await _translated(request, state, body)
    chat = Chat(Generating.of(request, made.body), begun=made.begun)
    tokens = await state.workers.run(request, lambda: made.run(chat.count))
    return _with_headers(request, json_response({"input_tokens": tokens}))


ROUTES: Routes = (
    (post("/v1/messages", "Continue a conversation, as Anthropic's API does", MessagesBody, streams=True), create),
    (post("/v1/messages/count_tokens", "Count the tokens of a prompt", CountBody), count_tokens),
)


async def _translated(request: HttpRequest, state: State, body: CountBody) -> Translated:
    """Raises ApiError 503 while the model loads, 404 for another model, 501 without a template, 400."""
    _, engine = state.loaded()
    state.check_model(body.model)

    def work() -> Translated:
        able = template_of(engine).capabilities
        return translated(body, late_system=able.late_system and able.system_with_results)

    return await state.workers.run(request, work)


def _blocks_of(body: MessagesBody) -> Blocks:
    omitted = body.thinking is not None and body.thinking.display == "omitted"
    return Blocks(shows_thinking=not omitted, serial=serial(body))


def _with_headers(request: HttpRequest, response: Response) -> Response:
    response.headers.update(headers_of(request.url.path))
    return response


class MessagesAnswer(Answer[ChatBody]):
    """One answer as Anthropic's message. `prompt_tokens`: of the whole prompt."""

    QUIET_SECONDS = PING_SECONDS

    def __init__(
        self,
        asked: Asked[ChatBody],
        answered: Sequence[Answered],
        parser: AnswerParser,
        prompt_tokens: int,
        blocks: Blocks,
    ) -> None:
        super().__init__(asked, answered)
        self._id = new_id("msg").replace("-", "_")
        self._parser, self._prompt_tokens, self._blocks = parser, prompt_tokens, blocks

    def begin(self) -> list[bytes]:
        usage = self._cached(0) | {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return _named([{"type": "message_start", "message": self._message([], usage)}])

    def quiet(self) -> list[bytes]:
        return _named([{"type": "ping"}])

    def advance(self, number: int, part: Part) -> list[bytes]:
        return _named(self._blocks.feed(self._parser.feed(part.text)))

    def complete(self, number: int) -> list[bytes]:
        return _named(self._rest())

    def end(self) -> list[bytes]:
        changed = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return _named([changed, {"type": "message_stop"}])

    def whole(self) -> dict[str, Any]:
        self._blocks.feed(self._parser.feed(self.choices[0].text))
        self._rest()
        return self._message(self._blocks.content, self._usage()) | self._stop()

    def error_event(self, error: ApiError) -> bytes:
        return event(anthropic_shape(error), "error")

    def _rest(self) -> list[Event]:
        """The events of what was held back, and of the end of the last block."""
        held = self._parser.finish(cut=self.finish_reason(0) == "length")
        return [*self._blocks.feed(held), *self._blocks.finish()]

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended. Where the context was full before `max_tokens`, a client can only shorten it."""
        result = self.results[0]
        if self.finish_reason(0) == "length":
            full = self._prompt_tokens + len(result.tokens) >= self.engine.n_ctx
            cut = full and len(result.tokens) < (self.body.max_tokens or 0)
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if result.stopping_word:
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stopping_word}
        return {"stop_reason": "tool_use" if self._parser.calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Counts at the end. To other machines the whole prompt counts as new: what was cached, others have sent."""
        result = self.results[0]
        cached = result.timings.cached_tokens if self.shows_steps else 0
        counts = {"input_tokens": self._prompt_tokens - cached, "output_tokens": len(result.tokens)}
        return self._cached(cached) | counts

    def _cached(self, read: int) -> dict[str, int]:
        if not self.shows_steps:
            return {}
        return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": read}


def _named(events: Sequence[Event]) -> list[bytes]:
    return [event(each, each["type"]) for each in events]
