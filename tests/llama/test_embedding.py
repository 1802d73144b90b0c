"""Embeddings: a text always gives the same vector of length 1, whatever was embedded before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.pooled import with_pooling

from rest_local.errors import ModelError, PromptEmpty, PromptTooLong
from rest_local.llama.embedding import Embedder, pooling
from rest_local.llama.model import Model


@pytest.fixture(params=[1, 2, 3], ids=["mean", "cls", "last"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Model]:
    with Model.open(with_pooling(tiny_model("llama", n_ctx=256), tmp_path / "embed.gguf", request.param)) as model:
        yield model


def test_vectors_are_of_length_one_and_repeatable(model: Model) -> None:
    embedder = Embedder(model)
    try:
        first = embedder.embed([5, 6, 7, 8])
        other = embedder.embed([5, 6, 9])
        again = embedder.embed([5, 6, 7, 8])
        assert first.shape == (model.n_embd,)
        assert abs(float(np.linalg.norm(first)) - 1) < 1e-5
        assert np.array_equal(first, again)
        if pooling(model) != "cls":  # in a causal model the first token's vector does not depend on the rest
            assert not np.allclose(first, other)
    finally:
        embedder.close()
        embedder.close()


def test_empty_and_long_texts_are_refused_and_the_next_works(model: Model) -> None:
    embedder = Embedder(model)
    try:
        with pytest.raises(PromptEmpty):
            embedder.embed([])
        with pytest.raises(PromptTooLong):
            embedder.embed([5] * 257)
        assert embedder.embed([5] * 256).shape == (model.n_embd,)
    finally:
        embedder.close()


def test_a_model_without_pooling_has_no_embeddings(tiny_model: Callable[..., Path]) -> None:
    with Model.open(tiny_model("llama")) as model:
        assert pooling(model) is None
        with pytest.raises(ModelError, match="no embeddings"):
            Embedder(model)
