"""An answer as Anthropic's content blocks, and the events of how they grow.

Contract: deltas of an answer in, events out; `content` is what the events add up to, so a whole answer is made of the
same. One block is open at a time: each kind of delta closes the block before it. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from rest_local.chat.tools import CallArguments, CallStart, Content, Delta, Reasoning

Event = dict[str, Any]
"""An event's data; `type` is also its name."""

SIGNATURE = "rest-local"
"""Of a thinking block. Anthropic's servers check theirs; here it only has to be there, because clients expect one."""


class Blocks:
    """The blocks of one answer.

    shows_thinking   else a thinking block is empty, as Anthropic's are with `display` `omitted`
    serial           what follows the first call is left out
    """

    def __init__(self, *, shows_thinking: bool = True, serial: bool = False) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thinking, self._serial = shows_thinking, serial
        self._arguments = ""
        self._open = False
        self._ended = False

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        """The events of these deltas."""
        return [event for delta in deltas for event in self._feed(delta)]

    def finish(self) -> list[Event]:
        """The events at the end of the answer."""
        return self._close()

    def _feed(self, delta: Delta) -> list[Event]:
        if self._serial and isinstance(delta, (CallStart, Content)) and self._calls:
            self._ended = True
        if self._ended:
            return []
        if isinstance(delta, CallStart):
            return self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        if isinstance(delta, CallArguments):
            self._arguments += delta.text
            return [self._grown("input_json_delta", "partial_json", delta.text)]
        kind, name = ("text", "text") if isinstance(delta, Content) else ("thinking", "thinking")
        events = [] if self._is_open(kind) else self._begin(_empty(kind))
        if isinstance(delta, Reasoning) and not self._shows_thinking:
            return events
        self.content[-1][name] += delta.text
        return [*events, self._grown(f"{kind}_delta", name, delta.text)]

    @property
    def _calls(self) -> int:
        return sum(block["type"] == "tool_use" for block in self.content)

    def _is_open(self, kind: str) -> bool:
        return self._open and self.content[-1]["type"] == kind

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self.content.append(block)
        self._open, self._arguments = True, ""
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _grown(self, kind: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open, block = False, self.content[-1]
        stop: Event = {"type": "content_block_stop", "index": self._index}
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            return [self._grown("signature_delta", "signature", SIGNATURE), stop]
        return [stop]

    @property
    def _index(self) -> int:
        return len(self.content) - 1


def _empty(kind: str) -> dict[str, Any]:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. A call that a limit cut off has those that are complete; what is not JSON has none."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
