"""Text filters: the result never depends on how the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.answers import Groups, TextFilters, TimeLimit


def indented(parts: list[str], least: int) -> tuple[str, bool]:
    """What llama-server's rule leaves of a text: a line after the first that is indented less ends it."""
    filters = TextFilters(n_indent=least)
    text = "".join(filters.feed(part) for part in parts)
    ended = filters.ended
    return text + ("" if ended else filters.finish()), ended


def oracle(text: str, least: int) -> tuple[str, bool]:
    """Line by line, over the whole text."""
    first, *lines = text.split("\n")
    given = first
    for number, line in enumerate(lines):
        blank = len(line) - len(line.lstrip(" \t"))
        last = number == len(lines) - 1
        if least and blank < least and not (last and blank == len(line)):
            return given + "\n", True
        given += "\n" + line
    return given, False


@pytest.mark.parametrize(
    ("text", "least", "left"),
    [
        ("return a\n    b\nc = 1", 4, "return a\n    b\n"),
        ("x\n\n    y", 4, "x\n"),
        ("x\n    y\n  ", 4, "x\n    y\n  "),
        ("x\ny", 0, "x\ny"),
        ("\tx\n\ty\nz", 1, "\tx\n\ty\n"),
    ],
)
def test_indentation_ends_the_text(text: str, least: int, left: str) -> None:
    assert indented([text], least)[0] == left


@given(st.lists(st.text(" \t\na", max_size=4), max_size=12), st.integers(0, 4))
def test_indentation_is_the_same_however_the_text_is_cut(parts: list[str], least: int) -> None:
    assert indented(parts, least) == oracle("".join(parts), least)


def test_time_ends_the_text_with_a_whole_line() -> None:
    now = [0.0]
    limit = TimeLimit(500, clock=lambda: now[0])
    assert limit.feed("first ") == "first "
    now[0] = 9.0
    assert limit.feed("line") == "line", "the first line always comes"
    assert not limit.ended
    assert limit.feed(" ends\nsecond") == " ends\n"
    assert limit.ended
    assert limit.feed("more\n") == ""


@pytest.mark.parametrize("milliseconds", [None, 0, -1])
def test_without_a_time_there_is_no_limit(milliseconds: float | None) -> None:
    filters = TextFilters(milliseconds=milliseconds)
    assert filters.feed("a\nb\n") == "a\nb\n"
    assert not filters.ended
    assert not filters.can_end


@given(st.lists(st.text(max_size=9), max_size=12), st.integers(1, 6))
def test_text_in_groups_is_cut_at_fixed_places(parts: list[str], size: int) -> None:
    filter_ = Groups(size)
    given = [filter_.feed(part) for part in parts]
    assert all(len(part) % size == 0 for part in given)
    assert "".join(given) + filter_.finish() == "".join(parts)
    assert len(filter_.finish()) == 0


@given(st.lists(st.text(" \na", max_size=4), max_size=12), st.integers(0, 4), st.integers(0, 6))
def test_filters_in_a_row_lose_nothing(parts: list[str], least: int, group: int) -> None:
    """Only the indentation ends the text; the groups pass on all of the rest."""
    filters = TextFilters(n_indent=least, group=group)
    text = "".join(filters.feed(part) for part in parts) + filters.finish()
    assert text == oracle("".join(parts), least)[0]
