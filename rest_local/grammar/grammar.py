"""Grammars in the notations that callers use: GBNF, Lark, JSON schemas. Each becomes Lark, which is then compiled.

Contract: every function compiles the grammar in a child process (`trial`) before it returns, so that each `Grammar` can
be compiled in bounded time and memory. That takes 6 ms for a schema of 30 properties, and nothing for one of the 64
newest grammars.

`Lark` builds Lark text from literals, special tokens, text up to a marker and JSON schemas, for formats of tool
calls. Its methods return terms, which are text for a rule; `Lark.grammar` compiles the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rest_local.errors import OptionError

MAX_BYTES = 1 << 20
# One space, or a line break with indentation: otherwise a model can write white space up to the token limit.
_JSON_OPTIONS = {"whitespace_pattern": "( |\\n[ \\t]{0,20})?"}
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
    _try("grammar", grammar)
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
    _try("grammar", grammar)
    return grammar


def json_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """The JSON values that a schema (drafts 4 to 2020-12) allows. docs/SERVER.md lists the keywords.

    Raises OptionError for a schema that cannot be kept exactly: keywords that llguidance does not support, unknown
    formats, references outside the schema; and for schemas that allow nothing, are too deep or too large.
    """
    grammar = Grammar(f"start: {json_rule(schema)}", json.dumps(schema))
    _try("JSON schema", grammar)
    return grammar


def any_object() -> Grammar:
    """Any JSON object: `response_format` json_object."""
    return json_schema({"type": "object"})


def json_rule(schema: Mapping[str, Any] | bool, **options: str) -> str:
    """A term of a Lark rule for the values of a schema. `options`: for llguidance's compiler. Raises OptionError."""
    if not isinstance(schema, (Mapping, bool)):
        raise OptionError(f"JSON schema: {type(schema).__name__} is not a schema; give an object or a boolean")
    document = {} if schema is True else schema
    if isinstance(document, Mapping):
        if "properties" in document and "type" not in document:
            document = {"type": "object", **document}  # else a number would be valid too
        document = _tightened(document)
        document = {**document, "x-guidance": {**_JSON_OPTIONS, **options}}
    try:
        text = json.dumps(document, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"JSON schema: cannot be written as JSON: {error}; remove that value") from error
    if len(text) > MAX_BYTES:
        raise OptionError(f"JSON schema: larger than {MAX_BYTES} bytes; use a smaller one")
    return f"%json {text}"


MAX_LEVELS = 100  # of a schema that are tightened; the child refuses schemas that are nested deeper
LARGEST = 2**53 - 1  # 16 digits; readers that use doubles change larger integers (RFC 8259, section 6)
FRACTION = 1e-10  # the smallest power of ten that llguidance 1.9.1 accepts for `multipleOf`
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties")
_ANY = {"$ref": "#/$defs/any"}
_NUMBERS = {"minimum": -LARGEST, "maximum": LARGEST, "multipleOf": FRACTION}
_ANY_VALUE = {"$defs": {"any": {**_NUMBERS, "items": _ANY, "additionalProperties": _ANY}}}
_OPEN = {
    "{}": {**_ANY, **_ANY_VALUE},
    '{"type": "object"}': {"type": "object", "additionalProperties": _ANY, **_ANY_VALUE},
}


def _tightened(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with limits where it sets none, so that a small model comes to an end of its answer.

    - Objects that name their properties have no others.
    - Integers and numbers lie between -LARGEST and LARGEST; numbers have at most 10 digits after the point.

    Whatever is written is valid for the schema as it was given. Schemas with `allOf` are left as they are, and objects
    that are composed of several schemas: closed parts could contradict each other.
    """
    text = json.dumps(schema, default=str)
    if text in _OPEN:
        return _OPEN[text]
    if '"allOf"' in text:
        return schema
    # llguidance computes a common multiple of two factors in 32 bits, without a check.
    step = None if '"multipleOf"' in text else FRACTION
    tightened: Mapping[str, Any] = _tighten(schema, step, MAX_LEVELS)
    return tightened


def _tighten(value: Any, step: float | None, levels: int) -> Any:
    if not levels or not isinstance(value, (list, Mapping)):
        return value
    if isinstance(value, list):
        return [_tighten(each, step, levels - 1) for each in value]
    literal = ("enum", "const", "default", "properties")
    found = {name: each if name in literal else _tighten(each, step, levels - 1) for name, each in value.items()}
    if isinstance(value.get("properties"), Mapping):
        found["properties"] = {name: _tighten(each, step, levels - 1) for name, each in value["properties"].items()}
        others = any(name in value for name in (*_COMPOSED, "additionalProperties", "patternProperties"))
        if value.get("type") == "object" and not others:
            found["additionalProperties"] = False
    return found | _number_limits(value, step)


def _number_limits(schema: Mapping[str, Any], step: float | None) -> dict[str, float]:
    """Limits of a schema of integers or numbers, where it sets none."""
    kind = schema.get("type")
    types: list[Any] = kind if isinstance(kind, list) else [kind]
    if not ("integer" in types or "number" in types) or "enum" in schema or "const" in schema:
        return {}
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    given = {name: schema[name] for name in names if isinstance(schema.get(name), (int, float))}
    limits: dict[str, float] = {}
    if not any(name in given for name in names[:2]) and all(value > -LARGEST for value in given.values()):
        limits["minimum"] = -LARGEST
    if not any(name in given for name in names[2:]) and all(value < LARGEST for value in given.values()):
        limits["maximum"] = LARGEST
    if "number" in types and step is not None:
        limits["multipleOf"] = step
    return limits


def _check_text(text: object, wanted: str) -> None:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise OptionError(f"grammar: give {wanted}")
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"grammar: larger than {MAX_BYTES} bytes")


def _try(what: str, grammar: Grammar) -> None:
    from rest_local.grammar.trial import compile_apart

    try:
        compile_apart(grammar.compiled_text)
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from None


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
        """The values of a schema. A schema that cannot be kept is replaced by the schema `fallback`, JSON text.

        `strict`: what the schema belongs to; then raises OptionError instead, with this in its message.
        """
        try:
            json_schema(schema)
        except OptionError as error:
            if strict:
                raise OptionError(f"{strict}: {error}") from error
            schema = json.loads(fallback)
        return self.add(json_rule(schema, **options))

    def grammar(self, start: str) -> Grammar:
        """The grammar with this body as its start rule. Raises OptionError."""
        return lark("\n".join([f"start: {start}", *self._rules]))


def _quoted(text: str) -> str:
    """A literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
