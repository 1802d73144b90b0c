"""POST /v1/embeddings, 501 for a model that makes no embeddings. POST /v1/rerank: always 501."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.llama.embedding import Embedder, pooling
from rest_local.server.bodies import MAX_PROMPTS, EmbeddingBody
from rest_local.server.errors import ApiError
from rest_local.server.parsing import parse
from rest_local.server.prompts import plain_prompts
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


async def embeddings(request: HttpRequest) -> Response:
    """OpenAI's embeddings: one vector of length 1 for each input."""
    body = await parse(request, EmbeddingBody)
    state = state_of(request)
    _, engine = state.loaded()
    model = state.check_model(body.model)
    if pooling(engine.model) is None:
        raise ApiError(501, "the model makes no embeddings; serve one that was trained for them", code="no_embeddings")
    prompts, vectors = await state.workers.run(request, lambda: _vectors(state, body))
    count = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "model": model, "data": data, "usage": usage})


async def rerank(request: HttpRequest) -> Response:
    """The response of llama-server for a model that cannot rerank. No reranking model is supported here."""
    raise ApiError(501, "rerank is not supported; use a server with a reranking model", code="no_reranking")


def _vectors(state: State, body: EmbeddingBody) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    service, engine = state.loaded()
    prompts = plain_prompts(engine, body.input, MAX_PROMPTS)
    if body.dimensions is not None and body.dimensions > engine.model.n_embd:
        raise ApiError(400, f"dimensions: the model has {engine.model.n_embd}", param="dimensions")

    def one(prompt: list[int]) -> NDArray[np.float32]:
        # In the engine's thread, one text at a time: other requests wait for one text, not for all of them.
        return service.run(lambda engine: _embedder(state, engine).embed(prompt))

    return prompts, [one(prompt) for prompt in prompts]


def _embedder(state: State, engine: Engine) -> Embedder:
    """The embedder, made for the first request, because it takes memory."""
    if state.embedder is None:
        state.embedder = Embedder(engine.model)
    return state.embedder


def _encoded(vector: NDArray[np.float32], body: EmbeddingBody) -> Any:
    """The vector as the body requests it. A shortened vector is scaled to length 1 again."""
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        length = float(np.linalg.norm(vector))
        vector = vector / np.float32(length) if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
