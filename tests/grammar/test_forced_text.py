"""Text that a grammar forces: what it is, how it is split into tokens, and that looking ahead leaves no trace."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.spelling import tokens_of, twin_of

from rest_local.grammar import Grammar, gbnf, json_schema
from rest_local.grammar import constraint as forced
from rest_local.grammar.constraint import CERTAIN, CHARACTER, REPEATED, Constraint, ForcedText, Spacing
from rest_local.llama.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "open": {"type": "boolean"},
        "mode": {"enum": ["read", "write", "rewrite"]},
        "at": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])
SCHEMA["properties"]["at"]["required"] = ["x", "y"]
VALUE = {"name": "a b", "size": 12, "open": True, "mode": "read", "at": {"x": 1, "y": 20}, "tags": ["p", "q"]}
NO_SPACE = gbnf(
    'root ::= "{" pair ("," pair){3} "}"\n'
    'pair ::= "\\"key-" [ab] "\\":" ("true" | "false" | "null" | num)\n'
    "num ::= [0-9]{2}"
)
TEXTS = 'ab ,:{}[]"\\äö🦜\n'
POINTS = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda point: dict(zip("xy", point, strict=True)))
VALUES = st.tuples(
    st.text(TEXTS, max_size=9),
    st.integers(-999, 10**6),
    st.booleans(),
    st.sampled_from(["read", "write", "rewrite"]),
    POINTS,
    st.lists(st.text(TEXTS, max_size=5), min_size=2, max_size=2),
).map(lambda values: dict(zip(VALUE, values, strict=True)))
STYLES: list[dict[str, Any]] = [
    {}, {"separators": (",", ":")}, {"separators": (",", ": ")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"},
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of("demo")


def bytes_of(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Return one token for each byte."""
    known = vocabulary.grammar_tokens().of_byte
    return [known[byte] for byte in text]


def after(vocabulary: Vocabulary, grammar: Grammar, tokens: list[int], asked: bool = False) -> Constraint:
    """Walk along these tokens, and if `asked` ask at each of them what is forced."""
    constraint = Constraint(vocabulary, grammar)
    for token in tokens:
        if asked:
            constraint.forced(32)
        constraint.advance(token)
    return constraint


def drafted(constraint: Constraint, most: int = 32) -> bytes:
    found = constraint.forced(most)
    return found.text if found else b""


def the_only_way(vocabulary: Vocabulary, constraint: Constraint) -> bytes:
    """Return the bytes with which all allowed tokens begin, one at a time: the naive oracle."""
    twin, text = twin_of(constraint), b""
    while True:
        allowed = twin.allowed()
        assert allowed is not None
        if any(vocabulary.is_end(int(token)) for token in allowed):
            return text
        first = {vocabulary.piece(int(token))[:1] for token in allowed}
        if len(first) != 1:
            return text
        text += first.pop()
        twin.advance(bytes_of(vocabulary, text[-1:])[0])


def way(text: ForcedText, kinds: list[int] | None = None) -> list[int]:
    """Return the vocabulary's own tokens from place to place."""
    tokens, place = [], 0
    while found := text.at(place):
        tokens.append(found[0].token)
        if kinds is not None:
            kinds.append(found[0].kind)
        place = found[0].end
    return tokens


@few(15)
@given(choices=st.lists(st.sampled_from(["a", "b"]), min_size=4, max_size=4), data=st.data())
def test_without_white_space_it_is_what_an_oracle_finds(
    vocabulary: Vocabulary, choices: list[str], data: st.DataObject
) -> None:
    values = [data.draw(st.sampled_from(["true", "false", "null", "07", "35"])) for _ in choices]
    text = "{" + ",".join(f'"key-{a}":{v}' for a, v in zip(choices, values, strict=True)) + "}"
    constraint = Constraint(vocabulary, NO_SPACE)
    tokens = data.draw(st.sampled_from([tokens_of(vocabulary, text), bytes_of(vocabulary, text.encode())]))
    for token in tokens:
        expected = the_only_way(vocabulary, constraint)
        assert drafted(constraint) == expected
        assert text.encode().endswith(expected) or text.encode().count(expected)
        constraint.advance(token)
    assert constraint.forced(32) is None


