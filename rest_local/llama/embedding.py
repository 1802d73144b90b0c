"""Compute a vector for a whole text.

The model's file names how the vectors of tokens become one. A llama.cpp context computes either logits or pooled
vectors, so `Embedder` has a context of its own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import ModelError, PromptEmpty, PromptTooLong
from rest_local.llama.cores import default_threads, release_team
from rest_local.llama.loaded import bindings, llama_cpp, set_fields
from rest_local.llama.model import Model

MAX_CONTEXT = 8192
_POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # enum llama_pooling_type, without ranking


def pooling(model: Model) -> str | None:
    """Return how the file pools vectors of tokens, `mean`, `cls` or `last`, or None for a model without embeddings."""
    key = f"{model.metadata.get('general.architecture', '')}.pooling_type"
    given = [each.value for each in model.options.override_kv if each.key == key]
    found = given[-1] if given else model.metadata.get(key, "")
    return _POOLINGS.get(int(found)) if re.fullmatch(r"\d{1,9}", str(found)) else None


def longest_text(model: Model) -> int:
    """Return the tokens of the longest text that `Embedder` takes."""
    return min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)


class Embedder:
    """A context for embeddings, for one thread. Close it before the model. Raises ModelError, also if the model has no
    pooling method.
    """

    def __init__(self, model: Model) -> None:
        if pooling(model) is None:
            raise ModelError(f"model {model.path}: has no embeddings; use a model that was trained for them")
        self.n_ctx, self.size = longest_text(model), model.n_embd
        params = llama_cpp.llama_context_default_params()
        # Most of these models have bidirectional attention, so a text has to be one batch.
        set_fields(params, n_ctx=self.n_ctx, n_batch=self.n_ctx, n_ubatch=self.n_ctx, embeddings=True)
        set_fields(params, n_threads=default_threads(), n_threads_batch=default_threads())
        self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(f"model {model.path}: no context for embeddings of {self.n_ctx} tokens; memory is short")
        self._memory = llama_cpp.llama_get_memory(self._pointer)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the vector of a text, float32 [size], of length 1. Raises PromptEmpty, PromptTooLong, ModelError."""
        if not len(tokens):
            raise PromptEmpty
        if len(tokens) > self.n_ctx:
            raise PromptTooLong(len(tokens), self.n_ctx)
        ids = np.asarray(tokens, np.int32)
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)
        address = ids.ctypes.data_as(bindings.llama_token_p)
        code = llama_cpp.llama_decode(self._pointer, llama_cpp.llama_batch_get_one(address, len(ids)))
        release_team()
        if code:
            raise ModelError(f"embeddings: llama_decode returned {code} for {len(ids)} tokens")
        found = llama_cpp.llama_get_embeddings_seq(self._pointer, 0)
        if not found:
            raise ModelError("embeddings: llama.cpp gave no result for the text")
        floats = ctypes.cast(found, ctypes.POINTER(ctypes.c_float * self.size))
        vector = np.array(floats.contents, np.float32)
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length else vector

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            llama_cpp.llama_free(pointer)
