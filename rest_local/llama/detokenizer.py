"""Tokens to text as they come: a character is given out when its last byte is there.

Knows nothing about models: it needs a function from token id to bytes. The texts fed and the finishing one concatenate
to exactly `b"".join(pieces).decode("utf-8", "replace")`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental UTF-8 over the pieces of tokens; keeps at most three bytes back.

    `piece`: token id to bytes, for instance `Vocabulary.piece`."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that the token completes; empty inside a character. U+FFFD only for bytes that nothing can save."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character cut off, else nothing. The next `feed` starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
