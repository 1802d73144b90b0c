"""The parts of an answer, in the order in which they become certain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning before the answer: `reasoning_content`."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call. Its arguments follow in fragments with the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind joined and empty text removed."""
    whole: list[Delta] = []
    for delta in deltas:
        if not isinstance(delta, CallStart) and not delta.text:
            continue
        last = whole[-1] if whole else None
        if isinstance(delta, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.index == delta.index:
            whole[-1] = CallArguments(last.index, last.text + delta.text)
        else:
            whole.append(delta)
    return whole


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The deltas of an answer as one message in OpenAI's form. `content` is None where there are only calls."""
    deltas = list(deltas)
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls[delta.index] = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        elif isinstance(delta, CallArguments):
            calls[delta.index]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
