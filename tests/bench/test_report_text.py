"""Texts and numbers of a report: bounded, on one line, and shown as the table says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.bench.report.markdown import escaped, inline
from rest_local.bench.report.text import DASH, Names, clean, duration, greatest, is_numeric, shown, slug, spans


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, DASH), (math.nan, DASH), (math.inf, DASH), (10**400, DASH), (0, "0"), (1234567, "1,234,567"),
        (0.0, "0.00"), (1.5, "1.50"), (9.876, "9.88"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346"),
        (0.857, "0.857"), (0.5, "0.500"), (0.01234, "0.0123"), (-1.234, "-1.23"), (1.2e-6, "1.2e-06"), (1e20, "1e+20"),
        (True, "yes"), ("a\nb", "a b"),
    ],
)  # fmt: skip
def test_a_cell_as_text(cell: object, text: str) -> None:
    assert shown(cell) == text


@given(st.text(max_size=300))
def test_a_cleaned_text_is_one_printable_line_and_stays_so(text: str) -> None:
    line = clean(text, 50)
    assert line.isprintable()
    assert len(line) <= 50
    assert clean(line, 50) == line


def test_what_turns_the_direction_of_a_line_is_replaced() -> None:
    assert clean("safe\u202egpj.exe\u2066 \x1b[31m\ud800") == "safe\ufffdgpj.exe\ufffd \ufffd[31m\ufffd"


def test_backticks_mark_code() -> None:
    assert list(spans("the policy `auto` won")) == [("the policy ", False), ("auto", True), (" won", False)]
    assert inline("the policy `auto` won by a_b *") == "the policy `auto` won by a_b &#42;"
    assert inline("one ` alone") == "one &#96; alone"
    assert inline("`a|b`") == "<code>a&#124;b</code>"


@given(st.text(max_size=100))
def test_no_markup_survives_in_markdown(text: str) -> None:
    line = escaped(text)
    assert not set(line) & set("<>|*[]`$~\\{}!")
    assert not line.startswith(("#", "-", "+", "="))


def test_the_greatest_numbers_as_shown_are_best() -> None:
    assert greatest(["a", 1.5, 1.501, 1.2], [1, 2, 3]) == {1, 2}
    assert greatest(["a", 1.5, None], [1, 2]) == set()
    assert greatest(["a", 2.0, 1.0, math.nan], [1, 2, 3, 9]) == {1}


def test_numbers_are_told_from_words() -> None:
    assert is_numeric([["a", 1], ["b", None]], 1)
    assert not is_numeric([["a", 1], ["b", "2"]], 1)
    assert not is_numeric([["a", None]], 1)


def test_every_name_is_given_once() -> None:
    names = Names()
    assert [names.take(text) for text in ("A b", "a-b", "../A B", "\u202e", "")] == [
        "a-b",
        "a-b-2",
        "a-b-3",
        "x",
        "x-2",
    ]
    assert slug("Straße/../x" * 50).count("/") == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.99, "10 s"), (61.0, "1 min 1 s"), (3700.0, "1 h 1 min"), (-1.0, DASH), (math.nan, DASH)],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
