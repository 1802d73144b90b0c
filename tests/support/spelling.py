"""The tokens that spell a text."""

from __future__ import annotations

from rest_local.llama.vocabulary import Vocabulary


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """The vocabulary's tokens of a text that begins a line: their pieces are exactly this text. SentencePiece would add
    a space in front.
    """
    tokens = vocabulary.tokenize("\n" + text).tolist()
    while b"".join(map(vocabulary.piece, tokens)) != text.encode():
        first = vocabulary.piece(tokens.pop(0))
        assert not first.strip(), first
    return [int(token) for token in tokens]
