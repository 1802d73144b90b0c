"""A Lark grammar as one regular expression, so that a JSON schema can keep it as the `pattern` of a string.

Contract: the expression matches what the grammar derives. There is none for a grammar that is recursive, or that has
what is not read here (`%ignore`, `%declare`, templates, flags of expressions, terminals of other libraries). Whether a
grammar's own expressions can be compiled is not decided here.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 20_000  # of the grammar, and of the expression: rules are written out where they are used
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "NUMBER": r"[0-9]+(?:\.[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*|\r)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<alias>->[ \t]*\w+)
    |(?P<range>\.\.)
    |(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<name>(?:^[!?])?[_a-zA-Z]\w*)
    |(?P<sign>[:|()\[\]?*+])
    |(?P<priority>\.-?\d+)
    |(?P<line>\n)
    |(?P<command>%[^\n]*)""",
    re.VERBOSE | re.MULTILINE,
)
_IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*")
Token = tuple[str, str]


class _Unread(Exception):
    """The grammar has what is not read here."""


def expression_of(text: str) -> str | None:
    """The regular expression of a grammar with a rule `start`, without anchors."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        rules = _rules(text)
        found = _Expression(rules).of("start")
    except (_Unread, RecursionError):
        return None
    return found


def _rules(text: str) -> dict[str, list[Token] | str]:
    """The tokens of each rule's body; of an imported terminal its expression."""
    rules: dict[str, list[Token] | str] = {}
    tokens = _tokens(text)
    body: list[Token] = []
    for number, (kind, value) in enumerate(tokens):
        if kind == "command":
            found = _IMPORT.fullmatch(value)
            if found is None or found[1] not in _COMMON:
                raise _Unread
            rules[found[2] or found[1]] = _COMMON[found[1]]
        elif kind == "name" and _begins_rule(tokens, number):
            body = rules[value.lstrip("!?")] = []
        elif kind not in ("line", "priority") and (kind, value) != ("sign", ":"):
            body.append((kind, value))
    return rules


def _begins_rule(tokens: list[Token], at: int) -> bool:
    """Whether a name is followed by a colon, maybe with a priority in between."""
    rest = [token for token in tokens[at + 1 : at + 3] if token[0] != "priority"]
    return (at == 0 or tokens[at - 1][0] == "line") and rest[:1] == [("sign", ":")]


def _tokens(text: str) -> list[Token]:
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _Unread
        at = token.end()
        if token.lastgroup not in ("space", "alias"):
            found.append((str(token.lastgroup), token[0]))
    return found


class _Expression:
    """Writes rules as expressions, each once."""

    def __init__(self, rules: dict[str, list[Token] | str]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}
        self._open: set[str] = set()

    def of(self, name: str) -> str:
        """The expression of a rule."""
        body = self._rules.get(name)
        if body is None or name in self._open:  # unknown, or recursive
            raise _Unread
        if isinstance(body, str):
            return body
        if name not in self._known:
            self._open.add(name)
            found, rest = self._ways(body)
            self._open.discard(name)
            if rest:
                raise _Unread
            self._known[name] = found
        if len(self._known[name]) > MAX_CHARACTERS:
            raise _Unread
        return self._known[name]

    def _ways(self, tokens: list[Token]) -> tuple[str, list[Token]]:
        """Alternatives up to a closing bracket, and the tokens from there."""
        ways, sequence = [], ""
        while tokens and tokens[0][1] not in (")", "]"):
            if tokens[0] == ("sign", "|"):
                ways.append(sequence)
                sequence, tokens = "", tokens[1:]
                continue
            atom, tokens = self._atom(tokens)
            sequence += atom
        return "|".join([*ways, sequence]), tokens

    def _atom(self, tokens: list[Token]) -> tuple[str, list[Token]]:
        (kind, value), tokens = tokens[0], tokens[1:]
        if kind == "string" and tokens[:1] == [("range", "..")] and tokens[1:2] and tokens[1][0] == "string":
            found = f"[{_literal(value)}-{_literal(tokens[1][1])}]"
            tokens = tokens[2:]
        elif kind == "string":
            found = _literal(value)
        elif kind == "regex" and value.endswith("/"):
            found = value[1:-1].replace(r"\/", "/")
        elif kind == "name":
            found = self.of(value)
        elif kind == "sign" and value in "([":
            found, tokens = self._ways(tokens)
            if not tokens or tokens[0][1] != {"(": ")", "[": "]"}[value]:
                raise _Unread
            tokens = tokens[1:]
            found = f"(?:{found})?" if value == "[" else found
        else:
            raise _Unread
        found = f"(?:{found})"
        while tokens and (tokens[0][1] in ("?", "*", "+") or tokens[0][0] == "times"):
            found = f"(?:{found}{_times(tokens[0][1])})"
            tokens = tokens[1:]
        return found, tokens


def _literal(value: str) -> str:
    """A string of the grammar as an expression."""
    if value.endswith("i"):
        return f"(?i:{re.escape(_plain(value[1:-2]))})"
    return re.escape(_plain(value[1:-1]))


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


def _plain(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        if found[1] not in _ESCAPES:
            raise _Unread
        return _ESCAPES[found[1]]

    return re.sub(r"\\(.)", one, text)


def _times(value: str) -> str:
    if not value.startswith("~"):
        return value
    least, _, most = value[1:].replace(" ", "").partition("..")
    return f"{{{least},{most}}}" if most else f"{{{least}}}"
