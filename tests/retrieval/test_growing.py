"""A growing text gives the same rows as a naive scan of the whole text, after any folds and truncations."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_right, every_row
from support.examples import few

from rest_local.retrieval import GrowingText
from rest_local.retrieval import growing as module

TOKENS = st.sampled_from([0, 1, 2, 700])


def documents_of(text: list[int]) -> list[list[int]]:
    """The text split at every -1."""
    parts: list[list[int]] = [[]]
    for token in text:
        if token < 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def expected_rows(text: list[int], context: list[int], depth: int) -> dict[int, tuple[int, list[int]]]:
    rows = every_row(documents_of(text), context, depth)
    return {position: row for position, row in rows.items() if position < len(text)}


@few(25)
@given(
    st.lists(
        st.one_of(st.lists(st.one_of(TOKENS, st.just(-1)), max_size=12), st.integers(0, 20).map(lambda drop: -drop)),
        max_size=12,
    ),
    st.lists(TOKENS, max_size=36),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5, 1000]),
    st.booleans(),
)
def test_rows_are_those_of_the_whole_text(steps, context, limit, depth, tail, own_end):
    growing, text = GrowingText(1000, tail), []
    for step in steps:
        if isinstance(step, int):
            text = text[: max(len(text) + step, 0)]
            growing.truncate(len(text))
        else:
            text += step
            growing.extend(step if own_end else np.array(step, np.int32))
    assert growing.tokens.tolist() == text
    if own_end:
        context = text
    assert_right(growing.rows(np.array(context, np.int32), limit, depth), expected_rows(text, context, depth), limit)


@few(25)
@given(
    st.lists(st.tuples(st.lists(TOKENS, max_size=90), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(1, 30),
    st.sampled_from([30, 1000]),
    st.booleans(),
)
def test_the_index_and_numpy_give_the_same_rows(steps, limit, tail, every_time):
    """However the text grew and was cut between two lookups."""
    growing, text = GrowingText(1000, tail), []
    for tokens, drop in steps:
        text = [*text[: max(len(text) - drop, 0)], *tokens]
        growing.truncate(len(text) - len(tokens))
        growing.extend(tokens)
        if every_time:
            growing.rows(text, limit)
    found = growing.rows(text, limit, 5)
    with patch.object(module, "MAX_PLACES", -1):
        other = growing.rows(text, limit, 5)
    assert found.matches() == other.matches() == found.match.tolist()
    assert found.positions.tolist() == other.positions.tolist()
    assert found.continuations.tolist() == other.continuations.tolist()
    assert [found.row(n) for n in range(len(found))] == [other.row(n) for n in range(len(other))]
    assert [found.column(depth) for depth in range(5)] == [other.column(depth) for depth in range(5)]


def test_the_number_of_segments_is_logarithmic():
    growing = GrowingText(1000, 64)
    for _ in range(500):
        growing.extend(range(20))
    assert 1 <= len(growing._segments) <= 8


def test_ids_outside_the_vocabulary_end_a_document():
    growing = GrowingText(100)
    growing.extend([1, 2, 100, 2, 7, -5, 2**31 - 1, 2])
    assert growing.tokens.tolist() == [1, 2, -1, 2, 7, -1, -1, 2]
    rows = growing.rows(np.array([9, 2]), 8, 4)
    assert sorted(rows.continuations.tolist()) == [[-1, -1, -1, -1], [7, -1, -1, -1]]
