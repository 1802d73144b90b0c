"""Constraints: forbidden end tokens, banned tokens, grammars, clones."""

import json

import numpy as np
import pytest
from support.spelling import tokens_of, twin_of

from rest_local.errors import GenerationError
from rest_local.grammar import gbnf, json_schema, lark
from rest_local.grammar.constraint import Constraint
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary

DIGITS = gbnf('root ::= [0-9]+ "."')
SHORT = gbnf('root ::= "7"')
WORDS = gbnf("root ::= [a-z0-9]*")


def _one(vocabulary: Vocabulary, text: str) -> int:
    (token,) = vocabulary.tokenize(text).tolist()
    return int(token)


def _end_first(vocabulary: Vocabulary, *then: int) -> np.ndarray:
    """Return logits with end tokens first, then the given tokens."""
    row = np.full(vocabulary.size, -20.0, np.float32)
    row[vocabulary.ends] = 30.0
    row[list(then)] = 10.0 - np.arange(len(then))
    return row


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 0.1}, {"logit_bias": ((1, 0.5),)},
        {"grammar": WORDS}, {"grammar": WORDS, "temperature": 0.8, "seed": 1},
    ],
)  # fmt: skip
def test_no_end_token_before_the_minimum_length_and_one_right_after(
    vocabulary: Vocabulary, options: dict[str, object]
) -> None:
    row = _end_first(vocabulary, _one(vocabulary, "7"), _one(vocabulary, "8"))
    with Sampler(vocabulary, Sampling(**options), min_tokens=5) as sampler:  # type: ignore[arg-type]
        for _ in range(5):
            token = sampler.sample(row)
            assert not vocabulary.is_end(token)
            assert sampler.constraint.allows(token)
            sampler.accept(token)
        assert vocabulary.is_end(sampler.sample(row))
    with Sampler(vocabulary, Sampling(**options), ignore_end=True) as sampler:  # type: ignore[arg-type]
        for _ in range(20):
            token = sampler.sample(row)
            assert not vocabulary.is_end(token)
            sampler.accept(token)


def test_the_best_token_except_ends_is_chosen_and_the_row_is_unchanged(vocabulary: Vocabulary) -> None:
    row = _end_first(vocabulary, 9, 8)
    before = row.copy()
    row.flags.writeable = False
    with Sampler(vocabulary, Sampling(), min_tokens=1) as sampler:
        assert sampler.sample(row) == 9
    assert (row == before).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_allowed_where_a_grammar_is_complete(vocabulary: Vocabulary, temperature: float) -> None:
    seven = _one(vocabulary, "7")
    row = _end_first(vocabulary, seven)
    with Sampler(vocabulary, Sampling(temperature=temperature, grammar=SHORT), min_tokens=9) as sampler:
        assert sampler.sample(row) == seven
        sampler.accept(seven)
        end = sampler.sample(row)
        assert vocabulary.is_end(end)
        sampler.accept(end)


def test_forbidden_ends_do_not_shift_the_draws(vocabulary: Vocabulary) -> None:
    """Every position draws one random number, whether an end token is forbidden or not."""
    rows = (np.random.default_rng(1).standard_normal((30, vocabulary.size))).astype(np.float32)
    rows[:, vocabulary.ends] = -np.inf
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=5)) as free:
        expected = [free.sample(row) for row in rows]
    rows[::3, vocabulary.ends] = 40.0
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=5), ignore_end=True) as held:
        assert [held.sample(row) for row in rows] == expected


def test_the_longest_allowed_prefix_is_that_of_token_by_token_checks(vocabulary: Vocabulary) -> None:
    """Naive oracle: token by token, ends, banned and foreign ids included."""
    seven, stop, end = _one(vocabulary, "7"), _one(vocabulary, "."), int(vocabulary.ends[0])
    banned = _one(vocabulary, "8")
    rng = np.random.default_rng(0)
    constraint = Constraint(vocabulary, DIGITS, min_tokens=3, banned=[banned])
    constraint.advance(seven)
    for _ in range(300):
        tokens = rng.choice([seven, seven, stop, end, banned, vocabulary.size], 6).tolist()
        if end in tokens:  # nothing follows an end
            tokens = tokens[: tokens.index(end) + 1]
        twin = twin_of(constraint)
        expected = next((n for n, token in enumerate(tokens) if not twin.follow(token)), len(tokens))
        assert constraint.longest(tokens) == expected, tokens


def test_a_refused_token_leaves_the_minimum_length(vocabulary: Vocabulary) -> None:
    seven, stop, end = _one(vocabulary, "7"), _one(vocabulary, "."), int(vocabulary.ends[0])
    constraint = Constraint(vocabulary, DIGITS, min_tokens=3)
    with pytest.raises(ValueError, match="not allowed"):
        constraint.advance(stop)
    for token in (seven, seven):
        constraint.advance(token)
        assert constraint.forbids_ends
    assert [constraint.follow(token) for token in (end, stop, seven)] == [False, True, False]
    assert constraint.allows(end)


def test_a_grammar_that_asks_for_too_much_work_ends_the_answer(vocabulary: Vocabulary) -> None:
    """2 000 alternatives at once, which begin only after the first character."""
    ways = " | ".join(f'"x{number}" r' for number in range(2000))
    grammar = lark(f'start: "<" r\nr: {ways} | "."')
    constraint = Constraint(vocabulary, grammar)
    for step in (lambda: constraint.advance(_one(vocabulary, "<")), constraint.allowed):
        with pytest.raises(GenerationError, match="cannot be followed further"):
            step()


# ---- Real vocabularies ---------------------------------------------------------------------------------------------


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
