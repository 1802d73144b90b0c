"""The naive search that the tests compare with: every position of every document, one by one."""

from collections.abc import Sequence

from rest_local.retrieval import MAX_MATCH, Rows


def agreement(before: Sequence[int], context: Sequence[int]) -> int:
    match = 0
    for a, b in zip(reversed(before), reversed(context), strict=False):
        if a != b or match == MAX_MATCH:
            break
        match += 1
    return match


def every_row(
    documents: Sequence[Sequence[int]], context: Sequence[int], depth: int
) -> dict[int, tuple[int, list[int]]]:
    """Return position -> (match, continuation) for all matches of a token or more. A document ends with a separator."""
    rows, start = {}, 0
    for document in documents:
        for at in range(1, len(document) + 1):
            match = agreement(document[:at], context)
            if match:
                following = list(document[at : at + depth])
                rows[start + at] = (match, following + [-1] * (depth - len(following)))
        start += len(document) + 1
    return rows


def assert_right(rows: Rows, expected: dict[int, tuple[int, list[int]]], limit: int) -> None:
    """Check that each row is correct, no row is repeated, and no longer match is missing."""
    found = {
        int(position): (int(match), continuation.tolist())
        for position, match, continuation in zip(rows.positions, rows.match, rows.continuations, strict=True)
    }
    assert len(found) == len(rows)
    for position, row in found.items():
        assert expected.get(position) == row
    assert rows.match.tolist() == sorted((match for match, _ in expected.values()), reverse=True)[:limit]
