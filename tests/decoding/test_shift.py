"""What a context shift drops: whole blocks, by position, so that a longer text of the same beginning is cut alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rest_local.decoding.scheduler import shifted


@given(st.integers(8, 200), st.integers(0, 300), st.integers(0, 1500))
def test_what_is_left_fits_and_keeps_both_ends(n_ctx: int, keep: int, length: int) -> None:
    text = list(range(length))
    left = shifted(text, keep, n_ctx)
    assert len(left) < n_ctx
    if length < n_ctx:
        assert left == text
    else:
        kept = min(keep, n_ctx // 2)
        assert left[:kept] == text[:kept]
        assert left[kept:] == text[length - len(left) + kept :]
        assert len(left) - kept >= (n_ctx - kept) // 2 - 1


@given(st.integers(8, 100), st.integers(0, 40), st.integers(0, 500))
def test_token_by_token_and_at_once_are_the_same(n_ctx: int, keep: int, more: int) -> None:
    """An answer that is shifted while it grows, and the whole of it sent again."""
    text = list(range(n_ctx // 2 + more))
    grown = text[: n_ctx // 2]
    for token in text[n_ctx // 2 :]:
        grown.append(token)
        if len(grown) == n_ctx + 1:
            grown = shifted(grown, keep, n_ctx)
    at_once = shifted(text, keep, n_ctx)
    assert grown == at_once or len(grown) == n_ctx  # the next token would have it cut as well
