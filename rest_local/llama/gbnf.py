"""Reads GBNF, llama.cpp's grammars, as llama.cpp does: groups and repetitions become rules of their own.

Contract: text in, rules out, in time linear in what the text stands for, which is bounded: the rules may have
`MOST_ELEMENTS` elements, where llama.cpp's own reader would write out `"..."{2000}` to gigabytes. Raises OptionError
for what cannot be read. Knows nothing about what the rules are for; `grammar_guard` looks at them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rest_local.errors import OptionError
from rest_local.llama.grammar import MOST_REPEATS
from rest_local.llama.sampling import MAX_GRAMMAR_DEPTH

MOST_ELEMENTS = 1 << 16
LAST = 0x10FFFF
A_TOKEN = LAST + 1
"""Stands for every token that a grammar names by `<...>`: no character."""

Ranges = tuple[tuple[int, int], ...]
Element = Ranges | int
"""The characters that can stand here, in order; or the number of a rule."""
Sequence = list[Element]

_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9-]+")
_TOKEN = re.compile(r"!?<[^>\r\n]+>")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_PLAIN = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass
class Grammar:
    """`rules[n]`: the alternatives of rule n. `names`: what a rule belongs to, for messages. `root`: its number."""

    rules: list[list[Sequence]]
    names: list[str]
    root: int


@dataclass
class _Open:
    """A rule or a group that is being read."""

    rule: int
    alternatives: list[Sequence] = field(default_factory=lambda: [[]])
    last: int | None = None  # where the element begins that a repetition repeats


def read(text: str) -> Grammar:
    """The rules of a grammar. Raises OptionError."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._numbers: dict[str, int] = {}
        self._rules: list[list[Sequence] | None] = []
        self._names: list[str] = []
        self._size = 0

    def read(self) -> Grammar:
        self._skip(_SPACE)
        while self._at < len(self._text):
            self._rule()
        rules: list[list[Sequence]] = []
        for rule, name in zip(self._rules, self._names, strict=True):
            if rule is None:
                raise OptionError(f"grammar: rule `{name[:60]}` is used and not defined")
            rules.append(rule)
        if "root" not in self._numbers:
            raise OptionError("grammar: no rule `root`")
        return Grammar(rules, self._names, self._numbers["root"])

    def _rule(self) -> None:
        name = self._match(_NAME)
        if name is None:
            raise self._wrong("a rule's name is missing")
        self._skip(_BLANKS)
        if not self._text.startswith("::=", self._at):
            raise self._wrong("`::=` is missing")
        self._at += 3
        self._skip(_SPACE)
        number = self._number(name)
        self._rules[number] = self._alternatives(number)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._wrong("a rule has to end here")
        self._skip(_SPACE)

    def _alternatives(self, number: int) -> list[Sequence]:
        """Up to the end of the rule; groups are kept on a list, not on Python's stack."""
        opened = [_Open(number)]
        while self._at < len(self._text):
            here, character = opened[-1], self._text[self._at]
            if character == "(":
                if len(opened) > MAX_GRAMMAR_DEPTH:
                    raise OptionError(f"grammar: brackets nested deeper than {MAX_GRAMMAR_DEPTH}")
                opened.append(_Open(self._new(self._names[number])))
                self._at += 1
                self._skip(_SPACE)
                continue
            if character == ")" and len(opened) > 1:
                group = opened.pop()
                self._rules[group.rule] = group.alternatives
                self._at += 1
                self._put(opened[-1], [group.rule])
            elif character == "|":
                here.alternatives.append([])
                here.last = None
                self._at += 1
                self._skip(_SPACE)
                continue
            elif character in "*+?{":
                self._repeat(here, *self._times())
            elif not self._element(here):
                break
            self._skip(_SPACE if len(opened) > 1 else _BLANKS)
        if len(opened) > 1:
            raise self._wrong("`)` is missing")
        return opened[0].alternatives

    def _element(self, here: _Open) -> bool:
        """A literal, a class, any character, a token or a name; False where none begins."""
        character = self._text[self._at]
        if character == '"':
            self._put(here, self._literal())
        elif character == "[":
            self._put(here, [self._class()])
        elif character == ".":
            self._at += 1
            self._put(here, [((0, LAST),)])
        elif (name := self._match(_NAME)) is not None:
            self._put(here, [self._number(name)])
        elif self._match(_TOKEN) is not None:
            self._put(here, [((A_TOKEN, A_TOKEN),)])
        else:
            return False
        return True

    def _literal(self) -> Sequence:
        self._at += 1
        found: Sequence = []
        while not self._text.startswith('"', self._at):
            point = self._character()
            found.append(((point, point),))
        self._at += 1
        return found

    def _class(self) -> Ranges:
        self._at += 1
        excluded = self._text.startswith("^", self._at)
        self._at += excluded
        found: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = high = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character()
            found.append((low, high))
        self._at += 1
        self._grow(len(found))
        ranges = _in_order(found)
        return _others(ranges) if excluded else ranges

    def _character(self) -> int:
        text, at = self._text, self._at
        if at >= len(text):
            raise self._wrong("a literal or a class does not end")
        if text[at] != "\\":
            self._at += 1
            return ord(text[at])
        code = _CODE.match(text, at)
        if code is not None:
            self._at = code.end()
            return int(code[code.lastindex or 0], 16)
        plain = _PLAIN.get(text[at + 1 : at + 2])
        if plain is None:
            raise self._wrong("an escape that GBNF does not have")
        self._at += 2
        return ord(plain)

    def _times(self) -> tuple[int, int | None]:
        if self._text[self._at] != "{":
            self._at += 1
            return _REPEATS[self._text[self._at - 1]]
        times = _TIMES.match(self._text, self._at)
        if times is None:
            raise self._wrong("a repetition is {m}, {m,} or {m,n}")
        self._at = times.end()
        least = int(times[1])
        most = int(times[3]) if times[3] else None if times[2] else least
        if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
            raise self._wrong(f"repetitions are at most {MOST_REPEATS}, the lower number first")
        return least, most

    def _repeat(self, here: _Open, least: int, most: int | None) -> None:
        """S{m,n} is S m times, and behind them rules of S and the next such rule, or nothing."""
        sequence = here.alternatives[-1]
        if here.last is None or here.last == len(sequence):
            raise self._wrong("nothing precedes a repetition")
        repeated = sequence[here.last :]
        self._grow((len(repeated) + 2) * max(least, most or 0, 1))
        sequence[here.last :] = repeated * least
        following: int | None = None
        for _ in range(1 if most is None else most - least):
            number = self._new(self._names[here.rule])
            behind: Sequence = [number] if most is None else [] if following is None else [following]
            self._rules[number] = [repeated + behind, []]
            following = number
        if following is not None:
            sequence.append(following)

    def _put(self, here: _Open, elements: Sequence) -> None:
        self._grow(len(elements) + 1)
        here.last = len(here.alternatives[-1])
        here.alternatives[-1] += elements

    def _grow(self, by: int) -> None:
        self._size += by
        if self._size > MOST_ELEMENTS:
            raise OptionError(
                f"grammar: written out it has more than {MOST_ELEMENTS} elements; give lower bounds in {{m,n}}, "
                "or fewer and shorter rules"
            )

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._new(name)
        return self._numbers[name]

    def _new(self, name: str) -> int:
        self._grow(1)
        self._rules.append(None)
        self._names.append(name)
        return len(self._rules) - 1

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern)

    def _wrong(self, what: str) -> OptionError:
        line = self._text.count("\n", 0, self._at) + 1
        return OptionError(f"grammar: cannot be read in line {line}: {what}: {self._text[self._at : self._at + 40]!r}")


def _in_order(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted, without overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for low, high in ranges:
        if low > begin:
            found.append((begin, low - 1))
        begin = high + 1
    return (*found, (begin, LAST)) if begin <= LAST else tuple(found)
