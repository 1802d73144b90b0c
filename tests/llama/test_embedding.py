"""Vectors: those of the same pass in numpy, of length one, repeatable; what cannot be is refused."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.encoders import CLS, CLS_POOLING, MEAN_POOLING, SEP, encoder
from support.pooled import with_pooling

from rest_local.errors import ModelError, PromptEmpty, PromptTooLong
from rest_local.llama.embedding import Embedder, pooling
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override


@pytest.fixture(params=[1, 2, 3], ids=["mean", "cls", "last"])
def embedding_model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Model]:
    with Model.open(with_pooling(tiny_model("llama", n_ctx=256), tmp_path / "embed.gguf", request.param)) as model:
        yield model


def test_vectors_are_of_length_one_and_repeatable(embedding_model: Model) -> None:
    with closing(Embedder(embedding_model)) as embedder:
        first = embedder.embed([5, 6, 7, 8])
        other = embedder.embed([5, 6, 9])
        again = embedder.embed([5, 6, 7, 8])
        assert first.shape == (embedding_model.n_embd,)
        assert abs(float(np.linalg.norm(first)) - 1) < 1e-5
        assert np.array_equal(first, again)
        if pooling(embedding_model) != "cls":  # In a causal model the first token's vector does not depend on the rest.
            assert not np.allclose(first, other)


def test_empty_and_long_texts_are_refused_and_the_next_works(embedding_model: Model) -> None:
    with closing(Embedder(embedding_model)) as embedder:
        with pytest.raises(PromptEmpty):
            embedder.embed([])
        with pytest.raises(PromptTooLong):
            embedder.embed([5] * 257)
        assert embedder.embed([5] * 256).shape == (embedding_model.n_embd,)


def test_a_model_without_pooling_has_no_embeddings(tiny_model: Callable[..., Path]) -> None:
    with Model.open(tiny_model("llama")) as model:
        assert pooling(model) is None
        with pytest.raises(ModelError, match="no embeddings"):
            Embedder(model)


@pytest.mark.parametrize("kind", [MEAN_POOLING, CLS_POOLING])
def test_vectors_are_those_of_the_same_pass_in_numpy(tmp_path: Path, kind: int) -> None:
    made = encoder(tmp_path / "bert.gguf", kind)
    with Model.open(made.path) as model:
        embedder = Embedder(model)
        for text in ("the cat sat on a mat.", "what", "dogs and cats"):
            tokens = model.vocabulary.tokenize(text, add_special=True).tolist()
            assert tokens[0] == CLS
            assert tokens[-1] == SEP
            assert np.abs(embedder.embed(tokens) - made.pooled(tokens)).max() < 2e-3
        embedder.close()


def test_an_override_of_the_pooling_counts_and_the_file_does_not(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    path = with_pooling(tiny_model("llama", n_ctx=256), tmp_path / "pooled.gguf", 3)
    for value, found in ((3, "last"), (2, "cls"), (0, None), (4, None)):  # 4 is llama.cpp's ranking
        options = ModelOptions(override_kv=(Override("llama.pooling_type", "int", value),))
        with Model.open(path, options=options) as other:
            assert pooling(other) == found
