"""Answers of the Responses API: items, the typed events that let them grow, and the response that holds them.

Contract: the items do not depend on where the deltas were cut. Every event has a `sequence_number`, without gaps, and
events have OpenAI's order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rest_local.api.answers import (
    Answer,
    HasResult,
    Part,
    RequestContext,
    Usage,
    named_events,
    prediction_counts,
    timings,
)
from rest_local.api.bodies import ChatBody
from rest_local.api.errors import ApiError, responses_error
from rest_local.api.openai import ChatCall, chat_logprobs
from rest_local.api.response_tools import InputText, Toolbox
from rest_local.api.responses import ResponseBody, TranslatedRequest, seal
from rest_local.chat.tools import CallArguments, CallStart, Content, Delta, Reasoning
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.request import Request
from rest_local.errors import OptionError

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class OutputItem:
    """An output item that is being written: text, reasoning, or a call.

    `sealed` repeats reasoning as `encrypted_content`, which clients send back.
    """

    def __init__(self, response_id: str, index: int, fields: dict[str, Any], *, sealed: bool = False) -> None:
        self.kind = fields["type"]
        self.fields = {"id": f"{PREFIXES[self.kind]}_{response_id[5:]}_{index}"} | fields
        self.index, self._sealed = index, sealed
        self._texts: list[str] = []
        self._logprobs: Logprobs = []
        self._input = InputText()
        self._part_type = {"message": "output_text", "reasoning": "reasoning_text"}.get(self.kind)

    def begin(self) -> list[Event]:
        events = [self._item("response.output_item.added")]
        if self._part_type:
            events.append(self._event("response.content_part.added", content_index=0, part=self._part()))
        return events

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        if self.kind == "custom_tool_call":
            return self._input_deltas(self._input.feed(text))
        self._texts.append(text)
        if self.kind == "tool_search_call":
            return []  # its arguments are an object, so it has no deltas
        if not self._part_type:
            return [self._event("response.function_call_arguments.delta", delta=text)]
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if self.kind == "message" else {}
        return [self._event(f"response.{self._part_type}.delta", content_index=0, delta=text) | more]

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        """Return the events when the item is complete or cut off. `logprobs` belong to tokens after its text."""
        self._logprobs += logprobs
        text, events = "".join(self._texts), []
        if self._part_type:
            part = self._part()
            more = {"logprobs": self._logprobs} if self.kind == "message" else {}
            events = [
                self._event(f"response.{self._part_type}.done", content_index=0, text=text) | more,
                self._event("response.content_part.done", content_index=0, part=part),
            ]
            if self._sealed:
                self.fields["encrypted_content"] = seal(text)
            fields: dict[str, Any] = {"content": [part]}
        elif self.kind == "custom_tool_call":
            events = self._input_deltas(self._input.finish())
            fields = {"input": self._input.text}
            events.append(self._event("response.custom_tool_call_input.done", **fields))
        elif self.kind == "tool_search_call":
            fields = {"arguments": _object_or_query(text)}
        else:
            fields = {"arguments": text}
            done = "response.function_call_arguments.done"
            events.append(self._event(done, name=self.fields["name"], arguments=text))
        self.fields |= {"status": status} | fields
        return [*events, self._item("response.output_item.done")]

    def _item(self, kind: str) -> Event:
        return {"type": kind, "output_index": self.index, "item": dict(self.fields)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.fields["id"], "output_index": self.index} | fields

    def _part(self) -> dict[str, Any]:
        part = {"type": self._part_type, "text": "".join(self._texts)}
        return part | ({"annotations": [], "logprobs": list(self._logprobs)} if self.kind == "message" else {})

    def _input_deltas(self, text: str) -> list[Event]:
        return [self._event("response.custom_tool_call_input.delta", delta=text)] if text else []


def _object_or_query(raw: str) -> dict[str, Any]:
    """Return the arguments of a search for tools."""
    try:
        arguments = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"query": raw}


class Writer:
    """The output of one response. `sealed` repeats reasoning in `encrypted_content`."""

    def __init__(self, response_id: str, toolbox: Toolbox, *, sealed: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._id, self._toolbox, self._sealed = response_id, toolbox, sealed
        self._open: OutputItem | None = None
        self._pending_logprobs: Logprobs = []
        self._sequence = 0

    def numbered(self, *events: Event) -> list[Event]:
        """Add numbers to events in the order in which they are sent."""
        first = self._sequence
        self._sequence += len(events)
        return [{"type": event["type"], "sequence_number": i} | event for i, event in enumerate(events, first)]

    def add(self, deltas: Iterable[Delta], logprobs: Logprobs | None = None) -> list[Event]:
        """Return the events for these deltas. Of the `logprobs` that came with them, those of text are reported."""
        self._pending_logprobs += logprobs or []
        return self.numbered(*(event for delta in deltas for event in self._events(delta)))

    def close(self, *, cut: bool) -> list[Event]:
        """Return the events at the end of the answer, which may be cut off. An empty answer has an empty message."""
        events: list[Event] = []
        if not self.items and self._open is None and not cut:
            events += self._begin(self._text("message"))
        return self.numbered(*events, *self._end("incomplete" if cut else "completed"))

    @property
    def output(self) -> list[dict[str, Any]]:
        """Return all items, including an incomplete one."""
        return [*self.items, *([self._open.fields] if self._open else [])]

    def _events(self, delta: Delta) -> list[Event]:
        if isinstance(delta, CallStart):
            return self._begin(self._call(delta))
        events: list[Event] = []
        if not isinstance(delta, CallArguments):
            kind = "message" if isinstance(delta, Content) else "reasoning"
            if self._open is None or self._open.kind != kind:
                events = self._begin(self._text(kind))
        if isinstance(delta, Reasoning):
            self.reasoning += delta.text
        assert self._open is not None
        return [*events, *self._open.more(delta.text, self._released())]

    def _text(self, kind: str) -> OutputItem:
        more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        fields = {"type": kind, "status": "in_progress"} | more | {"content": []}
        return OutputItem(self._id, self._next, fields, sealed=self._sealed and kind == "reasoning")

    @property
    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _call(self, delta: CallStart) -> OutputItem:
        tool = self._toolbox.of(delta.name)
        shared: dict[str, Any] = {"status": "in_progress", "call_id": delta.id}
        named = {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
        if tool.kind == "custom":
            fields = {"type": "custom_tool_call"} | shared | named | {"input": ""}
        elif tool.kind == "tool_search":
            fields = {"type": "tool_search_call"} | shared | {"execution": "client", "arguments": {}}
        else:
            fields = {"type": "function_call"} | shared | named | {"arguments": ""}
        return OutputItem(self._id, self._next, fields)

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return [*events, *item.begin()]

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status, self._released())
        self.items.append(self._open.fields)
        self._open = None
        return events

    def _released(self) -> Logprobs:
        pending, self._pending_logprobs = self._pending_logprobs, []
        return pending


class ResponseCall:
    """A `Call` of the Responses API. `requests` sets `translated` and `chat`."""

    def __init__(self, context: RequestContext, body: ResponseBody) -> None:
        self.context, self._body = context, body

    def requests(self) -> list[Request]:
        self.translated = TranslatedRequest.of(self._body)
        self.chat = ChatCall(self.context, self.translated.chat)
        try:
            return self.chat.requests()
        except OptionError as error:
            raise self.translated.error(error) from error

    def answer(self, answered: Sequence[HasResult]) -> ResponseAnswer:
        return ResponseAnswer(self, answered)


class ResponseAnswer(Answer[ChatBody]):
    """The events and the object of one response."""

    def __init__(self, call: ResponseCall, answered: Sequence[HasResult]) -> None:
        self._parser = call.chat.made.parser()
        super().__init__(call.context, call.translated.chat, answered, [self._parser])
        self._translated = call.translated
        self._writer = Writer(
            call.translated.id, call.translated.toolbox, sealed=call.translated.body.includes_reasoning
        )

    def begin(self) -> list[bytes]:
        response = self._translated.response(self.context.model, self.engine.sampling(), "in_progress")
        kinds = ("response.created", "response.in_progress")
        return named_events(self._writer.numbered(*({"type": kind, "response": response} for kind in kinds)))

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        response = self._translated.response(self.context.model, self.engine.sampling(), "in_progress")
        return named_events(self._writer.numbered({"type": "response.in_progress", "response": response} | fields))

    def advance(self, number: int, part: Part) -> list[bytes]:
        events = self._writer.add(part.deltas, self._logprobs(part.logprobs))
        if events:
            events[-1] |= part.extension
        return named_events(events)

    def complete(self, number: int) -> list[bytes]:
        return named_events(self._writer.close(cut=self._cut))

    def end(self) -> list[bytes]:
        response = self._final()
        last = {"type": f"response.{response['status']}", "response": response, "timings": response["timings"]}
        return named_events(self._writer.numbered(last))

    def whole(self) -> dict[str, Any]:
        self._writer.add(self.choices[0].deltas, self._logprobs(self.choices[0].logprobs))
        self._writer.close(cut=self._cut)
        return self._final()

    @property
    def _cut(self) -> bool:
        """Return True if the last item is incomplete."""
        return self.finish_reason(0) == "length" or self._parser.unfinished

    def error_event(self, error: ApiError) -> bytes:
        """Return the events `error` and `response.failed`."""
        failed = self._translated.response(
            self.context.model,
            self.engine.sampling(),
            "failed",
            self._writer.output,
            error={"code": "server_error", "message": error.message},
        )
        events = self._writer.numbered(responses_error(error), {"type": "response.failed", "response": failed})
        return b"".join(named_events(events))

    def _final(self) -> dict[str, Any]:
        """Return the response at the end of the answer."""
        told: dict[str, Any] = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        status = "incomplete" if self.finish_reason(0) == "length" else "completed"
        if status == "incomplete":
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            told["completed_at"] = int(time.time())
        return self._translated.response(self.context.model, self.engine.sampling(), status, self._writer.items, **told)

    def _usage(self) -> dict[str, Any]:
        """Return counts. Clients read the details without a check, so what other machines may not see is 0."""
        found = Usage.of(self.results)
        thought = len(self.engine.model.vocabulary.tokenize(self._writer.reasoning)) if self._writer.reasoning else 0
        of_answer = {"reasoning_tokens": min(thought, found.completion)}
        if self.shows_steps:
            of_answer |= prediction_counts(self.results)
        return {
            "input_tokens": found.prompt,
            "input_tokens_details": {"cached_tokens": found.cached if self.shows_steps else 0, "cache_write_tokens": 0},
            "output_tokens": found.completion,
            "output_tokens_details": of_answer,
            "total_tokens": found.prompt + found.completion,
        }

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Logprobs:
        if not self._translated.body.includes_logprobs or not entries:
            return []
        content: Logprobs = chat_logprobs(self.engine.model.vocabulary, entries)["content"]
        return content
