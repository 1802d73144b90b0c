"""Deltas of an answer to items of a response, and to the typed events of its stream, in OpenAI's order.

Contract: the items do not depend on where the deltas were cut. Every event has a `sequence_number`, without gaps. Knows
no HTTP and no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rest_local.chat.tools import CallArguments, CallStart, Content, Delta, Reasoning
from rest_local.server.responses.formats import InputText
from rest_local.server.responses.items import seal
from rest_local.server.responses.store import item_id
from rest_local.server.responses.tools import Toolbox

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class Open:
    """An item that is being written. `fields`: the item; `index`: its place in the output."""

    PREFIX: str

    def __init__(self, response_id: str, index: int, fields: dict[str, Any]) -> None:
        self.fields = {"id": item_id(self.PREFIX, response_id, "o", index)} | fields
        self.index = index

    def begin(self) -> list[Event]:
        """Events before the first text."""
        return [self._item("response.output_item.added")]

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Events for more text."""
        raise NotImplementedError

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        """Events when the item is complete or cut off. `logprobs`: of tokens after its text."""
        raise NotImplementedError

    def _item(self, kind: str) -> Event:
        return {"type": kind, "output_index": self.index, "item": dict(self.fields)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.fields["id"], "output_index": self.index} | fields

    def _done(self, status: str, **fields: Any) -> list[Event]:
        self.fields |= {"status": status} | fields
        return [self._item("response.output_item.done")]


class OpenText(Open):
    """What a message and reasoning share: one part of content. `KIND`: its type."""

    KIND: str
    NAME: str

    def begin(self) -> list[Event]:
        self._texts: list[str] = []
        part = self._part("")
        return [*super().begin(), self._event("response.content_part.added", content_index=0, part=part)]

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        return [self._event(f"response.{self.NAME}.delta", content_index=0, delta=text)]

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        text = "".join(self._texts)
        part = self._part(text)
        return [
            self._event(f"response.{self.NAME}.done", content_index=0, text=text),
            self._event("response.content_part.done", content_index=0, part=part),
            *self._done(status, content=[part]),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.KIND, "text": text}


class Message(OpenText):
    """Text for the user."""

    PREFIX, KIND, NAME = "msg", "output_text", "output_text"

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(
            response_id, index, {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        )
        self._logprobs: Logprobs = []

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._logprobs += logprobs
        return [event | {"logprobs": logprobs} for event in super().more(text, logprobs)]

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        self._logprobs += logprobs
        first, *rest = super().end(status, logprobs)
        return [first | {"logprobs": self._logprobs}, *rest]

    def _part(self, text: str) -> dict[str, Any]:
        return super()._part(text) | {"annotations": [], "logprobs": list(self._logprobs)}


class Thought(OpenText):
    """Reasoning. `sealed`: also as `encrypted_content`, which clients send back."""

    PREFIX, KIND, NAME = "rs", "reasoning_text", "reasoning_text"

    def __init__(self, response_id: str, index: int, sealed: bool) -> None:
        super().__init__(
            response_id, index, {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        )
        self._sealed = sealed

    @property
    def text(self) -> str:
        """The reasoning so far."""
        return "".join(self._texts)

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        if self._sealed:
            self.fields["encrypted_content"] = seal(self.text)
        return super().end(status, logprobs)


class FunctionCall(Open):
    """A call of a function."""

    PREFIX = "fc"

    def begin(self) -> list[Event]:
        self._texts: list[str] = []
        return super().begin()

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        whole = "".join(self._texts)
        done = self._event("response.function_call_arguments.done", name=self.fields["name"], arguments=whole)
        return [done, *self._done(status, arguments=whole)]


class CustomCall(Open):
    """A call of a custom tool."""

    PREFIX = "ctc"

    def begin(self) -> list[Event]:
        self._input = InputText()
        return super().begin()

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        return self._deltas(self._input.feed(text))

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        rest = self._deltas(self._input.finish())
        done = self._event("response.custom_tool_call_input.done", input=self._input.text)
        return [*rest, done, *self._done(status, input=self._input.text)]

    def _deltas(self, text: str) -> list[Event]:
        return [self._event("response.custom_tool_call_input.delta", delta=text)] if text else []


class SearchCall(FunctionCall):
    """A search for tools, which the client executes. Its arguments are an object, so it has no deltas."""

    PREFIX = "tsc"

    def more(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        return []

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        raw = "".join(self._texts)
        try:
            arguments = json.loads(raw or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return self._done(status, arguments=arguments if isinstance(arguments, dict) else {"query": raw})


class Writer:
    """The output of one response.

    sealed   reasoning is repeated in `encrypted_content`
    """

    def __init__(self, response_id: str, toolbox: Toolbox, *, sealed: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._id, self._toolbox, self._sealed = response_id, toolbox, sealed
        self._open: Open | None = None
        self._held: Logprobs = []
        self._sequence = 0

    def numbered(self, *events: Event) -> list[Event]:
        """Events with their numbers, in the order in which they are sent."""
        first = self._sequence
        self._sequence += len(events)
        return [
            {"type": event["type"], "sequence_number": first + i} | event for i, event in enumerate(events)
        ]  # fmt: skip

    def add(self, deltas: Iterable[Delta], logprobs: Logprobs | None = None) -> list[Event]:
        """Events for these deltas. `logprobs`: of the tokens that came with them; those of text are reported."""
        self._held += logprobs or []
        return self.numbered(*(event for delta in deltas for event in self._events(delta)))

    def close(self, *, cut: bool) -> list[Event]:
        """Events at the end of the answer. `cut`: a limit ended it. An answer without anything is an empty message."""
        events: list[Event] = []
        if not self.items and self._open is None and not cut:
            events += self._begin(Message(self._id, 0))
        return self.numbered(*events, *self._end("incomplete" if cut else "completed"))

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items, also the one that is not complete."""
        return [*self.items, *([self._open.fields] if self._open else [])]

    def _events(self, delta: Delta) -> list[Event]:
        if isinstance(delta, CallStart):
            return self._begin(self._call(delta))
        if isinstance(delta, CallArguments):
            return self._more(delta.text)
        events: list[Event] = []
        kind: type[Open] = Message if isinstance(delta, Content) else Thought
        if not isinstance(self._open, kind):
            index = self._next
            events = self._begin(
                Message(self._id, index) if kind is Message else Thought(self._id, index, self._sealed)
            )
        if isinstance(delta, Reasoning):
            self.reasoning += delta.text
        return [*events, *self._more(delta.text)]

    @property
    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _call(self, delta: CallStart) -> Open:
        tool = self._toolbox.of(delta.name)
        index = self._next
        shared: dict[str, Any] = {"status": "in_progress", "call_id": delta.id}
        named = {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
        if tool.kind == "custom":
            return CustomCall(self._id, index, {"type": "custom_tool_call"} | shared | named | {"input": ""})
        if tool.kind == "tool_search":
            fields = {"type": "tool_search_call"} | shared | {"execution": "client", "arguments": {}}
            return SearchCall(self._id, index, fields)
        return FunctionCall(self._id, index, {"type": "function_call"} | shared | named | {"arguments": ""})

    def _begin(self, item: Open) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return [*events, *item.begin()]

    def _more(self, text: str) -> list[Event]:
        assert self._open is not None
        return self._open.more(text, self._released())

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status, self._released())
        self.items.append(self._open.fields)
        self._open = None
        return events

    def _released(self) -> Logprobs:
        held, self._held = self._held, []
        return held
