"""/v1/embeddings with an embedding model."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from live import Live, served
from support.pooled import with_pooling

from rest_local.decoding.engine import Engine
from rest_local.llama.options import ModelOptions, Override
from rest_local.server.app import Serving
from rest_local.server.settings import Settings


@pytest.fixture(scope="module")
def embedding(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = with_pooling(tiny_model("llama", n_ctx=256), tmp_path_factory.mktemp("pooled") / "tiny.gguf", 3)
    serving = Serving(Settings(port=0), "tiny", lambda: Engine.load(path), drain_seconds=1)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


def test_a_generating_model_embeds_where_an_override_names_a_pooling(
    tiny_model: Callable[..., Path], embedding: Live
) -> None:
    options = ModelOptions(override_kv=(Override.parse("llama.pooling_type=int:3"),))
    load = lambda: Engine.load(tiny_model("llama", n_ctx=256), options=options)  # noqa: E731
    serving = Serving(Settings(port=0), "tiny", load, drain_seconds=1)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        body = {"input": ["hello", {"prompt_string": "more text"}, [5, "text", 6]]}
        found, wanted = (each.post("/v1/embeddings", body).json()["data"] for each in (live, embedding))
        assert [entry["embedding"] for entry in found] == [entry["embedding"] for entry in wanted]
        assert live.post("/completion", {"prompt": "hello", "n_predict": 2}).json()["tokens_predicted"] == 2


def test_formats_of_vectors(embedding: Live) -> None:
    floats = embedding.post("/v1/embeddings", {"input": "hello"}).json()["data"][0]["embedding"]
    packed = embedding.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == floats
    short = embedding.post("/v1/embeddings", {"input": "hello", "dimensions": 1}).json()["data"][0]["embedding"]
    assert abs(short[0]) == pytest.approx(1.0)
    assert np.linalg.norm(floats) == pytest.approx(1.0, abs=1e-4)
    by_id = embedding.post("/v1/embeddings", {"input": [[5, 6], [7]]}).json()["data"]
    assert by_id[0]["embedding"] != by_id[1]["embedding"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": "x", "dimensions": 65}, {"input": [99999]}])
def test_invalid_requests_are_refused(embedding: Live, body: dict[str, object]) -> None:
    assert embedding.post("/v1/embeddings", body).status_code == 400
