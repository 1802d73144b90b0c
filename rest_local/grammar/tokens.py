"""A vocabulary for llguidance, and the grammars that were compiled for it.

Contract: `matcher` gives each answer a state of its own. Compiling runs in a thread with a large stack and without the
GIL, so that other requests go on. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar
from rest_local.grammar.trial import STACK_BYTES, limits, on_large_stack, readable

_KEPT = 16  # compiled grammars; clients send the same schema or tools with every request
_SPECIAL = b"\xff"  # the first byte of tokens that are not text, for llguidance


class _Pieces:
    """The interface that llguidance's `TokenizerWrapper` expects."""

    def __init__(self, tokens: list[bytes], end: int, encode: Callable[[str | bytes], Sequence[int]]) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, end, None
        self.special_token_ids: list[int] = []
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text))


class Tokens:
    """The tokens of one vocabulary.

    pieces    the bytes of each token
    special   tokens that match only their name in a grammar, never text
    ends      tokens of which each is allowed where the text is complete; they count as special
    encode    text to token ids

    With 152 000 tokens this takes 0.4 s, in which llguidance holds the GIL: construct it before the first request.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: Collection[int],
        ends: Sequence[int],
        encode: Callable[[str | bytes], Sequence[int]],
    ) -> None:
        hidden = {*special, *ends}
        marked = [_SPECIAL + piece if token in hidden else piece for token, piece in enumerate(pieces)]
        if not ends:
            marked.append(_SPECIAL + b"<end>")  # llguidance requires one; the model never generates it
        known = list(ends) or [len(pieces)]
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(marked, known[0], encode)), eos_token=known)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """The state at the beginning of a text. Costs 0.02 ms for a grammar that was compiled before, 3 ms for a new
        schema of 30 properties.

        Raises OptionError for a grammar that cannot be compiled for this vocabulary: it names a special token that does
        not exist, or no token begins a text of its language.
        """
        text = grammar.compiled_text
        with self._lock:  # compile one grammar at a time, so that the other cores decode
            if text not in self._compiled:
                self._compiled[text] = on_large_stack(lambda: self._compile(text), 2 * STACK_BYTES)
            self._compiled.move_to_end(text)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[text].deep_copy()

    def _compile(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise OptionError(f"grammar: {readable(matcher.get_error())}")
        return matcher
