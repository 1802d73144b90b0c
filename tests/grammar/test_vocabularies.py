"""One grammar with several real vocabularies: BPE, SentencePiece with byte tokens, the demo model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rest_local.grammar import json_schema
from rest_local.grammar.constraint import Constraint
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model

VALUE = {"name": "naïve 日本 🦜\t", "n": -12.5e3, "tags": ["a", ""], "deep": {"x": None}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object"},
    },
    "required": ["name", "n", "tags", "deep"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module",
    params=["demo", "ggml-vocab-qwen2.gguf", "ggml-vocab-llama-bpe.gguf", "ggml-vocab-llama-spm.gguf"],
)
def vocabulary(request: pytest.FixtureRequest, shared_data: Callable[[str], Path]) -> Iterator[Vocabulary]:
    path = demo_model() if request.param == "demo" else shared_data(request.param)
    with Model.open(path, vocab_only=True) as model:
        yield model.vocabulary


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """Tokens whose pieces are exactly this text; SentencePiece would add a space in front."""
    tokens = vocabulary.tokenize("\n" + text).tolist()
    while b"".join(map(vocabulary.piece, tokens)) != text.encode():
        first = vocabulary.piece(tokens.pop(0))
        assert not first.strip(), first
    return [int(token) for token in tokens]


def test_a_value_is_followed_to_its_end_and_every_mask_holds_the_next_token(vocabulary: Vocabulary) -> None:
    constraint = Constraint(vocabulary, json_schema(SCHEMA))
    tokens = tokens_of(vocabulary, json.dumps(VALUE, ensure_ascii=False))
    assert constraint.longest(tokens) == len(tokens)
    for token in tokens:
        allowed = constraint.allowed()
        assert allowed is not None
        assert token in allowed
        assert not np.isin(vocabulary.ends, allowed).any()
        constraint.advance(token)
    allowed = constraint.allowed()
    assert allowed is not None
    assert sorted(allowed.tolist()) == sorted(vocabulary.ends.tolist())


def test_the_mask_agrees_with_a_check_of_each_token(vocabulary: Vocabulary) -> None:
    """Naive oracle: every token of the vocabulary by itself, at the beginning and inside a text."""
    constraint = Constraint(vocabulary, json_schema(SCHEMA))
    for part in ("", '{"name": "a'):
        twin = constraint.clone()
        for token in tokens_of(vocabulary, part) if part else ():
            twin.advance(token)
        allowed = twin.allowed()
        assert allowed is not None
        assert allowed.tolist() == [token for token in range(vocabulary.size) if twin.allows(token)]


def test_a_string_allows_no_special_token_and_no_line_feed(vocabulary: Vocabulary) -> None:
    constraint = Constraint(vocabulary, json_schema({"type": "string"}))
    (quote,) = tokens_of(vocabulary, '"')
    constraint.advance(quote)
    allowed = constraint.allowed()
    assert allowed is not None
    assert not any(vocabulary.is_control(int(token)) for token in allowed)
    assert not any(b"\n" in vocabulary.piece(int(token)) for token in allowed)
