"""A vocabulary as llguidance sees it, and the grammars that were compiled for it.

Contract: `matcher` gives each answer a state of its own. Compiling runs in a thread with a large stack and without the
GIL: requests that decode meanwhile go on. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar
from rest_local.grammar.trial import STACK_BYTES, limits, on_large_stack, readable

_KEPT = 16  # compiled grammars: a client sends the same schema or tools again and again
_SPECIAL = b"\xff"  # llguidance's mark of a token that is no text


class _Pieces:
    """What llguidance's `TokenizerWrapper` asks for."""

    def __init__(self, tokens: list[bytes], end: int, encode: Callable[[str | bytes], Sequence[int]]) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, end, None
        self.special_token_ids: list[int] = []
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text))


class Tokens:
    """Of one vocabulary. At 152 000 tokens 0.4 s, for which llguidance holds the GIL: make it before the first request.

    `pieces`: the bytes of each token. `special`: tokens that no text matches, only their name in a grammar does; those
    that end a generation are among them. `ends`: any of these is allowed where the text is complete."""

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
            marked.append(_SPECIAL + b"<end>")  # llguidance needs one; no token of the model is it
        known = list(ends) or [len(pieces)]
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(marked, known[0], encode)), eos_token=known)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """The beginning of a text. 0.02 ms for a grammar compiled before, else 3 ms for a schema of 30 properties.

        Raises OptionError for a grammar that cannot be compiled for this vocabulary: it names a special token that does
        not exist, or none of its tokens begins a text of the language."""
        text = grammar.compiled_text
        with self._lock:  # one is compiled at a time: the other cores decode
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
