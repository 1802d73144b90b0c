"""Models that only read: embeddings and reranking are served, what generates is refused, nothing is measured."""

import base64
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from live import Live, served
from support.encoders import CLS, MEAN_POOLING, RANK_POOLING, Encoder, encoder
from support.pooled import with_pooling

from rest_local.decoding.engine import Engine
from rest_local.errors import CannotGenerate, ModelError
from rest_local.llama.options import ModelOptions, Override
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

QUERY = "what is the cat"
DOCUMENTS = ["the dog", "cat mat", "a", "the cat sat on the mat"]


def live_encoder(path: Path, **options: Any) -> Iterator[Live]:
    load = partial(Engine.load, path, slots=4, **options)
    serving = Serving(ServerSettings(port=0, metrics=True), "bert", load, drain_seconds=1)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return encoder(tmp_path_factory.mktemp("vectors") / "bert.gguf", MEAN_POOLING)


@pytest.fixture(scope="module")
def embedding(vectors: Encoder) -> Iterator[Live]:
    yield from live_encoder(vectors.path)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return encoder(tmp_path_factory.mktemp("scores") / "ranker.gguf", RANK_POOLING)


@pytest.fixture(scope="module")
def ranking(scores: Encoder) -> Iterator[Live]:
    yield from live_encoder(scores.path)


def test_an_encoder_embeds(embedding: Live, vectors: Encoder) -> None:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="x", max_retries=0) as client:
        made = client.embeddings.create(model="bert", input=DOCUMENTS)
    vocabulary = embedding.serving.state.engine.model.vocabulary  # type: ignore[union-attr]
    for text, entry in zip(DOCUMENTS, made.data, strict=True):
        tokens = vocabulary.tokenize(text, add_special=True).tolist()
        assert tokens[0] == CLS
        assert np.abs(np.array(entry.embedding) - vectors.pooled(tokens)).max() < 2e-3
    with ollama.Client(host=embedding.url) as client:
        same = client.embed("bert", DOCUMENTS)
        assert np.allclose(same.embeddings, [entry.embedding for entry in made.data])
        assert same.prompt_eval_count == made.usage.prompt_tokens
        assert client.embeddings("bert", DOCUMENTS[0]).embedding == pytest.approx(same.embeddings[0])
        assert client.show("bert").capabilities == ["embedding"]


def test_ollamas_embeddings_are_cut_unless_told_otherwise(embedding: Live) -> None:
    long = "the cat " * 100
    with ollama.Client(host=embedding.url) as client:
        assert client.embed("bert", long).prompt_eval_count == 64
        with pytest.raises(ollama.ResponseError, match="64") as caught:
            client.embed("bert", long, truncate=False)
        assert caught.value.status_code == 400
        assert client.embed("bert", "").embeddings == []
        assert client.embed("bert", ["a", "the"], dimensions=5).embeddings[1] == pytest.approx(
            client.embed("bert", "the", dimensions=5).embeddings[0]
        )


GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/completion", {"prompt": "x", "stream": True}),
    ("/infill", {"input_prefix": "x"}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x"}),
    ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
    ("/api/generate", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_what_generates_is_501(embedding: Live, ranking: Live, path: str, body: dict[str, Any]) -> None:
    for live, word in ((embedding, "makes embeddings"), (ranking, "ranks documents")):
        answer = live.post(path, body)
        assert answer.status_code == 501
        assert word in answer.text
        assert "generates no text" in answer.text


def test_the_server_goes_on(embedding: Live) -> None:
    """Calls about the server answer, whatever they would say of an engine that decodes."""
    assert embedding.get("/health").status_code == 200
    assert embedding.get("/slots").json() == []
    assert embedding.get("/props").json()["total_slots"] == 0
    assert embedding.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 64
    assert "llamacpp:requests_processing 0.0" in embedding.get("/metrics").text
    assert embedding.post("/tokenize", {"content": "the cat"}).json()["tokens"]
    refused = embedding.post("/v1/rerank", {"query": "x", "documents": ["y"]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")


def test_nothing_is_measured_and_nothing_drafts(vectors: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("rest_local.decoding.engine.open_context", refuse)
    monkeypatch.setattr("rest_local.decoding.opening.load_fallback.choose", refuse)
    with Engine.load(vectors.path, history=True) as engine:
        assert not engine.decoder.generates
        assert not engine.warnings
        assert engine.statistics()["requests"] == 0
        engine.decoder.forget()
        with pytest.raises(CannotGenerate, match="makes embeddings"):
            engine.generate("the cat")
        (ended,) = engine.batch([engine.request("the cat")])
        assert isinstance(ended.error, CannotGenerate)
        with pytest.raises(CannotGenerate):
            _ = engine.decoder.context.tuning.curve


def test_an_encoder_that_pools_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither text nor vectors"):
        Engine.load(encoder(tmp_path / "none.gguf", 0).path)


def test_documents_come_in_the_order_of_their_relevance(ranking: Live, scores: Encoder) -> None:
    answer = ranking.post("/v1/rerank", {"model": "bert", "query": QUERY, "documents": DOCUMENTS}).json()
    assert answer["model"] == "bert"
    vocabulary = ranking.serving.state.engine.model.vocabulary  # type: ignore[union-attr]
    pairs = [[CLS, *vocabulary.tokenize(QUERY), 3, *vocabulary.tokenize(text)] for text in DOCUMENTS]
    expected = [scores.score([int(token) for token in pair]) for pair in pairs]
    found = [entry["relevance_score"] for entry in answer["results"]]
    assert found == sorted(found, reverse=True)
    assert found == pytest.approx([expected[entry["index"]] for entry in answer["results"]], abs=0.02)
    assert sorted(entry["index"] for entry in answer["results"]) == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": sum(map(len, pairs)), "total_tokens": sum(map(len, pairs))}
    assert "document" not in answer["results"][0]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/reranking", "/v1/reranking"])
def test_the_best_with_their_texts(ranking: Live, path: str) -> None:
    body = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]], "top_n": 2}
    results = ranking.post(path, body | {"return_documents": True}).json()["results"]
    assert len(results) == 2
    assert all(entry["document"] == {"text": DOCUMENTS[entry["index"]]} for entry in results)


def test_the_form_of_tei(ranking: Live) -> None:
    jina = ranking.post("/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    plain = ranking.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    assert plain == [{"index": each["index"], "score": each["relevance_score"]} for each in jina]
    with_text = ranking.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert [each["text"] for each in with_text] == [DOCUMENTS[each["index"]] for each in jina]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": 5, "documents": ["x"]}, "query"),
        ({"query": "", "documents": ["x"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": "one text"}, "documents"),
        ({"query": "x", "documents": ["y", 7]}, "documents[1]"),
        ({"query": "x", "documents": ["y", {"title": "no text"}]}, "documents[1]"),
        ({"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
        ({"query": "x", "texts": []}, "texts"),
        ({"query": "x", "documents": ["the", "cat " * 80]}, "documents[1]"),
        ({"query": "cat " * 80, "texts": ["the"]}, "texts[0]"),
    ],
)
def test_bad_input_to_reranking_names_the_field(ranking: Live, body: dict[str, Any], field: str) -> None:
    answer = ranking.post("/v1/rerank", body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def test_a_ranker_makes_no_embeddings(ranking: Live) -> None:
    assert ranking.post("/v1/embeddings", {"input": "x"}).status_code == 501
    with ollama.Client(host=ranking.url) as client:
        assert client.show("bert").capabilities == []


@pytest.fixture(scope="module")
def pooled(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serve a model that generates, whose file names a pooling."""
    path = with_pooling(tiny_model("llama", n_ctx=256), tmp_path_factory.mktemp("pooled") / "tiny.gguf", 3)
    yield from live_encoder(path)


def test_a_generating_model_embeds_where_an_override_names_a_pooling(
    tiny_model: Callable[..., Path], pooled: Live
) -> None:
    options = ModelOptions(override_kv=(Override.parse("llama.pooling_type=int:3"),))
    with contextlib.contextmanager(live_encoder)(tiny_model("llama", n_ctx=256), options=options) as live:
        body = {"input": ["hello", {"prompt_string": "more text"}, [5, "text", 6]]}
        found, wanted = (each.post("/v1/embeddings", body).json()["data"] for each in (live, pooled))
        assert [entry["embedding"] for entry in found] == [entry["embedding"] for entry in wanted]
        assert live.post("/completion", {"prompt": "hello", "n_predict": 2}).json()["tokens_predicted"] == 2


def test_formats_of_vectors(pooled: Live) -> None:
    floats = pooled.post("/v1/embeddings", {"input": "hello"}).json()["data"][0]["embedding"]
    packed = pooled.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == floats
    short = pooled.post("/v1/embeddings", {"input": "hello", "dimensions": 1}).json()["data"][0]["embedding"]
    assert abs(short[0]) == pytest.approx(1.0)
    assert np.linalg.norm(floats) == pytest.approx(1.0, abs=1e-4)
    by_id = pooled.post("/v1/embeddings", {"input": [[5, 6], [7]]}).json()["data"]
    assert by_id[0]["embedding"] != by_id[1]["embedding"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": "x", "dimensions": 65}, {"input": [99999]}])
def test_invalid_requests_are_refused(pooled: Live, body: dict[str, object]) -> None:
    assert pooled.post("/v1/embeddings", body).status_code == 400
