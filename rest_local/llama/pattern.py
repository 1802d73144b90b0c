"""Regular expressions of JSON schemas as GBNF inside a JSON string.

Contract: the common part of ECMA 262: literals, classes, groups, alternatives, greedy or lazy repetition (the same
language), \\d \\w \\s, anchors at the ends. A class becomes the characters that may stand in a JSON string as they are,
and the escapes of those that may not; so a pattern can never end the string that holds it. Everything else is refused.
"""

from __future__ import annotations

from rest_local.errors import OptionError
from rest_local.llama.grammar import MOST_REPEATS, Rules, char_class, literal
from rest_local.llama.grammar_guard import check

MOST_CHARACTERS = 2000
_DEEPEST = 30
_LAST = 0x10FFFF
Ranges = list[tuple[int, int]]

_DIGITS: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x2028, 0x2029)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_ESCAPED = {34: '\\"', 92: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}  # in JSON
_NEVER: Ranges = [(0, 31), (34, 34), (92, 92), (0xD800, 0xDFFF)]  # not as they are


def pattern_rule(rules: Rules, pattern: str) -> str:
    """The body of a JSON string that the pattern is found in, without its quotes. Raises OptionError, also for one that
    llama.cpp would be slow at: of what a schema becomes only this is written by whoever sends it."""
    if len(pattern) > MOST_CHARACTERS:
        raise OptionError(f"pattern of {len(pattern)} characters: at most {MOST_CHARACTERS}")
    alone = Rules()
    body = _Pattern(alone, pattern).whole()
    try:
        check(alone.text(body))
    except OptionError as error:
        raise OptionError(f"pattern {pattern[:60]!r}: {error}") from error
    return _Pattern(rules, pattern).whole()


def _minus(ranges: Ranges, without: Ranges) -> Ranges:
    for low, high in without:
        ranges = [
            part for a, b in ranges for part in ((a, min(b, low - 1)), (max(a, high + 1), b)) if part[0] <= part[1]
        ]
    return ranges


class _Pattern:
    def __init__(self, rules: Rules, pattern: str) -> None:
        self._rules, self._text, self._at = rules, pattern, 0

    def whole(self) -> str:
        ways = [self._anchored()]
        while self._take("|"):
            ways.append(self._anchored())
        if self._at < len(self._text):
            raise self._refused("a bracket that was not opened")
        return self._rules.add(" | ".join(ways))

    def _anchored(self) -> str:
        """One alternative: what is not anchored may have anything before or behind it."""
        anything = f"{self._rules.json('char')}*"
        before = "" if self._take("^") else anything
        inner, _ = self._sequence(0)
        behind = "" if self._take("$") else anything
        return " ".join(part for part in (before, inner, behind) if part) or '""'

    def _alternatives(self, depth: int) -> tuple[str, bool]:
        if depth > _DEEPEST:
            raise self._refused(f"groups deeper than {_DEEPEST}")
        ways = [self._sequence(depth)]
        while self._take("|"):
            ways.append(self._sequence(depth))
        return self._rules.add(" | ".join(way or '""' for way, _ in ways)), any(empty for _, empty in ways)

    def _sequence(self, depth: int) -> tuple[str, bool]:
        """The parts up to the next alternative, and whether all of them may be empty."""
        parts, may_be_empty = [], True
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._text[self._at] == "$" and not depth:
                break
            atom, empty = self._atom(depth)
            times, none = self._repeats(empty)
            parts.append(atom + times)
            may_be_empty = may_be_empty and (empty or none)
        return " ".join(parts), may_be_empty

    def _atom(self, depth: int) -> tuple[str, bool]:
        character = self._next()
        if character == "(":
            if self._take("?") and not self._take(":"):
                raise self._refused("look-around, named groups and flags")
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._refused("a bracket that is not closed")
            return inner
        if character == "[":
            return self._characters(self._class()), False
        if character == ".":
            return self._characters(_minus([(0, _LAST)], [(10, 10), (13, 13), (0x2028, 0x2029)])), False
        if character in "^$*+?{":
            raise self._refused(f"{character!r} here")
        return self._characters(self._escape() if character == "\\" else [(ord(character), ord(character))]), False

    def _class(self) -> Ranges:
        inverted, ranges = self._take("^"), []
        while not self._take("]"):
            part = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if part[0][0] != part[-1][1] or last[0][0] != last[-1][1] or part[0][0] > last[0][0]:
                    raise self._refused("a range that is not one")
                part = [(part[0][0], last[0][0])]
            ranges += part
        return _minus([(0, _LAST)], ranges) if inverted else ranges

    def _member(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return [(ord(character), ord(character))]
        return [(8, 8)] if self._take("b") else self._escape()

    def _escape(self) -> Ranges:
        letter = self._next()
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else _minus([(0, _LAST)], ranges)
        if letter in "xu":
            digits = self._text[self._at : self._at + (2 if letter == "x" else 4)]
            self._at += len(digits)
            if not digits or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise self._refused(f"\\{letter} without its digits")
            return [(int(digits, 16), int(digits, 16))]
        if letter in _CONTROLS:
            return [(_CONTROLS[letter], _CONTROLS[letter])]
        if letter.isalnum():
            raise self._refused(f"\\{letter}")
        return [(ord(letter), ord(letter))]

    def _characters(self, ranges: Ranges) -> str:
        """A class, as a JSON string spells its characters."""
        plain = _minus(ranges, _NEVER)
        ways = [char_class(plain)] if plain else []
        ways += [literal(text) for code, text in _ESCAPED.items() if any(a <= code <= b for a, b in ranges)]
        if not ways:
            raise self._refused("characters that no JSON string can hold")
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _repeats(self, empty: bool) -> tuple[str, bool]:
        """GBNF's sign for how often, and whether that may be never. `empty`: what is repeated may be empty.
        llama.cpp follows every way of leaving such repetitions out (measured: `(a?){500}` takes longer than 8 s)."""
        low, high = self._times()
        if empty and high != 1:
            raise self._refused("repeating what may be empty")
        self._take("?")  # lazy: the same language
        signs = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
        return signs.get((low, high), f"{{{low},{'' if high is None else high}}}"), low == 0

    def _times(self) -> tuple[int, int | None]:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if not self._take("{"):
            return 1, 1
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at : max(end, self._at)].partition(",")
        if end < 0 or not least.isdecimal() or (most and not most.isdecimal()) or len(least + most) > 8:
            raise self._refused("{ without two numbers")
        self._at = end + 1
        low, high = int(least), int(most) if most else None if comma else int(least)
        if max(low, high or 0) > MOST_REPEATS or (high is not None and high < low):
            raise self._refused(f"repetitions outside 0..{MOST_REPEATS}")
        return low, high

    def _take(self, character: str) -> bool:
        there = self._text[self._at : self._at + 1] == character
        self._at += there
        return there

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._refused("an end in the middle")
        self._at += 1
        return self._text[self._at - 1]

    def _refused(self, what: str) -> OptionError:
        return OptionError(f"pattern {self._text[:80]!r}: {what} at {self._at}: not supported; write it more simply")
