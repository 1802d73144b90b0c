"""Chooses the next token from a row of logits with llama.cpp's samplers.

The order is that of llama-server: grammar, logit bias, penalties, top-k, top-p, min-p, temperature, draw. `sample`
chooses a token without side effects on the text; `accept` advances the penalties and the grammar. At temperature > 0
each `sample` draws exactly one number, even if only one candidate is left (llama.cpp would then draw none). So the n-th
generated token always gets the n-th number of the seed, with and without drafts.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import GenerationError, OptionError
from rest_local.grammar.constraint import Constraint
from rest_local.llama.loaded import bindings, llama_cpp
from rest_local.llama.options import MAX_SEED, Sampling
from rest_local.llama.vocabulary import Vocabulary
from rest_local.stop import Closing

__all__ = ["Sampler", "Sampling"]

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_ALL_TOKENS = 1 << 17  # used for repeat_last_n = -1; llama.cpp keeps a ring buffer of that many ids
_Native = Any  # llama_sampler_p


class Sampler(Closing):
    """The sampler of one generation over one vocabulary. A context manager. Not thread safe.

    `seed`: the seed in use, also if the options do not fix it. `constraint`: the tokens that are allowed next."""

    def __init__(
        self, vocabulary: Vocabulary, sampling: Sampling, *, min_tokens: int = 0, ignore_end: bool = False
    ) -> None:
        """`min_tokens`: no end token is chosen before so many tokens. `ignore_end`: an end token is chosen only if a
        grammar allows nothing else. Raises OptionError for a grammar that cannot be compiled for this vocabulary, and
        for a bias on a token outside it."""
        for token, _ in sampling.logit_bias:
            if token >= vocabulary.size:
                raise OptionError(f"logit_bias: token {token} is outside the vocabulary of {vocabulary.size} tokens")
        banned = [token for token, bias in sampling.logit_bias if bias == -math.inf]
        self.constraint = Constraint(
            vocabulary, sampling.grammar, min_tokens=min_tokens, ignore_end=ignore_end, banned=banned
        )
        self.vocabulary, self.sampling = vocabulary, sampling
        self.seed = secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed
        self._shape: _Native = None if sampling.is_greedy else _chain(vocabulary, sampling)
        self._dist: _Native = llama_cpp.llama_sampler_init_dist(self.seed) if sampling.temperature > 0 else None
        self._candidates = None if sampling.is_greedy else Candidates(vocabulary.size)
        self._closed = False
        self._picks_maximum = sampling.is_greedy and self.constraint.never_forbids
        self._only: int | None = None  # the token of the last `sample`, where it was the only one left

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The chosen token. `logits`: float32 [n_vocab], not changed. Accepts nothing.

        At temperature > 0 each call draws one number, so call it once for each generated token. At 150 k tokens it
        takes about 0.04 ms greedy, 0.2 ms with top-k, top-p or min-p, 0.8 ms with penalties. Raises GenerationError if
        the grammar allows no token or needs too much work."""
        if self._picks_maximum:
            self._only = int(logits.argmax())
            return self._only
        self._check_open()
        if self._candidates is None or self._dist is None:
            greedy = self._candidates
            self._only = self._likeliest(logits) if greedy is None else self._sample_greedy(greedy, logits)
            return self._only
        self._only = None
        self._candidates.fill(logits, self.constraint.allowed())
        llama_cpp.llama_sampler_apply(self._shape, self._candidates.reference)
        llama_cpp.llama_sampler_apply(self._dist, self._candidates.reference)  # draws a number for one candidate, too
        return self._candidates.selected

    def _likeliest(self, logits: NDArray[np.float32]) -> int:
        """The likeliest token. Copies the row only if that is an end token which is not allowed yet."""
        token = int(logits.argmax())
        if not self.constraint.forbids_ends or not self.vocabulary.is_end(token):
            return token
        without_ends = logits.copy()
        without_ends[self.vocabulary.ends] = -np.inf
        return int(without_ends.argmax())

    def _sample_greedy(self, candidates: Candidates, logits: NDArray[np.float32]) -> int:
        """The best allowed token. Bias and penalties change each logit on its own, so if the best token of all is
        allowed, it is the best allowed one. Only otherwise the whole mask is computed."""
        candidates.fill(logits)
        llama_cpp.llama_sampler_apply(self._shape, candidates.reference)
        token = candidates.selected
        if self.constraint.allows(token):
            return token
        candidates.fill(logits, self.constraint.allowed())
        llama_cpp.llama_sampler_apply(self._shape, candidates.reference)
        return candidates.selected

    def remaining(self) -> list[tuple[int, float]]:
        """The tokens that the samplers of the last `sample` left to choose from, with their probabilities, likeliest
        first. Greedy samplers leave one.
        """
        self._check_open()
        if self._only is not None or self._candidates is None:
            return [] if self._only is None else [(self._only, 1.0)]
        left = self._candidates.left()
        weights = np.exp(left["logit"] - left["logit"].max(), dtype=np.float64)
        order = np.lexsort((left["id"], -weights))
        return [(int(left["id"][at]), float(weights[at] / weights.sum())) for at in order]

    def accept(self, token: int) -> None:
        """Add a token to the text: penalties and grammar advance. Call it once for each generated token, in order.

        Raises ValueError for a token that the grammar forbids or that is outside the vocabulary."""
        if self._picks_maximum and 0 <= token < self.vocabulary.size:
            return
        self._check_open()
        if not 0 <= token < self.vocabulary.size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocabulary.size} tokens")
        self.constraint.advance(token)
        if self._shape is not None:
            llama_cpp.llama_sampler_accept(self._shape, token)

    def observe(self, tokens: Iterable[int]) -> None:
        """Add the tokens of the prompt. They count for the penalties, as in llama-server, but not for the grammar."""
        self._check_open()
        if not self.sampling.penalizes:
            return
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._shape, int(token))

    def close(self) -> None:
        """Free llama.cpp's samplers. A second call does nothing."""
        for sampler in (self._shape, self._dist):
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)
        self._shape = self._dist = self._candidates = None
        self._closed, self._picks_maximum = True, False

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError("the sampler is closed; make a new one")


