"""Reads calls written as JSON objects, `{"name": ..., "arguments": {...}}`, which most formats put in their markers."""

from __future__ import annotations

import json
from collections.abc import Collection

from rest_local.chat.tools.source import Malformed, Source, Wait

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "call_id", "index", "type")


def json_call(source: Source, known: Collection[str] | None = None) -> Wait[None]:
    """One call. If its name comes first, its arguments are emitted as they arrive.

    `known`: only these names are calls. Raises Malformed for anything else, and for an object that is not complete.
    """
    yield from source.need("{")
    name, held, started = "", "", False
    while True:
        yield from source.space()
        if (yield from source.starts("}")):
            break
        key = yield from source.string()
        yield from source.space()
        yield from source.need(":")
        yield from source.space()
        if key in _NAMES and not name:
            name = yield from source.string()
            if not name or (known is not None and name not in known):
                raise Malformed
            if held:
                started = _whole(source, name, held)
        elif key in _ARGUMENTS and not started and name and (yield from source.peek()) == "{":
            source.start(name)
            started = True
            if not (yield from source.value(source.arguments)):
                return
            source.begin()
        elif key in _ARGUMENTS and not started and not held:
            held = yield from _collected(source)
            if name:
                started = _whole(source, name, held)
        elif key in _IGNORED:
            yield from source.value(lambda text: None)
        else:
            raise Malformed
        yield from source.space()
        if (yield from source.need(",", "}")) == "}":
            break
    if not started:
        if not name:
            raise Malformed
        _whole(source, name, "{}")
    source.end()


def json_calls(source: Source) -> Wait[None]:
    """A list of calls, or one. Raises Malformed as `json_call`; the calls before the fault are kept."""
    if not (yield from source.starts("[")):
        yield from json_call(source)
        return
    while True:
        yield from source.space()
        if (yield from source.starts("]")):
            return
        yield from json_call(source)
        source.begin()
        yield from source.space()
        if (yield from source.need(",", "]")) == "]":
            source.end()
            return


def closed(source: Source, marker: str) -> Wait[None]:
    """Reads the marker after a call, and surplus brackets before it. Reads nothing if there is no marker."""
    yield from source.space()
    source.begin()
    while (yield from source.starts("}", "]")):
        yield from source.space()
    if (yield from source.starts(marker)):
        source.end()
    else:
        source.rewind()


def _whole(source: Source, name: str, arguments: str) -> bool:
    source.start(name)
    source.arguments(arguments)
    source.begin()
    return True


def _collected(source: Source) -> Wait[str]:
    """Arguments that precede the name. Arguments inside a JSON string are decoded; null is an empty object."""
    raw: list[str] = []
    if not (yield from source.value(raw.append)):
        raise Malformed
    text = "".join(raw)
    if text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            text = str(json.loads(text, strict=False)) or "{}"
        except ValueError:
            raise Malformed from None
    return text
