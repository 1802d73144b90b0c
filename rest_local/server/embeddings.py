"""POST /v1/embeddings, 501 for a model that makes no embeddings. POST /v1/rerank: always 501."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
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
    service, engine = state.loaded()
    embedding = Embedding(engine, body, state.check_model(body.model))

    def embed(prompt: list[int]) -> NDArray[np.float32]:
        # In the engine's thread, one text at a time: other requests wait for one text, not for all of them.
        return service.run(lambda engine: _embedder(state, engine).embed(prompt))

    return json_response(await state.workers.run(request, lambda: embedding.answer(embed)))


@dataclass(frozen=True)
class Embedding:
    """One request for embeddings. `model`: the name to answer with. Knows no HTTP. Raises ApiError 501 if the model
    makes no embeddings.
    """

    engine: Engine
    body: EmbeddingBody
    model: str

    def __post_init__(self) -> None:
        if pooling(self.engine.model) is None:
            raise ApiError(
                501, "the model makes no embeddings; serve one that was trained for them", code="no_embeddings"
            )

    def answer(self, embed: Callable[[list[int]], NDArray[np.float32]]) -> dict[str, Any]:
        """OpenAI's object. `embed` gives the vector of one text. Raises ApiError 400, PromptTooLong, and what `embed`
        raises.
        """
        body, size = self.body, self.engine.model.n_embd
        prompts = plain_prompts(self.engine, body.input, MAX_PROMPTS)
        if body.dimensions is not None and body.dimensions > size:
            raise ApiError(400, f"dimensions: the model has {size}", param="dimensions")
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(embed(prompt), body)}
            for index, prompt in enumerate(prompts)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "model": self.model, "data": data, "usage": usage}


async def rerank(request: HttpRequest) -> Response:
    """The response of llama-server for a model that cannot rerank. No reranking model is supported here."""
    raise ApiError(501, "rerank is not supported; use a server with a reranking model", code="no_reranking")


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
