"""Reliability case 23: a batch above the capacity cannot be built, and llama.cpp reads exactly the given content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.llama.context import Batch


@st.composite
def contents(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int, int]]]:
    """capacity, max_ids, and (token, pos, first id, number of ids, output) of each token; sometimes too many."""
    capacity, max_ids = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    rows = st.tuples(
        st.integers(0, 200_000), st.integers(0, 5000), st.integers(0, 9), st.integers(1, max_ids), st.integers(0, 1)
    )
    return capacity, max_ids, draw(st.lists(rows, min_size=1, max_size=16))


def filled(batch: Batch, rows: list[tuple[int, int, int, int, int]]) -> None:
    token, pos, first, count, output = map(list, zip(*rows, strict=True))
    batch.fill(token, pos, first, count, output)


@given(contents(), contents())
def test_llama_cpp_sees_what_was_filled_in_or_it_is_refused(
    before: tuple[int, int, list[tuple[int, int, int, int, int]]],
    now: tuple[int, int, list[tuple[int, int, int, int, int]]],
) -> None:
    """Reads the content through the pointers of the structure. Earlier content must not remain."""
    capacity, max_ids, rows = now
    batch = Batch(capacity, max_ids)
    earlier = [(token, pos, first, min(count, max_ids), output) for token, pos, first, count, output in before[2]]
    filled(batch, earlier[:capacity])
    if len(rows) > capacity:
        with pytest.raises(ValueError, match=f"{len(rows)} tokens do not fit a batch of {capacity}"):
            filled(batch, rows)
        assert batch.struct.n_tokens == min(len(earlier), capacity)
        return
    filled(batch, rows)
    struct = batch.struct
    assert struct.n_tokens == batch.n_tokens == len(rows)
    for i, (token, pos, first, count, output) in enumerate(rows):
        assert (struct.token[i], struct.pos[i], struct.n_seq_id[i]) == (token, pos, count)
        assert bool(struct.logits[i]) == bool(output)
        assert [struct.seq_id[i][k] for k in range(count)] == list(range(first, first + count))


@pytest.mark.parametrize("n_ids", [0, -1, 3, [1, 3]])
def test_a_token_has_one_to_max_ids(n_ids: int | list[int]) -> None:
    batch = Batch(4, 2)
    with pytest.raises(ValueError, match="1 to 2 sequence ids"):
        batch.fill([1, 2], [0, 1], 0, n_ids, 1)
