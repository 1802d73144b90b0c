"""Lark put together from parts: literals, special tokens, text up to a marker, JSON schemas. For formats of tool calls.

Contract: methods return terms, text to write into a rule; `grammar` compiles the whole apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar, json_rule, json_schema, lark

_MARKS = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")  # how models spell special tokens
Special = Callable[[str], int | None]


def no_special(text: str) -> int | None:
    """A vocabulary without special tokens."""
    return None


class Lark:
    """Rules of one grammar. `special`: the id of the special token that is spelled so, if there is one."""

    def __init__(self, special: Special = no_special) -> None:
        self._special = special
        self._rules: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """A new rule; its name. `options`: llguidance's, in brackets."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def one_of(self, ways: Sequence[str]) -> str:
        """A rule of alternatives."""
        return self.add(" | ".join(ways))

    def literal(self, text: str) -> str:
        """Exactly this text, special tokens where it spells them."""
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
        """Any text up to and with the first `marker`."""
        token = self._special(marker)
        if token is not None:
            return self.add(f"/(.|\\n)*/ <[{token}]>")
        return self.add("/(.|\\n)*/", f"[suffix={_quoted(marker)}]")

    def json(self, schema: Mapping[str, Any] | bool, strict: str = "", fallback: str = "{}", **options: str) -> str:
        """The values of a schema. Where it cannot be kept, those of the schema `fallback`, unless `strict` names what
        it belongs to: then OptionError."""
        try:
            json_schema(schema)
        except OptionError as error:
            if strict:
                raise OptionError(f"{strict}: {error}") from error
            schema = json.loads(fallback)
        return self.add(json_rule(schema, **options))

    def grammar(self, start: str) -> Grammar:
        """The grammar that begins with this body. Raises OptionError."""
        return lark("\n".join([f"start: {start}", *self._rules]))


def _quoted(text: str) -> str:
    """A literal of Lark, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
