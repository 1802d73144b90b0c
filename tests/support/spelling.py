"""The tokens that spell a text, and a constraint that goes its own way from where another one is."""

from __future__ import annotations

import copy

from rest_local.grammar.constraint import Constraint
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


def twin_of(constraint: Constraint) -> Constraint:
    """In the same state, without looking ahead; what becomes of one leaves the other."""
    twin = copy.copy(constraint)
    twin._forced = None
    twin._matcher = constraint._matcher and constraint._matcher.deep_copy()
    return twin
