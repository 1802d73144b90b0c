"""Embeddings of texts, in OpenAI's form: one vector of length 1 for each input."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rest_local.api.bodies import EmbeddingBody
from rest_local.api.errors import ApiError
from rest_local.api.requests import prompts_of
from rest_local.llama.embedding import pooling

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
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": model, "data": data, "usage": usage}


def _encoded(vector: NDArray[np.float32], body: EmbeddingBody) -> Any:
    """Return the vector as the body requests it. A shortened vector is scaled to length 1 again."""
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        length = float(np.linalg.norm(vector))
        vector = vector / np.float32(length) if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
