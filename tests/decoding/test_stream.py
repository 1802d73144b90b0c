"""Tokens to text: stop strings across tokens, held-back text, what the result says."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.results import Statistics, Step
from rest_local.decoding.stream import Answer, StopFinder

LETTERS: Any = SimpleNamespace(feed=chr, finish=lambda: "")  # every token is the number of a letter


def parts_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_text_ends_before_the_first_stop_string_however_it_arrives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(tuple(stops))
    out, found = "", False
    for part in parts_of(text, cuts):
        certain, found = finder.feed(part)
        out += certain
        assert text.startswith(out), "what was shown is never taken back"
        if found:
            break
    if found:
        assert not any(stop in out for stop in stops)
        assert finder.found in stops
        assert text.startswith(out + finder.found)
    else:
        assert out + finder.finish() == text
        assert not any(stop in text for stop in stops)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopFinder(("END", ""))
    assert finder.feed("the E") == ("the ", False)
    assert finder.feed("N") == ("", False)
    assert finder.feed("x") == ("ENx", False)
    assert finder.feed("END and more") == ("", True)


def test_the_token_that_completes_a_stop_string_is_the_last_of_the_answer() -> None:
    answer = Answer(Statistics(), LETTERS, 9, ("END",), lambda token: False)
    tokens = list(map(ord, "go ENDx"))
    answer.receive(tokens, 0.0)
    assert (answer.ended, answer.left) == (True, 3)
    assert answer.take(Step(tokens, ["target"] * 7)).tokens == tuple(tokens[:6])
    assert answer.result.text == "go "


def test_what_was_held_back_is_said_at_the_end() -> None:
    answer = Answer(Statistics(), LETTERS, 5, ("END",), lambda token: False)
    tokens = list(map(ord, "go EN"))
    answer.receive(tokens, 0.0)
    assert answer.take(Step(tokens, ["target"] * 5)).text == "go "
    assert answer.end("length").text == "EN"
    assert answer.result.text == "go EN"
