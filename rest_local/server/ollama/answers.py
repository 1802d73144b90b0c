"""Answers in Ollama's shape: a stream of JSON lines, or one object. Knows no HTTP.

- Each line is sent by itself, because some clients read each part of the body that arrives as one line.
- A call is sent when it is complete, with its arguments as an object. One that a limit cuts off is left out; the last
  line then says `length`.
- Durations are nanoseconds. `prompt_eval_count` is the whole prompt, also what was in memory. Where steps are hidden,
  the time of the prompt is left out and the other times are rounded, as in llama-server's `timings`.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from rest_local.chat.tools import AnswerParser, CallStart, Content, Delta, Reasoning
from rest_local.server.answer_fields import COARSE_MS, chat_logprobs
from rest_local.server.answering import Answer, Answered, Asked, Part
from rest_local.server.bodies import GenerationBody
from rest_local.server.errors import ApiError, ollama_shape
from rest_local.server.streaming import StreamGroup

LINES = "application/x-ndjson"
_NS = 1_000_000  # in a millisecond


def line(value: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return to_json(value, inf_nan_mode="null") + b"\n"


def written(seconds: float) -> str:
    """A time as RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Calls:
    """Collects the calls of an answer."""

    def __init__(self) -> None:
        self._open: tuple[int, str] | None = None
        self._arguments = ""

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        """The call that is complete, now that this delta comes after it."""
        if isinstance(delta, (Content, Reasoning)):
            return self.finish()
        if isinstance(delta, CallStart):
            complete = self.finish()
            self._open = (delta.index, delta.name)
            return complete
        self._arguments += delta.text
        return []

    def finish(self) -> list[dict[str, Any]]:
        """The call that is open, if its arguments are complete."""
        begun, text = self._open, self._arguments
        self._open, self._arguments = None, ""
        if begun is None:
            return []
        try:
            arguments = json.loads(text or "{}")
        except ValueError:  # cut off by a limit
            return []
        known = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        return [{"function": {"index": begun[0], "name": begun[1], "arguments": known}}]


class OllamaAnswer(Answer[GenerationBody]):
    """The answer to one request, without the fields that hold its text.

    parser     splits the text into content, reasoning and calls; None where all of it is content
    ignored    fields that the client sent in vain, with the reasons
    began      when the request came, by `time.perf_counter`
    """

    MEDIA_TYPE = LINES

    def __init__(
        self,
        asked: Asked[Any],
        answered: Sequence[Answered],
        parser: AnswerParser | None,
        ignored: dict[str, str],
        began: float,
    ) -> None:
        super().__init__(asked, answered)
        self._parser, self._ignored, self._began = parser, ignored, began
        self._calls = Calls()

    def said(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields that hold text and calls."""
        raise NotImplementedError

    def last(self) -> dict[str, Any]:
        """Further fields of the last line."""
        return {}

    def advance(self, number: int, part: Part) -> list[bytes]:
        deltas: Sequence[Delta] = self._parser.feed(part.text) if self._parser else [Content(part.text)]
        lines = self._lines(deltas)
        if part.logprobs:
            entries = chat_logprobs(self.engine.model.vocabulary, part.logprobs)["content"]
            lines = [(lines[0] if lines else self.said("", "", ())) | {"logprobs": entries}, *lines[1:]]
        return [line(self._head() | fields | {"done": False}) for fields in lines]

    def complete(self, number: int) -> list[bytes]:
        lines = self._lines(self._rest())
        if calls := self._calls.finish():
            lines.append(self.said("", "", calls))
        closing = self._head() | self.said("", "", ()) | self._closing()
        return [*(line(self._head() | fields | {"done": False}) for fields in lines), line(closing)]

    def end(self) -> list[bytes]:
        return []

    def whole(self) -> dict[str, Any]:
        text = self.choices[0].text
        deltas = [*(self._parser.feed(text) if self._parser else [Content(text)]), *self._rest()]
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls = [call for delta in deltas for call in self._calls.feed(delta)] + self._calls.finish()
        answer = self._head() | self.said(content, thinking, calls)
        if self.choices[0].logprobs:
            answer |= {"logprobs": chat_logprobs(self.engine.model.vocabulary, self.choices[0].logprobs)["content"]}
        return answer | self._closing()

    def error_event(self, error: ApiError) -> bytes:
        return line(ollama_shape(error))

    async def _events(self, request: HttpRequest, streams: StreamGroup) -> AsyncIterator[bytes]:
        async for lines in super()._events(request, streams):
            for each in lines.splitlines(keepends=True):
                yield each

    def _rest(self) -> list[Delta]:
        return self._parser.finish(cut=self.finish_reason(0) == "length") if self._parser else []

    def _lines(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        lines = []
        for delta in deltas:
            if calls := self._calls.feed(delta):
                lines.append(self.said("", "", calls))
            if isinstance(delta, Content) and delta.text:
                lines.append(self.said(delta.text, "", ()))
            elif isinstance(delta, Reasoning):
                lines.append(self.said("", delta.text, ()))
        return lines

    def _head(self) -> dict[str, Any]:
        return {"model": self.asked.model, "created_at": written(time.time())}

    def _closing(self) -> dict[str, Any]:
        result = self.results[0]
        timings, elapsed = result.timings, 1e3 * (time.perf_counter() - self._began)
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": self.finish_reason(0),
            "total_duration": self._nanoseconds(elapsed),
            "load_duration": 0,
            "prompt_eval_count": timings.cached_tokens + timings.prompt_tokens,
            "eval_count": len(result.tokens),
            "eval_duration": self._nanoseconds(timings.predicted_ms),
        }
        if self.shows_steps:
            fields["prompt_eval_duration"] = self._nanoseconds(timings.prompt_ms)
        if self._ignored:
            fields["rest_local"] = {"ignored": self._ignored}
        return fields | self.last()

    def _nanoseconds(self, milliseconds: float) -> int:
        step = 1.0 / _NS if self.shows_steps else COARSE_MS
        return round(_NS * step * round(milliseconds / step))


class ChatLines(OllamaAnswer):
    """The answer to a chat."""

    def said(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateLines(OllamaAnswer):
    """The answer to a prompt.

    context   the tokens of the prompt, to which the last line adds those of the answer; None: the client gets none
    """

    def __init__(
        self,
        asked: Asked[Any],
        answered: Sequence[Answered],
        parser: AnswerParser | None,
        ignored: dict[str, str],
        began: float,
        context: Sequence[int] | None,
    ) -> None:
        super().__init__(asked, answered, parser, ignored, began)
        self._context = context

    def said(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})

    def last(self) -> dict[str, Any]:
        return {} if self._context is None else {"context": [*self._context, *self.results[0].tokens]}


def loaded(model: str, *, of_chat: bool) -> dict[str, Any]:
    """The answer to a request that only loads the model."""
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if of_chat else {"response": ""}
    head = {"model": model, "created_at": written(time.time())}
    return head | text | {"done": True, "done_reason": "load"}