def _chain(vocabulary: Vocabulary, sampling: Sampling) -> _Native:
    """The samplers between the grammar and the draw, in llama-server's order, without those that are switched off."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())

    def add(make: Callable[..., _Native], *arguments: object) -> None:
        llama_cpp.llama_sampler_chain_add(chain, make(*arguments))

    if sampling.logit_bias:
        biases = (bindings.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias)
        add(llama_cpp.llama_sampler_init_logit_bias, vocabulary.size, len(biases), biases)
    if sampling.penalizes:
        last_n = _ALL_TOKENS if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        strengths = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        add(llama_cpp.llama_sampler_init_penalties, vocabulary.size, last_n, *strengths)
    if sampling.temperature == 0:
        add(llama_cpp.llama_sampler_init_greedy)
        return chain
    if sampling.top_k > 0:
        add(llama_cpp.llama_sampler_init_top_k, sampling.top_k)
    if sampling.top_p < 1:
        add(llama_cpp.llama_sampler_init_top_p, sampling.top_p, 0)
    if sampling.min_p > 0:
        add(llama_cpp.llama_sampler_init_min_p, sampling.min_p, 0)
    add(llama_cpp.llama_sampler_init_temp, sampling.temperature)
    return chain


class Candidates:
    """The tokens that llama.cpp's samplers choose from: a llama_token_data_array over one reused numpy buffer."""

    def __init__(self, size: int) -> None:
        self.rows = np.zeros(size, _CANDIDATE)
        self._ids = np.arange(size, dtype=np.int32)
        self._first = self.rows.ctypes.data_as(bindings.llama_token_data_p)
        self.array = bindings.llama_token_data_array(self._first, size, -1, False)
        self.reference = ctypes.byref(self.array)

    def fill(self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> None:
        """Set the candidates, all or `ids`, in order. Needed before each use: samplers reorder, shorten the array."""
        count = len(self.rows) if ids is None else len(ids)
        self.rows["id"][:count] = self._ids if ids is None else ids
        self.rows["logit"][:count] = logits if ids is None else logits[ids]
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._first, count, -1, False

    def left(self) -> NDArray[Any]:
        """The candidates that the samplers left, until the next use: `_CANDIDATE` [n]."""
        data = ctypes.cast(self.array.data, ctypes.POINTER(ctypes.c_char * (_CANDIDATE.itemsize * self.array.size)))
        return np.frombuffer(data.contents, _CANDIDATE)

    @property
    def selected(self) -> int:
        """The id of the selected candidate. Read through the array, because a sampler may have replaced the buffer."""
        return int(self.array.data[self.array.selected].id)
