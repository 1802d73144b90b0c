"""Answers of Anthropic's Messages API: content blocks, and the events that let them grow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import from_json

from rest_local.api.answers import Answer, HasResult, Part, RequestContext, Usage, event, named_events, new_id
from rest_local.api.bodies import ChatBody
from rest_local.api.errors import ApiError, anthropic_shape
from rest_local.api.messages import CountBody, Translated, serial, translated
from rest_local.api.openai import ChatCall
from rest_local.api.requests import template_of
from rest_local.chat.tools import CallArguments, CallStart, Content, Delta, Reasoning
from rest_local.decoding.request import Request

Event = dict[str, Any]  # an event's data; `type` is also its name
# Anthropic's servers check the signature of a thinking block. Here it only has to be there, because clients expect one.
SIGNATURE = "rest-local"


class Blocks:
    """The blocks of one answer.

    Without `shows_thinking`, thinking blocks are empty, as Anthropic's are with `display` `omitted`. `serial` leaves
    out what follows the first call.
    """

    def __init__(self, *, shows_thinking: bool = True, serial: bool = False) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thinking, self._serial = shows_thinking, serial
        self._arguments = ""
        self._open = False
        self._ended = False

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        return [event for delta in deltas for event in self._feed(delta)]

    def _feed(self, delta: Delta) -> list[Event]:
        if self._serial and isinstance(delta, (CallStart, Content)):
            self._ended |= any(block["type"] == "tool_use" for block in self.content)
        if self._ended:
            return []
        if isinstance(delta, CallStart):
            return self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        if isinstance(delta, CallArguments):
            self._arguments += delta.text
            return [self._grown("input_json_delta", "partial_json", delta.text)]
        kind = "text" if isinstance(delta, Content) else "thinking"  # the field has the same name
        more = {} if kind == "text" else {"signature": ""}
        is_open = self._open and self.content[-1]["type"] == kind
        events = [] if is_open else self._begin({"type": kind, kind: ""} | more)
        if isinstance(delta, Reasoning) and not self._shows_thinking:
            return events
        self.content[-1][kind] += delta.text
        return [*events, self._grown(f"{kind}_delta", kind, delta.text)]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.finish()
        self.content.append(block)
        self._open, self._arguments = True, ""
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _grown(self, kind: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": {"type": kind, name: text}}

    def finish(self) -> list[Event]:
        """Return the events at the end of a block, and of the answer."""
        if not self._open:
            return []
        self._open, block = False, self.content[-1]
        stop: Event = {"type": "content_block_stop", "index": len(self.content) - 1}
        if block["type"] == "tool_use":
            block["input"] = _complete_arguments(self._arguments or "{}")
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            return [self._grown("signature_delta", "signature", SIGNATURE), stop]
        return [stop]


_SCALAR = re.compile(r"[-+.\w]*\s*\Z")


def _complete_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or only the complete ones if it was cut off. Text that is not JSON has none.

    The last digit of a number may be missing, so a number is complete only if something follows it.
    """
    for read in (text, _SCALAR.sub("", text)):
        try:
            found = from_json(read, allow_partial=read is not text)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


class MessagesCall:
    """A `Call` of this protocol. Making it raises CannotGenerate, or ApiError 501 without a template.

    `requests` sets `chat`, the translated conversation, and `n_prompt`, its length in tokens.
    """

    def __init__(self, context: RequestContext, body: CountBody) -> None:
        self.context, self.body = context, body
        self._able = template_of(context.engine).capabilities

    def count(self) -> int:
        """Count the tokens of the rendered prompt, even if it is longer than the context."""
        made, chat = self._translated()
        return made.run(chat.count)

    def requests(self) -> list[Request]:
        made, self.chat = self._translated()
        requests = made.run(self.chat.requests)
        self.n_prompt = len(requests[0].prompt)
        return requests

    def answer(self, answered: Sequence[HasResult]) -> MessagesAnswer:
        return MessagesAnswer(self, answered)

    def _translated(self) -> tuple[Translated, ChatCall]:
        made = translated(self.body, late_system=self._able.late_system and self._able.system_with_results)
        return made, ChatCall(self.context, made.body, begun=made.begun)


class MessagesAnswer(Answer[ChatBody]):
    def __init__(self, call: MessagesCall, answered: Sequence[HasResult]) -> None:
        self._parser = call.chat.made.parser()
        super().__init__(call.context, call.chat.body, answered, [self._parser])
        self._id, self._prompt_tokens = new_id("msg_"), call.n_prompt
        omitted = call.body.thinking is not None and call.body.thinking.display == "omitted"
        self._blocks = Blocks(shows_thinking=not omitted, serial=serial(call.body))

    def begin(self) -> list[bytes]:
        usage = self._cached(0) | {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return named_events([{"type": "message_start", "message": self._message([], usage)}])

    def quiet(self) -> list[bytes]:
        return named_events([{"type": "ping"}])

    def advance(self, number: int, part: Part) -> list[bytes]:
        return named_events(self._blocks.feed(part.deltas))

    def complete(self, number: int) -> list[bytes]:
        return named_events(self._blocks.finish())

    def end(self) -> list[bytes]:
        changed = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_events([changed, {"type": "message_stop"}])

    def whole(self) -> dict[str, Any]:
        self._blocks.feed(self.choices[0].deltas)
        self._blocks.finish()
        return self._message(self._blocks.content, self._usage()) | self._stop()

    def error_event(self, error: ApiError) -> bytes:
        return event(anthropic_shape(error), "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        """Return why the answer ended. If the context was full before `max_tokens`, a client has to shorten it."""
        result = self.results[0]
        if self.finish_reason(0) == "length":
            full = self._prompt_tokens + len(result.tokens) >= self.engine.n_ctx
            cut = full and len(result.tokens) < (self.body.max_tokens or 0)
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if result.stopping_word:
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stopping_word}
        return {"stop_reason": "tool_use" if self._parser.called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the counts at the end. Other machines must not see what was cached, so there all tokens are new."""
        found = Usage.of(self.results)
        cached = found.cached if self.shows_steps else 0
        counts = {"input_tokens": self._prompt_tokens - cached, "output_tokens": found.completion}
        return self._cached(cached) | counts

    def _cached(self, read: int) -> dict[str, int]:
        if not self.shows_steps:
            return {}
        return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": read}
