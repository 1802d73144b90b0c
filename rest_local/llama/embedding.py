"""Compute a vector for a whole text, and the score of a document for a query.

The model's file names how the vectors of tokens become one. `Embedder` is for models whose result is a vector, `Ranker`
for those whose classification head turns it into scores. Both have a separate context, because a llama.cpp context
computes either logits or pooled vectors.
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
from rest_local.llama.vocabulary import Vocabulary

MAX_CONTEXT = 8192
RANK = 4
_POOLINGS = {1: "mean", 2: "cls", 3: "last", RANK: "rank"}  # enum llama_pooling_type


def pooling_of(model: Model) -> str | None:
    """Return how the file pools vectors of tokens: `mean`, `cls`, `last`, `rank`, or None if it does not say."""
    key = f"{model.metadata.get('general.architecture', '')}.pooling_type"
    given = [each.value for each in model.options.override_kv if each.key == key]
    found = given[-1] if given else model.metadata.get(key, "")
    return _POOLINGS.get(int(found)) if re.fullmatch(r"\d{1,9}", str(found)) else None


def pooling(model: Model) -> str | None:
    """Return the `pooling_of` a model of embeddings, or None for another model."""
    found = pooling_of(model)
    return None if found == "rank" else found


def longest_text(model: Model) -> int:
    """Return the tokens of the longest text that `Embedder` and `Ranker` take."""
    return min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)


class Pooled:
    """A context that gives `size` numbers for a text, for one thread. Close it before the model. Raises ModelError."""

    def __init__(self, model: Model, size: int) -> None:
        self.n_ctx, self.size = longest_text(model), size
        params = llama_cpp.llama_context_default_params()
        # Most of these models have bidirectional attention, so a text has to be one batch.
        set_fields(params, n_ctx=self.n_ctx, n_batch=self.n_ctx, n_ubatch=self.n_ctx, embeddings=True)
        set_fields(params, n_threads=default_threads(), n_threads_batch=default_threads())
        self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(f"model {model.path}: no context for embeddings of {self.n_ctx} tokens; memory is short")
        self._memory = llama_cpp.llama_get_memory(self._pointer)

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the numbers of a text, float32 [size]. Raises PromptEmpty, PromptTooLong, ModelError."""
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
        return np.array(floats.contents, np.float32)

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            llama_cpp.llama_free(pointer)


class Embedder(Pooled):
    """A context for embeddings. Raises ModelError also if the model has no pooling method."""

    def __init__(self, model: Model) -> None:
        if pooling(model) is None:
            raise ModelError(f"model {model.path}: has no embeddings; use a model that was trained for them")
        super().__init__(model, model.n_embd)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the vector of a text, float32 [size], of length 1. Raises PromptEmpty, PromptTooLong, ModelError."""
        found = self.evaluate(tokens)
        length = float(np.linalg.norm(found))
        return found / np.float32(length) if length else found


class Ranker(Pooled):
    """A context for the relevance of documents to a query. Raises ModelError also if the model has no head for that."""

    def __init__(self, model: Model) -> None:
        if pooling_of(model) != "rank":
            raise ModelError(f"model {model.path}: cannot rerank; use a model that was trained for it")
        super().__init__(model, int(bindings.llama_model_n_cls_out(model.pointer)))

    def score(self, tokens: Sequence[int]) -> float:
        """Return the head's first output for a pair (`pair_tokens`). Higher is more relevant. Raises as `evaluate`."""
        return float(self.evaluate(tokens)[0])


_GAPS = re.compile(r"\{(query|document)\}")


class Pairs:
    """A maker of the tokens of a query and a document, as in llama-server: with the file's template for that
    (`tokenizer.chat_template.rerank`), else as two texts with the vocabulary's marks between them. Special tokens that
    a text spells count only with a template, which spells some itself.
    """

    def __init__(self, model: Model) -> None:
        self._vocabulary = model.vocabulary
        template = bindings.llama_model_chat_template(model.pointer, b"rerank")
        self._template: str | None = template.decode("utf-8", "replace") if template else None

    def tokens(self, query: str, document: str, most: int) -> list[int]:
        """Return the tokens. Raises PromptTooLong if there are more than `most`; their number is then an estimate."""
        texts = {"query": query, "document": document}
        if self._template is not None:
            text = _GAPS.sub(lambda gap: texts[gap[1]], self._template)
            found: list[int] = self._vocabulary.tokenize(text, special=True, most=most).tolist()
        else:
            parts = [self._vocabulary.tokenize(text, most=most).tolist() for text in texts.values()]
            found = _marked(self._vocabulary, *parts)
        if len(found) > most:
            raise PromptTooLong(len(found), most, estimated=True)
        return found


def _marked(vocabulary: Vocabulary, query: list[int], document: list[int]) -> list[int]:
    """Return [BOS] query [EOS] [SEP] document [EOS], with the marks that the vocabulary adds."""
    end = vocabulary.ids.eos if vocabulary.ids.eos is not None else vocabulary.ids.sep
    ends = [end] if vocabulary.ids.add_eos and end is not None else []
    begin = [vocabulary.ids.bos] if vocabulary.ids.add_bos and vocabulary.ids.bos is not None else []
    between = [vocabulary.ids.sep] if vocabulary.ids.add_sep and vocabulary.ids.sep is not None else []
    return [*begin, *query, *ends, *between, *document, *ends]
