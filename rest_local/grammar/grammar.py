"""Grammars in the notations that callers use: GBNF, Lark, JSON schemas. Each becomes Lark, which is then compiled.

Contract: every function compiles the grammar in a child process (`trial`) before it returns, so that each `Grammar` can
be compiled in bounded time and memory. That takes 6 ms for a schema of 30 properties, and nothing for one of the 64
newest grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar import schema as schemas
from rest_local.grammar.schema import MAX_BYTES, json_rule

# Without this option only the canonical tokens of a forced text are allowed, and other draft tokens for it fail.
_HEADER = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Grammar:
    """A language over bytes. `lark`: its rules, `start` first. `source`: the text of the caller."""

    lark: str
    source: str

    @property
    def compiled_text(self) -> str:
        """The text for llguidance. The options are the last line, so that line numbers in messages are the caller's."""
        return self.lark + _HEADER


def lark(text: str) -> Grammar:
    """A grammar in llguidance's dialect of Lark, with a rule `start`. Raises OptionError."""
    _check_text(text, "Lark text with a rule `start`")
    grammar = Grammar(text, text)
    _try(grammar)
    return grammar


def gbnf(text: str) -> Grammar:
    """A grammar in llama.cpp's notation, with a rule `root`. llguidance's converter translates it to Lark.

    A grammar without recursion becomes one regular expression. Between the parts of other rules the longest match wins,
    as in Lark. Raises OptionError, also for what the converter cannot read (references to tokens, `<think>`).
    """
    from rest_local.grammar.trial import convert

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
    """The JSON values that a schema (drafts 4 to 2020-12) allows. docs/SERVER.md lists the keywords.

    Raises OptionError for a schema that cannot be kept exactly: keywords that llguidance does not support, unknown
    formats, references outside the schema; and for schemas that allow nothing, are too deep or too large.
    """
    from rest_local.grammar.trial import compile_apart

    grammar = Grammar(f"start: {json_rule(schema)}", json.dumps(schema))
    try:
        compile_apart(grammar.compiled_text)
    except OptionError as error:
        raise OptionError(f"JSON schema: {schemas.cause(str(error))}") from None
    return grammar


def any_object() -> Grammar:
    """Any JSON object: `response_format` json_object."""
    return json_schema({"type": "object"})


def _check_text(text: object, wanted: str) -> None:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise OptionError(f"grammar: give {wanted}")
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"grammar: larger than {MAX_BYTES} bytes")


def _try(grammar: Grammar) -> None:
    from rest_local.grammar.trial import compile_apart

    try:
        compile_apart(grammar.compiled_text)
    except OptionError as error:
        raise OptionError(f"grammar: {error}") from None
