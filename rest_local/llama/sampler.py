"""Choose the next token from a row of logits with llama.cpp's samplers.

The grammar comes first, then llama-server's order: logit bias, the samplers in the order of `Sampling.samplers`, draw.
`sample` chooses a token without side effects on the text; `accept` advances the penalties, DRY and the grammar. At
temperature > 0 each `sample` draws exactly one number, even if only one candidate is left (llama.cpp would then draw
none). So the n-th generated token always gets the n-th number of the seed, with and without drafts. XTC, mirostat and
adaptive-p draw further numbers from the same seed, and keep their state in the same way: each token is sampled once, in
order, whether it was drafted or not.
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
from rest_local.llama.options import INFILL, MAX_SEED, Sampling
from rest_local.llama.vocabulary import Vocabulary
from rest_local.stop import Closing

__all__ = ["Sampler", "Sampling"]

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_ALL_TOKENS = 1 << 17  # replaces -1 in repeat_last_n and dry_penalty_last_n, which are sizes of ring buffers
_MIROSTAT_M = 100  # mirostat 1 estimates from so many likeliest tokens, as in llama-server
_Native = Any  # llama_sampler_p


class Sampler(Closing):
    """The sampler of one generation over one vocabulary. A context manager. Not thread-safe. `seed` is in use also if
    the options do not fix it. `constraint` has the tokens that are allowed next.
    """

    def __init__(
        self, vocabulary: Vocabulary, sampling: Sampling, *, min_tokens: int = 0, ignore_end: bool = False
    ) -> None:
        """Make the samplers. No end token is chosen before `min_tokens` tokens; with `ignore_end` one is chosen only if
        a grammar allows nothing else. Raises OptionError for a grammar that cannot be compiled for this vocabulary, and
        for a bias on a token outside it.
        """
        for token, _ in sampling.logit_bias:
            if token >= vocabulary.size:
                raise OptionError(f"logit_bias: token {token} is outside the vocabulary of {vocabulary.size} tokens")
        banned = [token for token, bias in sampling.logit_bias if bias == -math.inf]
        self.constraint = Constraint(
            vocabulary, sampling.grammar, min_tokens=min_tokens, ignore_end=ignore_end, banned=banned
        )
        self.vocabulary, self.sampling = vocabulary, sampling
        self.seed = secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed
        self._shape: _Native = None if sampling.is_greedy else _chain(vocabulary, sampling, self.seed)
        self._draw: _Native = None if sampling.picks_likeliest else _draw(vocabulary, sampling, self.seed)
        self._candidates = None if sampling.is_greedy else Candidates(vocabulary.size)
        self._closed = False
        self._picks_maximum = sampling.is_greedy and self.constraint.never_forbids

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token, without accepting it. `logits`, float32 [n_vocab], are not changed.

        At temperature > 0 each call draws one number, so call it once for each generated token. At 150 k tokens it
        takes about 0.04 ms greedy, 0.2 ms with top-k, top-p or min-p, 0.8 ms with penalties. Raises GenerationError if
        the grammar allows no token or needs too much work.
        """
        if self._picks_maximum:
            return int(logits.argmax())
        self._check_open()
        if self._candidates is None or self._draw is None:
            greedy = self._candidates
            return self._likeliest(logits) if greedy is None else self._sample_greedy(greedy, logits)
        self._candidates.fill(logits, self.constraint.allowed())
        llama_cpp.llama_sampler_apply(self._shape, self._candidates.reference)
        llama_cpp.llama_sampler_apply(self._draw, self._candidates.reference)  # draws a number for one candidate, too
        return self._candidates.selected

    def _likeliest(self, logits: NDArray[np.float32]) -> int:
        """Return the likeliest token. Copies the row only if that is an end token which is not allowed yet."""
        token = int(logits.argmax())
        if not self.constraint.forbids_ends or not self.vocabulary.is_end(token):
            return token
        without_ends = logits.copy()
        without_ends[self.vocabulary.ends] = -np.inf
        return int(without_ends.argmax())

    def _sample_greedy(self, candidates: Candidates, logits: NDArray[np.float32]) -> int:
        """Choose the best allowed token. Bias, penalties and DRY change each logit on its own, so if the best token of
        all is allowed, it is the best allowed one. The whole mask is computed only otherwise.
        """
        candidates.fill(logits)
        llama_cpp.llama_sampler_apply(self._shape, candidates.reference)
        token = candidates.selected
        if self.constraint.allows(token):
            return token
        candidates.fill(logits, self.constraint.allowed())
        llama_cpp.llama_sampler_apply(self._shape, candidates.reference)
        return candidates.selected

    def accept(self, token: int) -> None:
        """Add a token to the text: penalties and grammar advance. Call it once for each generated token, in order.
        Raises ValueError for a token that the grammar forbids or that is outside the vocabulary.
        """
        if self._picks_maximum and 0 <= token < self.vocabulary.size:
            return
        self._check_open()
        if not 0 <= token < self.vocabulary.size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocabulary.size} tokens")
        self.constraint.advance(token)
        for sampler in (self._shape, self._draw):
            if sampler is not None:
                llama_cpp.llama_sampler_accept(sampler, token)

    def observe(self, tokens: Iterable[int]) -> None:
        """Add the tokens of the prompt. They count for the penalties, as in llama-server, but not for the grammar."""
        self._check_open()
        if not self.sampling.penalizes:
            return
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._shape, int(token))

    def close(self) -> None:
        """Free llama.cpp's samplers. A second call does nothing."""
        for sampler in (self._shape, self._draw):
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)
        self._shape = self._draw = self._candidates = None
        self._closed, self._picks_maximum = True, False

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError("the sampler is closed; make a new one")


