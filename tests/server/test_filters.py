"""What ends the text of an answer early, or groups it: the result never depends on how the text arrives."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.answers import GROUP_CHARACTERS, Choice, Indentation, TimeLimit
from rest_local.decoding.stream import Piece


def choice(least: int, *, shows_steps: bool) -> Choice:
    unused: Any = None
    ending = [Indentation(least)] if least else []
    return Choice(unused, None, shows_steps=shows_steps, sends_origins=False, ending=ending)


def texts_of(made: Choice, parts: list[str]) -> list[str]:
    """What is sent of these parts of a text."""
    fed = [made.feed([Piece(part, (), (), ())]).text for part in parts]
    return [*fed, made.finish(cut=False).text]


def oracle(text: str, least: int) -> tuple[str, bool]:
    """llama-server's rule, line by line over the whole text: a line after the first that is indented less ends it."""
    first, *lines = text.split("\n")
    given = first
    for number, line in enumerate(lines):
        blank = len(line) - len(line.lstrip(" \t"))
        last = number == len(lines) - 1
        if least and blank < least and not (last and blank == len(line)):
            return given + "\n", True
        given += "\n" + line
    return given, False


@given(st.lists(st.text(" \t\na", max_size=40), max_size=12), st.integers(0, 4), st.booleans())
def test_what_is_sent_does_not_depend_on_how_the_text_is_cut(parts: list[str], least: int, shows_steps: bool) -> None:
    """Where steps are hidden, the text is cut at fixed places instead."""
    made = choice(least, shows_steps=shows_steps)
    *sent, rest = texts_of(made, parts)
    assert ("".join(sent) + rest, made.ended) == oracle("".join(parts), least)
    assert shows_steps or all(len(text) % GROUP_CHARACTERS == 0 for text in sent)
    assert made.can_end == bool(least)


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
