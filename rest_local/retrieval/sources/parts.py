"""The tokens of a text, also of one that a chat template wrote."""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np

from rest_local.retrieval.documents import Text
from rest_local.retrieval.rows import Int32Array

_SURROGATES = re.compile("[\ud800-\udfff]")


class TokenizeParts(Protocol):
    """A tokenizer. special: spellings of special tokens become special tokens; asked for only for texts with parts."""

    def __call__(self, text: str, /, *, special: bool = ...) -> Int32Array: ...


def tokens_of(text: Text, tokenize: TokenizeParts) -> Int32Array:
    """The token ids of a text that was read: int32 [n]. Lone surrogates, which JSON or file names may contain, become
    U+FFFD, because UTF-8 cannot encode them.
    """
    if not text.parts:
        return tokenize(encodable(text.text or ""))
    parts = [(encodable(part), special) for part, special in text.parts]
    return np.concatenate([tokenize(part, special=True) if special else tokenize(part) for part, special in parts])


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text
