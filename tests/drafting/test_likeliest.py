"""The likeliest tokens of a row of logits, with their probabilities, without a pass over all of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rest_local.drafting.models.drafter import BLOCK, CONFIDENT, NEGLIGIBLE, TOP_K, likeliest


def naive(row: NDArray[np.float32]) -> list[tuple[int, float]]:
    weight = np.exp(row.astype(np.float64) - row.max())
    probability = weight / weight.sum()
    order = np.argsort(-probability, kind="stable")[:TOP_K]
    return [(int(token), float(probability[token])) for token in order]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 384, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77]),
    st.sampled_from([0.1, 3.0, 20.0]),
)
def test_as_a_full_sort_of_the_row(seed: int, n: int, spread: float) -> None:
    row = np.random.default_rng(seed).normal(0.0, spread, n).astype(np.float32)
    # Tokens of a negligible probability are not told apart.
    expected = [(token, exact) for token, exact in naive(row) if row[token] > row.max() - NEGLIGIBLE]
    found = likeliest(row)
    certain = min(len(found), len(expected))
    assert [token for token, _ in found[:certain]] == [token for token, _ in expected[:certain]]
    for (_, probability), (_, exact) in zip(found, expected, strict=False):
        assert probability == pytest.approx(exact, rel=0.01)
    assert len(found) == TOP_K or found[-1][1] > CONFIDENT
    assert not any(probability > CONFIDENT for _, probability in found[:-1])


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_a_number_is_found_anywhere(at: int, value: float) -> None:
    row = np.zeros(2 * BLOCK + 5, np.float32)
    row[at] = value
    with pytest.raises(FloatingPointError, match="not numbers"):
        likeliest(row)


def test_tokens_that_a_head_cannot_say_have_no_probability() -> None:
    row = np.full(2 * BLOCK, -np.inf, np.float32)
    row[[7, BLOCK + 9]] = 1.0, 0.0
    assert [token for token, _ in likeliest(row)][:2] == [7, BLOCK + 9]
    assert likeliest(row)[0][1] == pytest.approx(1 / (1 + np.exp(-1.0)))
    with pytest.raises(FloatingPointError):
        likeliest(np.full(BLOCK, -np.inf, np.float32))
