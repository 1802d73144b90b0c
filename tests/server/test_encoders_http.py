"""Models that only read: embeddings are served, what generates is refused, nothing is measured."""

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
from support.encoders import CLS, MEAN_POOLING, Encoder, encoder
from support.pooled import with_pooling

from rest_local.decoding.engine import Engine
from rest_local.errors import CannotGenerate, ModelError
from rest_local.llama.options import ModelOptions, Override
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

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
def test_what_generates_is_501(embedding: Live, path: str, body: dict[str, Any]) -> None:
    answer = embedding.post(path, body)
    assert answer.status_code == 501
    assert "makes embeddings and generates no text" in answer.text


def test_the_server_goes_on(embedding: Live) -> None:
    """Calls about the server answer, whatever they would say of an engine that decodes."""
    assert embedding.get("/health").status_code == 200
    assert embedding.get("/slots").json() == []
    assert embedding.get("/props").json()["total_slots"] == 0
    assert embedding.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 64
    assert "llamacpp:requests_processing 0.0" in embedding.get("/metrics").text
    assert embedding.post("/tokenize", {"content": "the cat"}).json()["tokens"]


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
        body = {"input": ["hello", "more text", [5, "text", 6]]}
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
