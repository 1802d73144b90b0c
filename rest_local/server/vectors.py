"""What is computed of whole texts: embeddings, and the relevance of documents to a query.

- `POST /v1/embeddings` is OpenAI's. It answers 501 for a model that makes no embeddings.
- `POST /v1/rerank` takes the bodies of llama-server, Jina and Cohere (`documents`) and of TEI (`texts`). It answers 501
  for a model without a head for that. Scores are the head's own outputs: higher is better, and they need no bounds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.errors import PromptTooLong
from rest_local.llama.embedding import Embedder, Pairs, Ranker, longest_text, pooling, pooling_of
from rest_local.server.bodies import EmbeddingBody, RerankBody, parse
from rest_local.server.errors import ApiError
from rest_local.server.prompts import prompts_of
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service


async def embeddings(request: HttpRequest) -> Response:
    """OpenAI's embeddings: one vector of length 1 for each input."""
    body = await parse(request, EmbeddingBody)
    state = state_of(request)
    service, engine = state.loaded()
    embedding = Embedding(engine, body, state.check_model(body.model))
    return json_response(await state.workers.run(request, lambda: embedding.answer(embedder(state, service))))


def embedder(state: State, service: Service) -> Callable[[list[int]], NDArray[np.float32]]:
    """What gives the vector of a text, from any thread. One text at a time is computed in the engine's thread, so that
    other requests wait for one text, not for all of them.
    """

    def embed(prompt: list[int]) -> NDArray[np.float32]:
        return service.run(lambda engine: _embedder(state, engine).embed(prompt))

    return embed


def check_embeds(engine: Engine) -> None:
    """Raises ApiError 501 if the model makes no embeddings."""
    if pooling(engine.model) is None:
        raise ApiError(501, "the model makes no embeddings; serve one that was trained for them", code="no_embeddings")


@dataclass(frozen=True)
class Embedding:
    """One request for embeddings. `model`: the name to answer with. Knows no HTTP. Raises ApiError 501 if the model
    makes no embeddings.
    """

    engine: Engine
    body: EmbeddingBody
    model: str

    def __post_init__(self) -> None:
        check_embeds(self.engine)

    def answer(self, embed: Callable[[list[int]], NDArray[np.float32]]) -> dict[str, Any]:
        """OpenAI's object. `embed` gives the vector of one text. Raises ApiError 400, PromptTooLong, and what `embed`
        raises.
        """
        body, size = self.body, self.engine.model.n_embd
        prompts = prompts_of(self.engine, body.input, field="input")
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
    """The documents in the order of their relevance to the query."""
    body = await parse(request, RerankBody)
    state = state_of(request)
    service, engine = state.loaded()
    reranking = Reranking(engine, body, state.check_model(body.model))

    def score(tokens: list[int]) -> float:
        return service.run(lambda engine: _ranker(state, engine).score(tokens))

    return json_response(await state.workers.run(request, lambda: reranking.answer(score)))


@dataclass(frozen=True)
class Reranking:
    """One request to rerank. `model`: the name to answer with. Knows no HTTP. Raises ApiError 501 if the model cannot
    do it.
    """

    engine: Engine
    body: RerankBody
    model: str

    def __post_init__(self) -> None:
        if pooling_of(self.engine.model) != "rank":
            raise ApiError(501, "the model cannot rerank; serve one that was trained for it", code="no_reranking")

    def answer(self, score: Callable[[list[int]], float]) -> dict[str, Any] | list[dict[str, Any]]:
        """Jina's object, or TEI's list for TEI's names. `score`: of the tokens of one pair. Raises ApiError 400 for a
        pair that is too long, before any is scored, and what `score` raises.
        """
        body = self.body
        texts = [each if isinstance(each, str) else each.text for each in body.documents or body.texts or ()]
        pairs = self._pairs(texts)
        scores = [score(pair) for pair in pairs]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        if body.documents is None:
            own = [{"index": index, "score": scores[index]} for index in best]
            return [entry | {"text": texts[int(entry["index"])]} for entry in own] if body.return_text else own
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            results = [entry | {"document": {"text": texts[entry["index"]]}} for entry in results]
        count = sum(map(len, pairs))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "model": self.model, "usage": usage, "results": results}

    def _pairs(self, texts: list[str]) -> list[list[int]]:
        pairs, most = Pairs(self.engine.model), longest_text(self.engine.model)
        field = "texts" if self.body.documents is None else "documents"
        found: list[list[int]] = []
        for number, text in enumerate(texts):
            try:
                found.append(pairs.tokens(self.body.query, text, most))
            except PromptTooLong as error:
                place = f"{field}[{number}]"
                message = f"{place}: with the query it is longer than the {most} tokens that the model reads at once"
                raise ApiError(400, message, code="context_length_exceeded", param=place) from error
        return found


def _ranker(state: State, engine: Engine) -> Ranker:
    """As `_embedder`."""
    if state.ranker is None:
        state.ranker = Ranker(engine.model)
    return state.ranker


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
