"""Tokens to text: stop strings across tokens, held-back text, what the result says."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.results import Statistics
from rest_local.decoding.stream import (
    LONGEST_LOOP,
    LOOP_REPEATS,
    LOOP_TOKENS,
    TARGET,
    Answer,
    Piece,
    Result,
    StopFinder,
    loop_of,
)

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


def test_the_token_that_completes_a_stop_string_is_the_last_of_the_answer() -> None:
    answer = Answer(Statistics(), LETTERS, 9, ("END",), lambda token: False)
    tokens = list(map(ord, "go ENDx"))
    answer.receive(tokens, 0.0)
    assert (answer.ended, answer.left) == (True, 3)
    assert answer.take(Piece("", tuple(tokens), ("target",) * 7)).tokens == tuple(tokens[:6])
    assert answer.result.text == "go "


def test_what_was_held_back_is_said_at_the_end() -> None:
    answer = Answer(Statistics(), LETTERS, 5, ("END",), lambda token: False)
    tokens = list(map(ord, "go EN"))
    answer.receive(tokens, 0.0)
    assert answer.take(Piece("", tuple(tokens), ("target",) * 5)).text == "go "
    assert answer.end("length").text == "EN"
    assert answer.result.text == "go EN"


def test_a_loop_is_seen_after_some_rounds_and_only_at_the_end() -> None:
    """Against a naive search, for all lengths of a text that ends in repetitions."""

    def naive(tokens: list[int]) -> int:
        for period in range(1, LONGEST_LOOP + 1):
            needed = max(LOOP_TOKENS, LOOP_REPEATS * period)
            tail = tokens[-needed:]
            if len(tokens) >= needed and tail == (tail[-period:] * needed)[-needed:]:
                return period
        return 0

    generator = random.Random(1)
    for period in (1, 2, 7, 32, 33, 100, 256, 257):
        one = [generator.randrange(50) for _ in range(period)]
        text = [generator.randrange(50) for _ in range(30)] + one * (1400 // period)
        found = [loop_of(text[:length]) for length in range(0, len(text), 13)]
        assert found == [naive(text[:length]) for length in range(0, len(text), 13)]
        assert bool(any(found)) == (period <= LONGEST_LOOP)
        assert loop_of([*text, 77]) == 0
    assert Result(tokens=[5, 6] * 64).loop == 2


@pytest.mark.parametrize(
    ("sources", "steps"),
    [("", []), ("t", [1]), ("ttt", [1, 1, 1]), ("cct", [3]), ("cctt", [3, 1]), ("ctc", [2, 1]), ("cc", [2])],
)
def test_a_piece_knows_the_steps_of_its_tokens(sources: str, steps: list[int]) -> None:
    names = tuple({"t": TARGET, "c": "context"}[each] for each in sources)
    assert Piece("", tuple(range(len(names))), names).steps == steps
