"""GBNF, llama.cpp's grammars, put together from parts: a set of named rules, and the ones that JSON needs.

Contract: text in, text out; llama.cpp reads the result in `constraint`. What is generated under a JSON schema is valid
for it (module `json_schema` lists the keywords), and JSON as Python's `json` and every client reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.sampling import MAX_GRAMMAR_BYTES

MOST_REPEATS = 2000  # llama.cpp refuses more in one {m,n}

# Lone surrogates are valid JSON and no text: \uD800 to \uDFFF are generated in pairs only.
_HEX = "[0-9a-fA-F]"
_PAIR = f'"u" [dD] [89abAB] {_HEX}{{2}} "\\\\u" [dD] [c-fC-F] {_HEX}{{2}}'
_ESCAPE = f'["\\\\/bfnrt] | "u" ([0-9a-cefA-CEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}}) | {_PAIR}'

# One space or one line break with indentation: more would let a model write white space for ever.
_JSON = {
    "space": '| " " | "\\n" [ \\t]{0,20}',
    "char": f'[^"\\\\\\x00-\\x1F] | "\\\\" ({_ESCAPE})',
    "string": '"\\"" char* "\\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "member": 'string space ":" space value',
    "object": '"{" space (member (space "," space member)* space)? "}"',
    "array": '"[" space (value (space "," space value)* space)? "]"',
    "value": "object | array | string | number | boolean | null",
}
_NEEDS = {
    "string": ("char",),
    "number": ("integer",),
    "value": ("object", "array", "string", "number", "boolean", "null"),
    "object": ("space", "member"),
    "array": ("space", "value"),
    "member": ("string", "space", "value"),
}


def literal(text: str) -> str:
    """A GBNF literal of exactly this text."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else _code(ord(character))


def char_class(ranges: Iterable[tuple[int, int]]) -> str:
    """A GBNF class of ranges of code points, ends included."""
    return "[" + "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges) + "]"


def _code(point: int) -> str:
    return f"\\x{point:02X}" if point < 0x80 else f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


class Rules:
    """A grammar that grows. Rules made for different parts get different names."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._count = 0
        self._size = 0

    def json(self, name: str) -> str:
        """The name of a rule of JSON: value, object, array, string, char, number, integer, boolean, null, space."""
        if name not in self._rules:
            self.set(name, _JSON[name])
            for needed in _NEEDS.get(name, ()):
                self.json(needed)
        return name

    def reserve(self) -> str:
        """The name of a rule whose body is `set` later."""
        self._count += 1
        return f"r{self._count}"

    def add(self, body: str) -> str:
        """A new rule; its name."""
        name = self.reserve()
        self.set(name, body)
        return name

    def set(self, name: str, body: str) -> None:
        """Raises OptionError where the whole becomes larger than llama.cpp is given."""
        self._rules[name] = body
        self._size += len(name) + len(body.encode()) + 6
        if self._size > MAX_GRAMMAR_BYTES:
            raise OptionError(f"the grammar becomes larger than {MAX_GRAMMAR_BYTES} bytes; use a smaller schema")

    def until(self, marker: str) -> str:
        """Any text up to and with the first `marker`: the automaton of Knuth, Morris and Pratt, a rule a state."""
        states = [self.reserve() for _ in marker]
        letters = sorted(set(marker))
        others = f"[^{''.join(_code(ord(letter)) for letter in letters)}]"
        for matched, state in enumerate(states):
            ways = [f"{others} {states[0]}"]
            for letter in letters:
                so_far = marker[:matched] + letter
                reached = next(n for n in range(len(so_far), -1, -1) if so_far.endswith(marker[:n]))
                ways.append(literal(letter) + (f" {states[reached]}" if reached < len(marker) else ""))
            self.set(state, " | ".join(ways))
        return states[0]

    def text(self, root: str) -> str:
        """The grammar whose `root` is this body."""
        return "\n".join(f"{name} ::= {body}" for name, body in [("root", root), *self._rules.items()]) + "\n"


def json_object() -> str:
    """Any JSON object: `response_format` json_object."""
    rules = Rules()
    return rules.text(rules.json("object"))


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The JSON values that a schema (drafts 4 to 2020-12) allows; see `json_schema` for what is understood.

    Raises OptionError, in bounded time, for what it does not know how to keep, names outside the schema, loops, and
    schemas that are too deep or too large."""
    from rest_local.llama.json_schema import Schema

    rules = Rules()
    return rules.text(Schema(rules, schema).root())
