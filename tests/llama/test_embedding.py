"""Vectors and scores: those of the same pass in numpy, of length one, repeatable; what cannot be is refused."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.encoders import CLS, CLS_POOLING, MEAN_POOLING, RANK_POOLING, SEP, Encoder, encoder
from support.pooled import with_pooling

from benchmarks import gguf_file
from benchmarks.tiny import Builder
from rest_local.errors import ModelError, PromptEmpty, PromptTooLong
from rest_local.llama.embedding import Embedder, Pairs, Ranker, longest_text, pooling, pooling_of
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


NEAR = 0.02  # llama.cpp takes GELU of 16-bit numbers from a table; scores are of size 1 to 10
QUERY = "what is the cat"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return encoder(tmp_path_factory.mktemp("ranker") / "ranker.gguf", RANK_POOLING)


@pytest.fixture
def model(made: Encoder) -> Iterator[Model]:
    with Model.open(made.path) as opened:
        yield opened


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


def test_scores_are_those_of_the_same_pass_in_numpy(made: Encoder, model: Model) -> None:
    ranker, pairs = Ranker(model), Pairs(model)
    documents = ("the dog", "cat mat", "a", "the cat sat on the mat and is a cat of the mat")
    tokens = [pairs.tokens(QUERY, document, 64) for document in documents]
    expected = [made.score(each) for each in tokens]
    assert [ranker.score(each) for each in tokens] == pytest.approx(expected, abs=NEAR)
    assert max(expected) - min(expected) > 10 * NEAR, "the scores differ by more than the tolerance"
    assert ranker.score(tokens[0]) == ranker.score(tokens[0]), "whatever was scored before"
    ranker.close()
    ranker.close()


def test_empty_and_long_pairs_are_refused(model: Model) -> None:
    ranker = Ranker(model)
    with pytest.raises(PromptTooLong):
        Pairs(model).tokens("the cat " * 10, "dog " * 60, longest_text(model))
    with pytest.raises(PromptTooLong):
        ranker.score([CLS] * 65)
    with pytest.raises(PromptEmpty):
        ranker.score([])
    assert isinstance(ranker.score([CLS] * 64), float)
    ranker.close()


def test_only_rankers_rank(tmp_path: Path, tiny_model: Callable[..., Path], model: Model) -> None:
    assert (pooling_of(model), pooling(model)) == ("rank", None)
    with pytest.raises(ModelError, match="no embeddings"):
        Embedder(model)
    with Model.open(tiny_model("llama")) as other, pytest.raises(ModelError, match="cannot rerank"):
        Ranker(other)
    path = with_pooling(tiny_model("llama", n_ctx=256), tmp_path / "pooled.gguf", 3)
    for value, found in ((3, "last"), (2, "cls"), (0, None)):
        options = ModelOptions(override_kv=(Override("llama.pooling_type", "int", value),))
        with Model.open(path, options=options) as other:
            assert pooling_of(other) == found, "an override counts, the file does not"


TEMPLATE = "<|im_start|>judge\nquery: {query}\ndocument: {document}<|im_end|>\n<|im_start|>yes or no\n"


def qwen3_ranker(path: Path) -> tuple[Path, np.ndarray]:
    """Write a causal model with a template for pairs and a head of two outputs, as Qwen3's rerankers."""
    builder, vocabulary = Builder(3, "F32"), gguf_file.byte_vocabulary()
    vocabulary.keys["tokenizer.chat_template.rerank"] = TEMPLATE
    builder.embeddings(vocabulary, "output_norm")
    for block in ("blk.0", "blk.1"):
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        builder.attention(block, norms=True)
        builder.feed_forward(block)
    head = builder.normal((2, 64), 0.2)
    builder.plain("cls.output.weight", head)
    keys = {
        "general.name": "tiny ranker", "block_count": 2, "context_length": 256, "embedding_length": 64,
        "feed_forward_length": 128, "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 32,
        "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "pooling_type": RANK_POOLING, "classifier.output_labels": ["yes", "no"],
    }  # fmt: skip
    return gguf_file.write(path, "qwen3", keys, vocabulary, builder.tensors), head


def test_a_causal_ranker_has_its_template_and_the_share_of_yes(tmp_path: Path) -> None:
    path, head = qwen3_ranker(tmp_path / "qwen3.gguf")
    last = ModelOptions(override_kv=(Override("qwen3.pooling_type", "int", 3),))
    with Model.open(path) as model, Model.open(path, options=last) as vectors:
        ranker, pairs, embedder = Ranker(model), Pairs(model), Embedder(vectors)
        found = []
        for document in ("import os", "class A:\n    pass", "the {query}"):
            tokens = pairs.tokens("def {document}", document, 256)
            text = b"".join(model.vocabulary.piece(token) for token in tokens).decode()
            filled = TEMPLATE.split("{query}")
            assert text == f"{filled[0]}def {{document}}{filled[1].replace('{document}', document)}"
            outputs = head @ embedder.evaluate(tokens)
            shares = np.exp(outputs - outputs.max())
            found.append(float(shares[0] / shares.sum()))
            assert ranker.score(tokens) == pytest.approx(found[-1], abs=2e-3)
        assert max(found) - min(found) > 0.01
        ranker.close()
        embedder.close()
    assert gguf.GGUFReader(path).get_field("tokenizer.chat_template.rerank") is not None
