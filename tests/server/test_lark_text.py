"""Lark grammars as regular expressions: what they match, and which have none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.response_tools import expression_of
from rest_local.grammar import json_schema

PATCH = r"""
// an edit of files
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
?hunk: "*** Add: " name LF added+   -> add
     | "*** Delete: " name LF       -> delete
name: /(.+)/
added.2: "+" /(.*)/ LF -> line
%import common.LF
"""
MATCHES = [
    ('start: "a"', ["a"], ["", "b", "aa"]),
    ('start: "a" "b"?', ["a", "ab"], ["b", "abb"]),
    ('start: ("a" | "b")* "c"', ["c", "abac"], ["", "ab", "cc"]),
    ('start: "a" | "b" "c"', ["a", "bc"], ["ac", "b"]),
    ('start: ["a"] "b"', ["b", "ab"], ["a"]),
    ('start: "a"~2', ["aa"], ["a", "aaa"]),
    ('start: "a" ~ 1..3', ["a", "aaa"], ["", "aaaa"]),
    ('start: x "-" x\nx: "a".."c" | DIGIT\n%import common.DIGIT', ["a-1", "0-c"], ["d-1", "a-"]),
    ('start: "Yes"i', ["yes", "YES"], ["y"]),
    (r'start: "a.\"\n\\" /\/[^\/]+/', ['a."\n\\/x'], ['ab"\n\\/x', 'a."\n\\//']),
    ('start: N W\nN: INT\nW: /[a-z]+/\n%import common.INT', ["12ab"], ["ab", "12"]),
    ('start: a?b\na: "a"\nb: "b"', ["b", "ab"], ["a"]),
    ('!start: _x\n_x: "a" // the end\n', ["a"], ["b"]),
    ('start: "a"\n     | "b"\n     | ', ["a", "b", ""], ["ab"]),
    ("%import common.NEWLINE -> NL\nstart: NL", ["\n", "\r\n\n"], ["", "a"]),
    (PATCH, ["*** Begin\n*** Add: a b\n+x\n+\n*** Delete: c\n*** End", "*** Begin\n*** Delete: c\n*** End\n"],
     ["*** Begin\n*** End", "*** Begin\n*** Add: a\nx\n*** End", "*** Begin\n*** Add: \n+x\n*** End"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "right", "wrong"), MATCHES)
def test_an_expression_matches_what_the_grammar_derives(grammar: str, right: list[str], wrong: list[str]) -> None:
    expression = expression_of(grammar)
    assert expression is not None
    for text in right:
        assert re.fullmatch(expression, text), text
    for text in wrong:
        assert not re.fullmatch(expression, text), text
    json_schema({"type": "string", "pattern": f"^(?:{expression})$"})


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'rule: "a"',
        'start: "(" start? ")"',
        "start: a\na: b\nb: a",
        "start: missing",
        'start: "a"\n%ignore " "',
        "start: WORD\n%import common.SQL_COMMENT",
        "start: x\n%import other.x",
        'start: twice{"a"}\ntwice{x}: x x',
        "start: /a/i",
        'start: ("a"',
        'start: "a")',
        'start: ("a"]',
        'start: "\\x41"',
        'start: "a',
        "start: <[1]>",
        "start: " + "(" * 5000,
        "start: a a\n" + "".join(f"{x}: {y} {y}\n" for x, y in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True))
        + 'q: "x"',
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_written_as_one_has_none(grammar: str) -> None:
    assert expression_of(grammar) is None


@given(st.text('start:ab "|()[]?*+~1.%/\n\\->', max_size=40))
def test_any_text_has_an_expression_or_none(text: str) -> None:
    expression_of(text)
    expression_of("start: " + text)
