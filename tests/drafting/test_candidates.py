"""Candidates have the same evidence as a naive count over the rows gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import Candidate, SourceRows, cell_of
from rest_local.drafting.growth import propose
from rest_local.retrieval.rows import Rows

DEPTH = 3
TEXTS = st.lists(
    st.tuples(st.integers(1, 32), st.lists(st.integers(-1, 3), min_size=DEPTH, max_size=DEPTH)), max_size=20
)


def rows_of(texts: list[tuple[int, list[int]]]) -> Rows:
    texts = sorted(texts, key=lambda row: -row[0])
    tokens = np.array([text for _, text in texts], np.int32).reshape(-1, DEPTH)
    return Rows(tokens, np.array([match for match, _ in texts], np.int32), np.arange(len(texts), dtype=np.int64))


def expected(rows: Rows, path: list[int]) -> list[Candidate]:
    """Counts all rows that continue through `path`, one by one."""
    depth = len(path)
    continuations, match = rows.continuations.tolist(), rows.match.tolist()
    continuing = [row for row, text in enumerate(continuations) if text[:depth] == path and text[depth] >= 0]
    found = []
    for token in dict.fromkeys(continuations[row][depth] for row in continuing):
        through = [row for row in continuing if continuations[row][depth] == token]
        length = max(match[row] for row in through)
        reaching = sum(match[row] >= length for row in continuing)
        agreeing = sum(match[row] >= length for row in through)
        found.append((token, cell_of(1, length + depth, reaching, agreeing), through))
    return found


@given(TEXTS)
def test_candidates_are_those_of_a_naive_count(texts: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(texts)
    source = SourceRows(1, rows)
    assert source.continuations == rows.continuations.tolist()
    unseen: list[tuple[list[int], list[int]]] = [([], list(range(len(rows))))]
    while unseen:
        path, members = unseen.pop()
        candidates = source.candidates(members, len(path))
        assert [(token, cell, list(through)) for token, cell, through in candidates] == expected(rows, path)
        if len(path) + 1 < DEPTH:
            unseen += [([*path, token], list(through)) for token, _, through in candidates]
    assert source.candidates(range(len(rows)), DEPTH) == []


@given(TEXTS, TEXTS)
def test_a_token_of_several_sources_takes_the_most_confident_estimate(
    first: list[tuple[int, list[int]]], second: list[tuple[int, list[int]]]
) -> None:
    sources = [SourceRows(0, rows_of(first)), SourceRows(1, rows_of(second))]
    proposal = propose([(rows, range(len(rows))) for rows in sources], 0, lambda cell: 1 / (2 + cell))
    of_token: dict[int, list[tuple[float, int, tuple[SourceRows, object]]]] = {}
    for rows, candidates in proposal.by_source:
        for token, cell, through in candidates:
            of_token.setdefault(token, []).append((1 / (2 + cell), rows.source, (rows, through)))
    assert proposal.merged.keys() == of_token.keys()
    for token, (probability, source, below) in proposal.merged.items():
        assert (probability, source) == max(of_token[token], key=lambda seen: seen[0])[:2]
        assert below == [members for _, _, members in of_token[token]]
