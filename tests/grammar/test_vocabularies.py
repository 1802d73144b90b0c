"""One grammar with several real vocabularies: BPE, SentencePiece with byte tokens, the demo model's."""

from __future__ import annotations

import json

import numpy as np
from support.spelling import tokens_of, twin_of

from rest_local.grammar import json_schema
from rest_local.grammar.constraint import Constraint
from rest_local.llama.vocabulary import Vocabulary

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


def test_a_value_is_followed_to_its_end_and_every_mask_holds_the_next_token(any_vocabulary: Vocabulary) -> None:
    constraint = Constraint(any_vocabulary, json_schema(SCHEMA))
    tokens = tokens_of(any_vocabulary, json.dumps(VALUE, ensure_ascii=False))
    assert constraint.longest(tokens) == len(tokens)
    for token in tokens:
        allowed = constraint.allowed()
        assert allowed is not None
        assert token in allowed
        assert not np.isin(any_vocabulary.ends, allowed).any()
        constraint.advance(token)
    allowed = constraint.allowed()
    assert allowed is not None
    assert sorted(allowed.tolist()) == sorted(any_vocabulary.ends.tolist())


def test_the_mask_agrees_with_a_check_of_each_token(any_vocabulary: Vocabulary) -> None:
    """Naive oracle: every token of the any_vocabulary by itself, at the beginning and inside a text."""
    constraint = Constraint(any_vocabulary, json_schema(SCHEMA))
    for part in ("", '{"name": "a'):
        twin = twin_of(constraint)
        for token in tokens_of(any_vocabulary, part) if part else ():
            twin.advance(token)
        allowed = twin.allowed()
        assert allowed is not None
        assert allowed.tolist() == [token for token in range(any_vocabulary.size) if twin.allows(token)]
