"""Which tokens may come next: by a grammar, by the minimum length, by bans. Used by the sampler and to prune drafts.

Contract: `allows`, `allowed`, `longest` and `forced` only look, `advance` changes the state, a clone is independent.
Knows nothing about logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import GenerationError
from rest_local.grammar.compiler import Tokens, readable
from rest_local.grammar.forced import Forced, ForcedText
from rest_local.grammar.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher


class VocabularyLike(Protocol):
    """What is read of `rest_local.llama.vocabulary.Vocabulary`."""

    @property
    def size(self) -> int: ...
    @property
    def ends(self) -> NDArray[np.int32]: ...
    def is_end(self, token: int) -> bool: ...
    def grammar_tokens(self) -> Tokens: ...


class Constraint:
    """The state of one generation, from its first token on. Not thread-safe.

    min_tokens   end tokens are forbidden until this many tokens are generated
    ignore_end   end tokens are always forbidden
    banned       token ids that are never allowed, because their logit bias is minus infinity

    Where the grammar allows nothing but an end token, that is allowed in any case.

    Measured with 152 000 tokens and a schema of 30 properties, one core of a Zen 4: a mask 18 us in the median and
    165 us at most, its ids another 23 us, one step 2 us, 16 tokens of a draft 38 us, a clone 0.3 ms."""

    def __init__(
        self,
        vocabulary: VocabularyLike,
        grammar: Grammar | None = None,
        *,
        min_tokens: int = 0,
        ignore_end: bool = False,
        banned: Collection[int] = (),
    ) -> None:
        """Raises OptionError for a grammar that cannot be compiled for this vocabulary."""
        self.vocabulary = vocabulary
        self.ignore_end, self.min_tokens = ignore_end, min_tokens
        self._banned = frozenset(banned)
        self._accepted = 0
        self._matcher: LLMatcher | None = None
        self._forced: Forced | None = None
        if grammar is not None:
            tokens = vocabulary.grammar_tokens()
            self._matcher = tokens.matcher(grammar.compiled_text)
            self._forced = Forced(tokens.matcher(grammar.compiled_text, ahead=True), tokens)

    @property
    def forbids_ends(self) -> bool:
        """Whether end tokens are forbidden now."""
        return self._forbids_ends_after(0)

    def _forbids_ends_after(self, n: int) -> bool:
        return self.ignore_end or self._accepted + n < self.min_tokens

    @property
    def is_free(self) -> bool:
        """Whether nothing is forbidden from here on."""
        return self._matcher is None and not self._banned and not self.forbids_ends

    def allows(self, token: int) -> bool:
        """Whether the token may come next; False for an id outside the vocabulary."""
        return self.longest([token]) == 1

    def longest(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow in a row."""
        allowed = next((n for n, token in enumerate(tokens) if not self._may(token, n)), len(tokens))
        if self._matcher is None or not allowed:
            return allowed
        if self._matcher.is_stopped():  # the text is complete; llguidance then expects no end token
            return int(self.vocabulary.is_end(tokens[0]))
        return int(self._matcher.validate_tokens(list(tokens[:allowed])))

    def _may(self, token: int, n: int) -> bool:
        """Whether the token is allowed n tokens from here, the grammar aside."""
        if not 0 <= token < self.vocabulary.size or token in self._banned:
            return False
        return not (self._forbids_ends_after(n) and self.vocabulary.is_end(token))

    def allowed(self) -> NDArray[np.int32] | None:
        """The token ids that may come next, ascending, int32; None for all. The sampler applies logit biases.

        Raises GenerationError where the grammar allows no token or needs too much work."""
        if self._matcher is None and not self.forbids_ends:
            return None
        if self._matcher is None:
            allowed = np.ones(self.vocabulary.size, bool)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            allowed = np.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(bool)
        if self.forbids_ends:
            ends = allowed[self.vocabulary.ends]
            allowed[self.vocabulary.ends] = False
            if not allowed.any():  # the text is complete: only an end can follow
                allowed[self.vocabulary.ends] = ends
        ids = np.flatnonzero(allowed).astype(np.int32)
        if not len(ids):
            raise GenerationError("the grammar allows no token of this vocabulary here; change the grammar")
        return ids

    def advance(self, token: int) -> None:
        """Add a token to the text. Raises ValueError for a token that the grammar forbids, and leaves the state as it
        was; GenerationError where the grammar needs too much work."""
        matcher = self._matcher
        complete = matcher is None or (matcher.is_stopped() and self.vocabulary.is_end(token))
        if matcher is not None and not complete and matcher.try_consume_tokens([token]) != 1:
            self._check()
            raise ValueError(f"token {token} is not allowed by the grammar here")
        self._accepted += 1
        if self._forced is not None:
            self._forced.extend(token)

    def forced(self, most: int, path: Sequence[int] = ()) -> ForcedText | None:
        """Text for about `most` tokens that the grammar is likely to allow in no other way, after the tokens of `path`.

        0.15 ms where there is some, 0.02 ms elsewhere (152 000 tokens, one core of a Zen 4)."""
        return None if self._forced is None else self._forced.draft(most, path)

    def _check(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            cause = readable(self._matcher.get_error())
            raise GenerationError(f"the grammar cannot be followed further: {cause}; simplify it")

    def follow(self, token: int) -> bool:
        """Add a token if it is allowed; False, and the state is unchanged, if it is not."""
        if not self.allows(token):
            return False
        self.advance(token)
        return True

    def clone(self) -> Constraint:
        twin = Constraint(self.vocabulary, min_tokens=self.min_tokens, ignore_end=self.ignore_end, banned=self._banned)
        twin._accepted = self._accepted
        twin._matcher = None if self._matcher is None else self._matcher.deep_copy()
        twin._forced = None if self._forced is None else self._forced.clone()
        return twin

    def reset(self) -> None:
        self._accepted = 0
        if self._matcher is not None:
            self._matcher.reset()
        if self._forced is not None:
            self._forced.reset()