def _chain(vocabulary: Vocabulary, sampling: Sampling, seed: int) -> _Native:
    """Make the samplers between the grammar and the draw, in order, without those that are switched off. If nothing is
    drawn, the arg-max is the last one.
    """
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())

    def add(make: Callable[..., _Native], *arguments: object) -> None:
        llama_cpp.llama_sampler_chain_add(chain, make(*arguments))

    if sampling.logit_bias:
        biases = (bindings.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias)
        add(llama_cpp.llama_sampler_init_logit_bias, vocabulary.size, len(biases), biases)
    for name in sampling.samplers:
        if name == "penalties" and sampling.repeat_last_n:
            strengths = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            if strengths != (1.0, 0.0, 0.0):
                last_n = _all_for_negative(sampling.repeat_last_n)
                add(llama_cpp.llama_sampler_init_penalties, vocabulary.size, last_n, *strengths)
        elif name == "dry" and sampling.dry_multiplier:
            breakers = [text.encode("utf-8", "replace") for text in sampling.dry_sequence_breakers]
            pointers = (ctypes.c_char_p * len(breakers))(*breakers)
            last_n = _all_for_negative(sampling.dry_penalty_last_n)
            numbers = (sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, last_n)
            with vocabulary.lease.use() as pointer:
                add(llama_cpp.llama_sampler_init_dry, pointer, *numbers, pointers, len(breakers))
        elif sampling.picks_likeliest:
            continue  # the others never leave out the likeliest token
        elif name == "top_n_sigma" and sampling.top_n_sigma > 0:
            add(llama_cpp.llama_sampler_init_top_n_sigma, sampling.top_n_sigma)
        elif name == "top_k" and sampling.top_k > 0:
            add(llama_cpp.llama_sampler_init_top_k, sampling.top_k)
        elif name == "typ_p" and sampling.typical_p < 1:
            add(llama_cpp.llama_sampler_init_typical, sampling.typical_p, sampling.min_keep)
        elif name == "top_p" and sampling.top_p < 1:
            add(llama_cpp.llama_sampler_init_top_p, sampling.top_p, sampling.min_keep)
        elif name == "min_p" and sampling.min_p > 0:
            add(llama_cpp.llama_sampler_init_min_p, sampling.min_p, sampling.min_keep)
        elif name == "xtc" and sampling.xtc_probability > 0:
            strength = (sampling.xtc_probability, sampling.xtc_threshold)
            add(llama_cpp.llama_sampler_init_xtc, *strength, sampling.min_keep, seed)
        elif name == "temperature":
            heat = (sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent)
            add(llama_cpp.llama_sampler_init_temp_ext, *heat)
        elif name == INFILL:
            add(llama_cpp.llama_sampler_init_infill, vocabulary.pointer)
    if sampling.picks_likeliest:
        add(llama_cpp.llama_sampler_init_greedy)
    return chain


def _draw(vocabulary: Vocabulary, sampling: Sampling, seed: int) -> _Native:
    """Make the sampler that chooses among the tokens that the chain has left."""
    if sampling.mirostat == 1:
        numbers = (sampling.mirostat_tau, sampling.mirostat_eta, _MIROSTAT_M)
        return llama_cpp.llama_sampler_init_mirostat(vocabulary.size, seed, *numbers)
    if sampling.mirostat == 2:
        return llama_cpp.llama_sampler_init_mirostat_v2(seed, sampling.mirostat_tau, sampling.mirostat_eta)
    if sampling.adaptive_target >= 0:
        return llama_cpp.llama_sampler_init_adaptive_p(sampling.adaptive_target, sampling.adaptive_decay, seed)
    return llama_cpp.llama_sampler_init_dist(seed)


def _all_for_negative(last_n: int) -> int:
    return _ALL_TOKENS if last_n < 0 else last_n


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

    @property
    def selected(self) -> int:
        """Return the selected id. It is read through the array, because a sampler may have replaced the buffer."""
        return int(self.array.data[self.array.selected].id)
