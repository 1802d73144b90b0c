"""Embeddings of texts, and the relevance of documents to a query.

- An embedding is OpenAI's: one vector of length 1 for each input.
- A reranking takes the bodies of llama-server, Jina and Cohere (`documents`) and of TEI (`texts`). Scores are the raw
  outputs of the model's head: higher is better, and they have no bounds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rest_local.api.bodies import EmbeddingBody, RerankBody
from rest_local.api.errors import ApiError
from rest_local.api.requests import prompts_of
from rest_local.errors import PromptTooLong
from rest_local.llama.embedding import Pairs, longest_text, pooling, pooling_of

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def check_embeds(engine: Engine) -> None:
    """Raise ApiError 501 if the model makes no embeddings."""
    if pooling(engine.model) is None:
        raise ApiError(501, "the model makes no embeddings; serve one that was trained for them", code="no_embeddings")


Embed = Callable[[list[int]], NDArray[np.float32]]  # computes the vector of one text from its tokens


def embeddings(engine: Engine, body: EmbeddingBody, model: str, embed: Embed) -> dict[str, Any]:
    """Return OpenAI's object for the model of this name.

    Raises ApiError 501 without embeddings, ApiError 400, PromptTooLong, and what `embed` raises.
    """
    check_embeds(engine)
    prompts, size = prompts_of(engine, body.input, field="input"), engine.model.n_embd
    if body.dimensions is not None and body.dimensions > size:
        raise ApiError(400, f"dimensions: the model has only {size}", param="dimensions")
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(embed(prompt), body)}
        for index, prompt in enumerate(prompts)
    ]
    return {"object": "list", "model": model, "data": data, "usage": _usage(prompts)}


def _usage(prompts: list[list[int]]) -> dict[str, int]:
    count = sum(map(len, prompts))
    return {"prompt_tokens": count, "total_tokens": count}


def reranking(
    engine: Engine, body: RerankBody, model: str, score: Callable[[list[int]], float]
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return Jina's object, or TEI's list for TEI's names. `score` rates the tokens of a query with a document.

    Raises ApiError 501 if the model cannot rerank, 400 if any pair is too long, before the first is scored, and what
    `score` raises.
    """
    if pooling_of(engine.model) != "rank":
        raise ApiError(501, "the model cannot rerank; serve one that was trained for it", code="no_reranking")
    texts = [each if isinstance(each, str) else each.text for each in body.documents or body.texts or ()]
    pairs = _pairs(engine, body.query, texts, "texts" if body.documents is None else "documents")
    scores = [score(pair) for pair in pairs]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    if body.documents is None:
        own = [{"index": index, "score": scores[index]} for index in best]
        return [entry | {"text": texts[int(entry["index"])]} for entry in own] if body.return_text else own
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        results = [entry | {"document": {"text": texts[entry["index"]]}} for entry in results]
    return {"object": "list", "model": model, "usage": _usage(pairs), "results": results}


def _pairs(engine: Engine, query: str, texts: list[str], field: str) -> list[list[int]]:
    """Return the tokens of each text with the query."""
    pairs, most = Pairs(engine.model), longest_text(engine.model)
    found: list[list[int]] = []
    for number, text in enumerate(texts):
        try:
            found.append(pairs.tokens(query, text, most))
        except PromptTooLong as error:
            place = f"{field}[{number}]"
            message = f"{place}: with the query it is longer than the {most} tokens that the model reads at once"
            raise ApiError(400, message, code="context_length_exceeded", param=place) from error
    return found


def _encoded(vector: NDArray[np.float32], body: EmbeddingBody) -> Any:
    """Return the vector as the body requests it. A shortened vector is scaled to length 1 again."""
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        length = float(np.linalg.norm(vector))
        vector = vector / np.float32(length) if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
