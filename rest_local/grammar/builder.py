"""Builds Lark text from literals, special tokens, text up to a marker and JSON schemas, for formats of tool calls.

Contract: methods return terms, which are text for a rule. `grammar` compiles the result as `rest_local.grammar.lark`
does.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar, json_schema, lark
from rest_local.grammar.schema import json_rule, widened

_MARKS = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")  # texts that may be special tokens
Special = Callable[[str], int | None]


def no_special(text: str) -> int | None:
    """A vocabulary without special tokens."""
    return None


class Lark:
    """The rules of one grammar. `special`: the id of the special token with a text, None if there is none."""

    def __init__(self, special: Special = no_special) -> None:
        self._special = special
        self._rules: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. `options`: llguidance's options of a rule, in brackets."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def one_of(self, ways: Sequence[str]) -> str:
        """Add a rule with these alternatives and return its name."""
        return self.add(" | ".join(ways))

    def literal(self, text: str) -> str:
        """Exactly this text. Parts of it that are special tokens match only those."""
        parts = [part for part in _MARKS.split(text) if part]
        terms: list[str] = []
        plain = ""
        for part in parts:
            token = self._special(part) if _MARKS.fullmatch(part) else None
            if token is None:
                plain += part
                continue
            terms += [*([_quoted(plain)] if plain else []), f"<[{token}]>"]
            plain = ""
        return " ".join([*terms, *([_quoted(plain)] if plain or not terms else [])])

    def until(self, marker: str) -> str:
        """Any text up to and including the first `marker`."""
        token = self._special(marker)
        if token is not None:
            return self.add(f"/(.|\\n)*/ <[{token}]>")
        return self.add("/(.|\\n)*/", f"[suffix={_quoted(marker)}]")

    def json(self, schema: Mapping[str, Any] | bool, strict: str = "", fallback: str = "{}", **options: str) -> str:
        """The values of a schema. What cannot be kept is left out, or gives way to the schema `fallback`, JSON text.

        `strict`: what the schema belongs to; then raises OptionError instead, with this in its message.
        """
        try:
            json_schema(schema)
        except OptionError as error:
            if strict:
                raise OptionError(f"{strict}: {error}") from error
            schema = _kept(schema, fallback)
        return self.add(json_rule(schema, **options))

    def grammar(self, start: str) -> Grammar:
        """The grammar with this body as its start rule. Raises OptionError."""
        return lark("\n".join([f"start: {start}", *self._rules]))


def _kept(schema: Mapping[str, Any] | bool, fallback: str) -> Mapping[str, Any]:
    """What can be kept of a schema that cannot be kept."""
    if isinstance(schema, Mapping) and (wider := widened(schema)) != schema:
        with contextlib.suppress(OptionError):
            json_schema(wider)
            return wider
    given: dict[str, Any] = json.loads(fallback)
    return given


def _quoted(text: str) -> str:
    """A literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
