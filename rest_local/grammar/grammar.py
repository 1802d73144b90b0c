"""Make grammars from the notations that callers use: GBNF, Lark, JSON schemas. Each becomes Lark, which is compiled.

Contract: every function compiles the grammar in a child process (`compiler`) before it returns, so that each `Grammar`
can be compiled in bounded time and memory. That takes 6 ms for a schema of 30 properties, and nothing for one of the 64
newest grammars.

`Lark` builds Lark text from literals, special tokens, text up to a marker and JSON schemas, for formats of tool
calls. Its methods return terms, which are text for a rule; `Lark.grammar` compiles the result.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar import schema as schemas
from rest_local.grammar.schema import MAX_BYTES, json_rule

# Without this option only the canonical tokens of a forced text are allowed, and other draft tokens for it fail.
_HEADER = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Grammar:
    """A language over bytes. `lark` has its rules, `start` first; `source` is the caller's text."""

    lark: str
    source: str

    @property
    def compiled_text(self) -> str:
        """Return the text for llguidance. Options come last, so that line numbers in messages are the caller's."""
        return self.lark + _HEADER


def lark(text: str) -> Grammar:
    """Make a grammar from llguidance's dialect of Lark.

    Args:
        text: rules, one of them named `start`

    Raises:
        OptionError: the grammar cannot be compiled, or not within the limits
    """
    _check_text(text, "Lark text with a rule `start`")
    grammar = Grammar(text, text)
    _try(grammar)
    return grammar


def gbnf(text: str) -> Grammar:
    """Make a grammar from llama.cpp's notation. llguidance's converter translates it to Lark.

    A grammar without recursion becomes one regular expression. Between the parts of other rules the longest match wins,
    as in Lark.

    Args:
        text: rules, one of them named `root`

    Raises:
        OptionError: the grammar cannot be compiled, or the converter cannot read it (references to tokens, `<think>`)
    """
    from rest_local.grammar.compiler import convert

    _check_text(text, "GBNF text with a rule `root`")
    try:
        grammar = Grammar(convert(text), text)
    except OptionError as error:
        raise OptionError(
            f"grammar: the GBNF cannot be read: {error}; correct it, or write the grammar in Lark"
        ) from None
    _try(grammar)
    return grammar


def json_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """Make a grammar of the JSON values that a schema allows. docs/howto/json.md lists the keywords.

    Args:
        schema: of drafts 4 to 2020-12, True for any value

    Raises:
        OptionError: the schema cannot be kept exactly (keywords that llguidance does not support, unknown formats,
            references outside the schema), allows nothing, or is too deep or too large
    """
    from rest_local.grammar.compiler import compile_apart

    grammar = Grammar(f"start: {json_rule(schema)}", json.dumps(schema))
    try:
        compile_apart(grammar.compiled_text)
    except OptionError as error:
        raise OptionError(f"JSON schema: {schemas.cause(str(error))}") from None
    return grammar


def any_object() -> Grammar:
    """Make the grammar of any JSON object, for `response_format` json_object."""
    return json_schema({"type": "object"})


def _check_text(text: object, wanted: str) -> None:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise OptionError(f"grammar: give {wanted}")
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"grammar: larger than {MAX_BYTES} bytes")


def _try(grammar: Grammar) -> None:
    from rest_local.grammar.compiler import compile_apart

    try:
        compile_apart(grammar.compiled_text)
    except OptionError as error:
        raise OptionError(f"grammar: {error}") from None


_MARKS = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")  # such texts may be special tokens
Special = Callable[[str], int | None]


def no_special(text: str) -> int | None:
    """Return None, for a vocabulary without special tokens."""
    return None


class Lark:
    """The rules of one grammar. `special` returns the id of the special token with a text, or None."""

    def __init__(self, special: Special = no_special) -> None:
        self._special = special
        self._rules: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. `options` are llguidance's options of a rule, in brackets."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def one_of(self, ways: Sequence[str]) -> str:
        """Add a rule with these alternatives and return its name."""
        return self.add(" | ".join(ways))

    def literal(self, text: str) -> str:
        """Return a term for exactly this text. Parts of it that are special tokens match only those."""
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
        """Return a term for any text up to and including the first `marker`."""
        token = self._special(marker)
        if token is not None:
            return self.add(f"/(.|\\n)*/ <[{token}]>")
        return self.add("/(.|\\n)*/", f"[suffix={_quoted(marker)}]")

    def json(self, schema: Mapping[str, Any] | bool, strict: str = "", fallback: str = "{}", **options: str) -> str:
        """Add a rule for the values of a schema, and return its name. A part that cannot be kept is left out, or the
        schema gives way to `fallback`, JSON text. With `strict`, which names its owner, raises OptionError instead.
        """
        try:
            json_schema(schema)
        except OptionError as error:
            if strict:
                raise OptionError(f"{strict}: {error}") from error
            schema = _kept(schema, fallback)
        return self.add(json_rule(schema, **options))

    def grammar(self, start: str) -> Grammar:
        """Compile the grammar with this body as its start rule. Raises OptionError."""
        return lark("\n".join([f"start: {start}", *self._rules]))


def _kept(schema: Mapping[str, Any] | bool, fallback: str) -> Mapping[str, Any]:
    """Return a wider schema that can be kept, or the fallback."""
    if isinstance(schema, Mapping) and (wider := schemas.widened(schema)) != schema:
        with contextlib.suppress(OptionError):
            json_schema(wider)
            return wider
    parsed: dict[str, Any] = json.loads(fallback)
    return parsed


def _quoted(text: str) -> str:
    """Write a literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
