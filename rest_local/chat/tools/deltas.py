"""The parts of an answer, in the order in which they become certain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
