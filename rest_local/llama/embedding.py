"""Embeddings: a vector for a text. Only for models whose file names a pooling method, which combines token vectors.

It has its own context, because a llama.cpp context computes either logits or pooled vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as bindings
from numpy.typing import NDArray

from rest_local.errors import ModelError, PromptEmpty, PromptTooLong
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model

MAX_CONTEXT = 8192
_POOLINGS = {"1": "mean", "2": "cls", "3": "last"}  # enum llama_pooling_type; 4 ranks pairs of texts


def pooling(model: Model) -> str | None:
    """The pooling method: `mean`, `cls` or `last`; None for a model without embeddings."""
    architecture = model.metadata.get("general.architecture", "")
    return _POOLINGS.get(model.metadata.get(f"{architecture}.pooling_type", ""))


class Embedder:
    """Computes embeddings. Close it before the model. Not thread safe. Raises ModelError if the model has no pooling
    method, or memory is short.
    """

    def __init__(self, model: Model) -> None:
        if pooling(model) is None:
            raise ModelError(f"model {model.path}: has no embeddings; use a model that was trained for them")
        self.n_ctx = min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)
        self.size = model.n_embd
        params = llama_cpp.llama_context_default_params()
        # Most of these models have bidirectional attention, so a text has to be one batch.
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_ctx
        params.n_threads = params.n_threads_batch = default_threads()
        params.embeddings = True
        self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(f"model {model.path}: no context for embeddings of {self.n_ctx} tokens; memory is short")
        self._memory = llama_cpp.llama_get_memory(self._pointer)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The vector of a text, float32 [size], of length 1. Raises PromptEmpty, PromptTooLong, ModelError."""
        if not len(tokens):
            raise PromptEmpty
        if len(tokens) > self.n_ctx:
            raise PromptTooLong(len(tokens), self.n_ctx)
        ids = np.asarray(tokens, np.int32)
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)
        address = ids.ctypes.data_as(bindings.llama_token_p)
        code = llama_cpp.llama_decode(self._pointer, llama_cpp.llama_batch_get_one(address, len(ids)))
        if code:
            raise ModelError(f"embeddings: llama_decode returned {code} for {len(ids)} tokens")
        vector = llama_cpp.llama_get_embeddings_seq(self._pointer, 0)
        floats = ctypes.cast(vector, ctypes.POINTER(ctypes.c_float * self.size))
        found = np.array(floats.contents, np.float32)
        length = float(np.linalg.norm(found))
        return found / np.float32(length) if length else found

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            llama_cpp.llama_free(pointer)