@few(12)
@given(value=VALUES, style=st.sampled_from(STYLES), data=st.data())
def test_looking_ahead_leaves_no_trace(
    vocabulary: Vocabulary, value: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    """Masks and drafts are those of an answer that was never looked ahead in, whatever was drafted and not said."""
    tokens = tokens_of(vocabulary, json.dumps(value, ensure_ascii=False, **style))
    tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
    grammar = json_schema(SCHEMA)
    fresh, asked = after(vocabulary, grammar, tokens), after(vocabulary, grammar, tokens, asked=True)
    twin = Constraint(vocabulary, grammar)
    twin.forced(1)  # follows from the beginning, as a generation does
    for token in tokens:
        twin.advance(token)
    assert drafted(asked) == drafted(twin)
    assert drafted(asked) == drafted(asked)
    masks = fresh.allowed(), asked.allowed()
    assert masks[0] is not None
    assert masks[1] is not None
    assert masks[0].tolist() == masks[1].tolist()


@few(12)
@given(value=VALUES, style=st.sampled_from(STYLES), data=st.data())
def test_after_a_drafted_path_it_is_what_follows_once_that_was_said(
    vocabulary: Vocabulary, value: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    tokens = tokens_of(vocabulary, json.dumps(value, ensure_ascii=False, **style))
    end = data.draw(st.integers(1, len(tokens)))
    begin = data.draw(st.integers(0, end - 1))
    grammar = json_schema(SCHEMA)
    constraint = after(vocabulary, grammar, tokens[:begin], asked=True)
    before, found = drafted(constraint), constraint.forced(32, tokens[begin:end])
    said = after(vocabulary, grammar, tokens[:end], asked=True).forced(32)
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        assert found.text == said.text
        assert [found.at(place) for place in range(len(found) + 1)] == [said.at(p) for p in range(len(said) + 1)]
    for token in (vocabulary.size - 1, vocabulary.size, -1, *vocabulary.ends.tolist()):
        assert constraint.forced(32, [*tokens[begin:end], token]) is None
    assert drafted(constraint) == before


@few(12)
@given(value=VALUES, style=st.sampled_from(STYLES), data=st.data())
def test_what_is_drafted_is_allowed(
    any_vocabulary: Vocabulary, value: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    """Every way through a draft, the vocabulary's and by characters, spells its text and keeps to the grammar."""
    tokens = tokens_of(any_vocabulary, json.dumps(value, ensure_ascii=False, **style))
    tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
    constraint = after(any_vocabulary, json_schema(SCHEMA), tokens, asked=True)
    found = constraint.forced(32)
    if found is None:
        return
    place, said = 0, []
    while ways := found.at(place):
        chosen = data.draw(st.sampled_from(ways))
        assert any_vocabulary.piece(chosen.token) == found.text[place : chosen.end]
        place = chosen.end
        said.append(chosen.token)
    assert place == len(found)
    assert constraint.longest(said) == len(said)


def test_the_tokens_are_those_of_the_whole_text(any_vocabulary: Vocabulary) -> None:
    """A draft splits its text as the vocabulary splits the whole answer, but for its last token."""
    text = json.dumps(VALUE)
    tokens = tokens_of(any_vocabulary, text)
    constraint = Constraint(any_vocabulary, json_schema(SCHEMA))
    compared = 0
    for place, token in enumerate(tokens):
        found = constraint.forced(32)
        if found and text.encode()[len(b"".join(map(any_vocabulary.piece, tokens[:place]))) :].startswith(found.text):
            own = way(found)[:-1]
            assert own == tokens[place : place + len(own)]
            compared += len(own)
        constraint.advance(token)
    assert compared > len(tokens)  # drafts overlap


def test_text_that_ends_the_answer_has_no_token_that_could_merge(vocabulary: Vocabulary) -> None:
    grammar = gbnf('root ::= [0-9] "; done."')
    kinds: list[int] = []
    found = after(vocabulary, grammar, tokens_of(vocabulary, "7")).forced(32)
    assert found is not None
    way(found, kinds)
    assert found.text == b"; done."
    assert set(kinds) == {CERTAIN}


def test_an_answer_that_splits_its_text_otherwise_is_followed(vocabulary: Vocabulary) -> None:
    """A key of one token that was begun with its first letter: the rest is a split of its own, until both meet."""
    assert len(tokens_of(vocabulary, "name")) == 1
    start = bytes_of(vocabulary, b'{"n')
    found = after(vocabulary, json_schema(SCHEMA), start, asked=True).forced(32)
    assert found is not None
    assert found.text.startswith(b'ame": ')
    assert all(each.apart for each in found.at(0))
    assert not any(each.apart for each in found.at(3))
    character = next(each for each in found.at(0) if each.kind == CHARACTER)
    assert vocabulary.piece(character.token) == b"a"
    assert character.end == 1
    assert found.at(1)[0].apart
    below = after(vocabulary, json_schema(SCHEMA), start[:1], asked=True).forced(32, start[1:])
    assert below is not None
    assert below.text == found.text
    assert [below.at(place) for place in range(4)] == [found.at(place) for place in range(4)]


def test_a_grammar_that_takes_too_long_is_not_drafted_from(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 ms a draft: the third is beyond what an answer may spend."""
    readings = iter(range(1000))
    monkeypatch.setattr(forced, "_clock", lambda: next(readings) * 0.011)
    constraint = Constraint(vocabulary, json_schema(SCHEMA))
    assert [constraint.forced(32) is None for _ in range(5)] == [False, False, False, True, True]


def test_looking_ahead_as_far_as_a_text_of_100_kB_ends_no_answer(vocabulary: Vocabulary) -> None:
    """It uses up the states of a lexer: not of the one that the answer follows."""
    text = json.dumps("x y" * 33_333)
    constraint = Constraint(vocabulary, json_schema({"const": json.loads(text)}))
    for token in tokens_of(vocabulary, text[:300]):
        constraint.forced(32)
        assert constraint.allows(token)
        constraint.advance(token)
    second = Constraint(vocabulary, json_schema({"const": json.loads(text)}))
    assert second.longest(tokens_of(vocabulary, text[:300])) > 100


@few(25)
@given(value=VALUES, style=st.sampled_from(STYLES))
def test_white_space_repeats_what_the_answer_wrote(value: dict[str, Any], style: dict[str, Any]) -> None:
    """A byte at a time over json.dumps: after the first member of each depth only brackets that close come as a
    surprise, and never a place of a kind that was seen."""
    text = json.dumps([value, value], **style).encode()
    spacing, wrong, surprises = Spacing(), 0, []
    place = 0
    while place < len(text):
        end = place
        while text[end : end + 1] in (b" ", b"\n", b"\t"):
            end += 1
        if not spacing._in_string:
            white, kind = spacing.expected(text[end])
            if white != text[place:end]:
                wrong += kind == REPEATED
                surprises.append(text[:end])
        if spacing._in_string:
            end = place
        spacing.feed(text[place : end + 1])
        place = end + 1
    assert wrong == 0
    assert len(surprises) <= 4, surprises
