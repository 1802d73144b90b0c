"""The text of custom tools: what the model is told about its format, what a grammar keeps of it, and how it is read.

The call of such a tool is a call of a function with one argument, `input`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rest_local.server.responses.fields import bad, text_of
from rest_local.server.responses.lark_text import expression_of


def schema_of_text(wanted: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str, bool]:
    """The schema of the text inside of JSON, a note for the model, and whether a forced call has to keep the schema.

    Raises ApiError 400, which names the place.
    """
    kind = wanted.get("type")
    plain = {"type": "string", "description": "The whole text of the call."}
    if kind == "text":
        return plain, "", False
    if kind != "grammar":
        raise bad(f"{place}.type", 'give "text" or "grammar"')
    syntax, definition = wanted.get("syntax"), text_of(wanted, "definition", place)
    if syntax not in ("lark", "regex"):
        raise bad(f"{place}.syntax", 'give "lark" or "regex"')
    note = f"The argument `input` is the text of the call. It must match this {syntax} grammar:\n{definition}"
    expression = definition if syntax == "regex" else expression_of(definition)
    if expression is None:
        return plain, note, False
    return plain | {"pattern": f"^(?:{expression})$"}, note, True


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(  # text inside of quotes that no later character can change; half of a surrogate pair is not
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


class InputText:
    """The text of a custom tool's call, read from its arguments, `{"input": "..."}`, as they arrive.

    Nothing is lost: arguments in another form become the text themselves, or their only string does.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._tail = ""
        self._said: list[str] = []
        self._opened = self._ended = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._said)

    def feed(self, fragment: str) -> str:
        """What is certain of the text after another fragment of the arguments."""
        self._raw.append(fragment)
        self._tail += fragment
        if not self._opened:
            opening = _OPENING.match(self._tail)
            if opening is None:
                return ""
            self._opened, self._tail = True, self._tail[opening.end() :]
        if self._ended:
            return ""
        found = _WHOLE.match(self._tail)
        assert found is not None
        self._tail = self._tail[found.end() :]
        self._ended = self._tail.startswith('"')
        return self._say(_decoded(found[0]))

    def finish(self) -> str:
        """The rest of the text, when the arguments are complete."""
        if self._ended:
            return ""
        raw = "".join(self._raw)
        try:
            value = json.loads(raw or "{}", strict=False)
        except (ValueError, RecursionError):
            cut = self._opened or '{"input":"'.startswith("".join(raw.split()))  # by a limit
            return "" if cut else self._say(raw)
        texts = [each for each in value.values() if isinstance(each, str)] if isinstance(value, dict) else []
        given = value.get("input") if isinstance(value, dict) else None
        whole = given if isinstance(given, str) else texts[0] if len(texts) == 1 else "" if value == {} else raw
        return self._say(_encodable(whole).removeprefix(self.text))

    def _say(self, text: str) -> str:
        self._said.append(text)
        return text


def _decoded(text: str) -> str:
    try:
        return _encodable(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that JSON does not know, such as \d
        return text


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
