"""What may not be said next: by a grammar, before the least length, or ever. The sampler's and, ahead of it, drafts'.

Contract: `allows` looks, `follow` advances; a clone goes its own way, which is how a draft tree is compared with a
grammar branch by branch. Knows nothing about logits but how to forbid some of them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as bindings
from numpy.typing import NDArray

from rest_local.errors import GenerationError, OptionError
from rest_local.llama import library
from rest_local.llama.vocabulary import Vocabulary

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_Native = Any  # llama_sampler_p
SLOWEST_SECONDS = 2.0
"""Of one question about all tokens, or one step: a hundred times what ordinary grammars take. `grammar_guard` refuses
the slow ones it finds; this ends what it let pass, for the sake of those who share the engine."""
_clock = time.perf_counter


class Candidates:
    """A reused llama_token_data_array over one numpy buffer."""

    def __init__(self, size: int) -> None:
        self.rows = np.zeros(size, _CANDIDATE)
        self._ids = np.arange(size, dtype=np.int32)
        self._first = self.rows.ctypes.data_as(bindings.llama_token_data_p)
        self.array = bindings.llama_token_data_array(self._first, size, -1, False)
        self.reference = ctypes.byref(self.array)

    def fill(self, logits: NDArray[np.float32]) -> None:
        """All candidates in order of their ids; samplers reorder and shorten, so the whole array is set anew."""
        self.rows["id"] = self._ids
        self.rows["logit"] = logits
        self._rewind(len(self.rows))

    def fill_one(self, token: int) -> None:
        """A single candidate, to ask the grammar about it."""
        self.rows[0] = (token, 0.0, 0.0)
        self._rewind(1)

    def fill_dummies(self) -> None:
        """Two equal candidates, to draw a number for nothing."""
        self.rows[:2] = [(0, 0.0, 0.0), (1, 0.0, 0.0)]
        self._rewind(2)

    def _rewind(self, size: int) -> None:
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._first, size, -1, False

    @property
    def any_left(self) -> bool:
        """Whether a candidate is not forbidden."""
        return bool((self.rows["logit"] > -np.inf).any())

    @property
    def selected(self) -> int:
        """The id of the selected candidate. Read through the array: a sampler may have put another buffer there."""
        return int(self.array.data[self.array.selected].id)


class Constraint:
    """State of one generation, from its first token on. Not for several threads at once.

    `min_tokens`: no end token is allowed before as many tokens; `ignore_end`: never. Where the grammar allows nothing
    but an end, it is allowed all the same. `banned`: tokens that are never allowed (their biases forbid them)."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: str | None = None,
        *,
        min_tokens: int = 0,
        ignore_end: bool = False,
        banned: Collection[int] = (),
    ) -> None:
        """Raises OptionError for a grammar llama.cpp cannot read."""
        self.vocabulary = vocabulary
        self.ignore_end, self.min_tokens = ignore_end, min_tokens
        self._banned = frozenset(banned)
        self._accepted = 0
        self._closed = False
        self._grammar = None if grammar is None else _parsed(vocabulary, grammar)
        self._one = None if grammar is None else Candidates(1)

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    @property
    def holds_ends(self) -> bool:
        """Whether end tokens are forbidden now."""
        return self.ignore_end or self._accepted < self.min_tokens

    @property
    def is_free(self) -> bool:
        """Nothing is forbidden from here on."""
        return self._grammar is None and not self._banned and not self.holds_ends

    def allows(self, token: int) -> bool:
        """4 to 13 us with a grammar: llama.cpp is asked about this token only. False outside the vocabulary."""
        if not 0 <= token < self.vocabulary.size or token in self._banned:
            return False
        if self.holds_ends and self.vocabulary.is_end(token):
            return False
        return self.grammar_allows(token)

    def grammar_allows(self, token: int) -> bool:
        """By the grammar alone."""
        self._check_open()
        if self._one is None:
            return True
        self._one.fill_one(token)
        llama_cpp.llama_sampler_apply(self._grammar, self._one.reference)
        return bool(self._one.rows["logit"][0] > -np.inf)

    def follow(self, token: int) -> bool:
        """Advance by an allowed token; False, and nothing changed, for one that is not."""
        if not self.allows(token):
            return False
        self.advance(token)
        return True

    def advance(self, token: int) -> None:
        """The token was said. Only after the grammar was asked: llama.cpp ends the process on one it forbids."""
        self._check_open()
        self._accepted += 1
        if self._grammar is not None:
            begun = _clock()
            llama_cpp.llama_sampler_accept(self._grammar, token)
            _check_time(begun)

    def forbid(self, candidates: Candidates, logits: NDArray[np.float32]) -> None:
        """Fill all candidates with `logits`, -inf where a token is not allowed. Biases are left to the sampler.

        With a grammar up to 14 ms at 150 k tokens. Raises GenerationError where the grammar allows no token, or takes
        far too long to say."""
        self._check_open()
        candidates.fill(logits)
        begun = _clock()
        if self.holds_ends:
            candidates.rows["logit"][self.vocabulary.ends] = -np.inf
        if self._grammar is None:
            return
        llama_cpp.llama_sampler_apply(self._grammar, candidates.reference)
        if self.holds_ends and not candidates.any_left:  # the text is complete: only an end can follow
            candidates.fill(logits)
            llama_cpp.llama_sampler_apply(self._grammar, candidates.reference)
        _check_time(begun)
        if not candidates.any_left:
            raise GenerationError("the grammar allows no token of this vocabulary here; change the grammar")

    def clone(self) -> Constraint:
        """An independent one in the same state. Close it."""
        self._check_open()
        twin = Constraint(self.vocabulary, min_tokens=self.min_tokens, ignore_end=self.ignore_end, banned=self._banned)
        twin._accepted = self._accepted
        if self._grammar is not None:
            twin._grammar, twin._one = llama_cpp.llama_sampler_clone(self._grammar), Candidates(1)
        return twin

    def reset(self) -> None:
        """Back to the beginning."""
        self._check_open()
        self._accepted = 0
        if self._grammar is not None:
            llama_cpp.llama_sampler_reset(self._grammar)

    def close(self) -> None:
        """Frees llama.cpp's part; again does nothing."""
        if self._grammar is not None:
            llama_cpp.llama_sampler_free(self._grammar)
        self._grammar = self._one = None
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError("the sampler is closed; make a new one")


def _check_time(begun: float) -> None:
    if _clock() - begun > SLOWEST_SECONDS:
        raise GenerationError(
            f"the grammar took more than {SLOWEST_SECONDS:g} s for a token; write it so that the next character decides"
        )


def _parsed(vocabulary: Vocabulary, grammar: str) -> _Native:
    source = grammar.encode("utf-8", "replace")
    with library.log_lines.collected_errors() as errors, library.captured_stderr() as printed:
        native = llama_cpp.llama_sampler_init_grammar(vocabulary.pointer, source, b"root")
    if not native:
        cause = next(
            (line for line in [*printed, *errors] if line.strip()), "no rule `root`, or one that begins with itself"
        )
        raise OptionError(f"grammar: llama.cpp cannot read it: {cause.removeprefix('parse: ').strip()[:200]}")
    return native
