"""A sample of an order finds the same places as the whole order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from rest_local.retrieval import sparse_index as sample
from rest_local.retrieval.rows import order_of, pack, packed
from rest_local.retrieval.segment import Segment
from rest_local.retrieval.sparse_index import Sample, make_sample, sample_size

IDS = [0, 1, 256, 65536, 65535, 151_000]
SIZE = {2: 300, 3: 151_001}


def sampled(text: list[int], width: int) -> tuple[Segment, Segment]:
    """The same segment with and without a sample."""
    size = SIZE[width]
    tokens = pack(np.array(text, np.int32), size)
    order = order_of(tokens, width)
    content = make_sample(tokens, order, width)
    assert len(content) == sample_size(len(text))
    made = Sample(content, len(text))
    return tuple(Segment(tokens, order, length=len(text), vocab_size=size, sample=part) for part in (made, None))


@few(60)
@given(
    st.sampled_from([2, 3]),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=300),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_a_place_is_that_of_the_whole_order(width, text, context, step, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "STEP", step)
        patch.setattr(sample, "BLOCK", block)
        text, context = ([token % SIZE[width] for token in tokens] for tokens in (text, context))
        ours, plain = sampled(text, width)
        for tokens in (context, text[-40:], text[: len(text) // 2][-9:] or [0]):
            key = packed(tokens[-32:], width)
            assert ours.place(key) == plain.place(key)


def test_a_sample_narrows_the_search() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 300, 20_000).tolist()
    ours, _ = sampled(text, 3)
    for at in random.integers(40, 20_000, 50).tolist():
        key = ours.key(text[at - 8 : at])
        low, high = ours._sample.around(key, sample.beginning(key))
        assert high - low < 2 * sample.STEP


def test_a_sample_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="sample of 65"):
        Sample(bytes(32), 65)
