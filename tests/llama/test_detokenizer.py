"""The stream of text is exactly the text, for any split of characters over tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Detokenizer

SHARED = ("ggml-vocab-qwen2.gguf", "ggml-vocab-llama-bpe.gguf", "ggml-vocab-llama-spm.gguf")
_utf8_pieces = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode)))


def _streamed(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [*(detokenizer.feed(i) for i in range(len(pieces))), detokenizer.finish()]


@given(pieces=_utf8_pieces)
def test_stream_concatenates_to_the_whole_text(pieces: list[bytes]) -> None:
    assert "".join(_streamed(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(text=st.text(max_size=30))
def test_valid_text_fed_byte_by_byte_has_no_replacement_and_nothing_late(text: str) -> None:
    """Each character is returned with its last byte, not later."""
    data = text.encode()
    stream = _streamed([data[i : i + 1] for i in range(len(data))])
    assert "".join(stream) == text
    assert [part for part in stream if part] == list(text)
    assert stream[-1] == ""


def test_replacement_stands_only_for_what_is_invalid_or_cut_off() -> None:
    assert _streamed([b"\xe2\x82", b"\xac"]) == ["", "€", ""]
    assert _streamed([b"a\xff", b"b"]) == ["a\ufffd", "b", ""]
    assert _streamed([b"\xf0\x9f", b"x"]) == ["", "\ufffdx", ""]
    assert _streamed([b"\xf0\x9f"]) == ["", "\ufffd"]


@pytest.mark.parametrize("name", SHARED)
def test_exact_for_every_token_of_a_real_vocabulary(shared_data: Callable[[str], Path], name: str) -> None:
    with Model.open(shared_data(name), vocab_only=True) as model:
        pieces = [model.vocabulary.piece(token) for token in range(model.n_vocab)]
    order = np.random.default_rng(3).permutation(len(pieces)).tolist()
    for tokens in (range(len(pieces)), order):
        detokenizer = Detokenizer(pieces.__getitem__)
        streamed = "".join([*map(detokenizer.feed, tokens), detokenizer.finish()])
        assert streamed == b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
