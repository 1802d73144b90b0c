"""Streams tokens as text: a character is returned when its last byte has arrived.

Knows nothing about models: it needs a function from token id to bytes. The results of all `feed` calls and of `finish`
concatenate to exactly `b"".join(pieces).decode("utf-8", "replace")`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Decodes the pieces of tokens as UTF-8, incrementally. Holds back at most three bytes.

    `piece`: token id to bytes, for instance `Vocabulary.piece`."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that the token completes; empty inside a character. U+FFFD only stands for invalid bytes."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character, else nothing. The next `feed` begins a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
