"""JSON schemas as grammars: what comes out is valid, what is valid in order gets in, and hostile schemas are refused.

The oracle is a JSON schema validator that knows nothing of ours; the grammar is read by llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rest_local.errors import OptionError
from rest_local.llama.constraint import Constraint
from rest_local.llama.digits import integers
from rest_local.llama.grammar import Rules, json_object, json_schema, literal
from rest_local.llama.model import Model
from rest_local.llama.pattern import pattern_rule
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


def accepts(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    constraint = Constraint(vocabulary, grammar)
    try:
        end = int(vocabulary.ends[0])
        return all(constraint.follow(token) for token in vocabulary.tokenize(text).tolist()) and constraint.allows(end)
    finally:
        constraint.close()


def generated(vocabulary: Vocabulary, grammar: str, seed: int) -> str:
    """Random text in the language; quotes and brackets become likelier over fifty tokens, ends always, so it ends."""
    rng = np.random.default_rng(seed)
    halves = [i for i in range(vocabulary.size) if not _is_text(vocabulary.piece(i))]  # only where nothing else will do
    closing = [i for i in range(vocabulary.size) if vocabulary.piece(i) in (b'"', b"}", b"]", b"0", b"b", b"\\")]
    sampling = Sampling(grammar=grammar, temperature=1.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0)
    said = b""
    with Sampler(vocabulary, sampling) as sampler:
        for step in range(3000):
            row = rng.standard_normal(vocabulary.size).astype(np.float32)
            row[halves] -= 60
            row[closing] += 1 + step % 50 / 4
            row[vocabulary.ends] += 1 + step / 2
            token = sampler.sample(row)
            sampler.accept(token)
            if vocabulary.is_end(token):
                return said.decode()
            said += vocabulary.piece(token)
    raise AssertionError(f"no end: {said[:300]!r}")


def _is_text(piece: bytes) -> bool:
    return "\ufffd" not in piece.decode("utf-8", "replace")


NODE = {"$ref": "#/$defs/my_node"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "tool": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "a file"},
            "line": {"type": "integer", "minimum": 1, "maximum": 120},
            "mode": {"enum": ["r", "w", 'quo"te\\', None, 3]},
            "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        },
        "required": ["path", "mode"],
        "additionalProperties": False,
    },
    "recursive": {
        **NODE,
        "$defs": {"my_node": {"type": "object", "properties": {"v": {"type": "null"}, "next": NODE},
                             "required": ["v"]}},
    },
    "array": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 2, "maxItems": 4},
    "tuple": {"prefixItems": [{"const": 1}, {"type": "string"}], "items": {"type": "boolean"}, "minItems": 3},
    "union": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    "types and enum": {"type": ["string", "null"], "enum": ["a", None, 3]},
    "types and properties": {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "all of": {
        "allOf": [{"$ref": "#/definitions/a"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
        "definitions": {"a": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}},
    },
    "reference and description": {
        "properties": {"n": {"$ref": "#/$defs/n", "description": "d", "type": "integer"}},
        "required": ["n"],
        "$defs": {"n": {"type": "integer", "minimum": 5, "exclusiveMaximum": 8}},
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": -3, "maximum": 11}},
    "required without properties": {"type": "object", "required": ["here"]},
    "formats": {"prefixItems": [{"type": "string", "format": f} for f in ("date", "time", "date-time", "uuid")],
                "items": False, "minItems": 4},
    "pattern": {"type": "string", "pattern": r"^[A-Z]\d{2,4}(-(x|yz)+)?.?$"},
    "search": {"type": "string", "pattern": 'b"'},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "number": {"type": "number", "minimum": 0},
    "anything": {},
    "empty object": {"type": "object", "additionalProperties": False},
    "nullable": {"type": "string", "maxLength": 2},
    "bounds of draft 4": {"type": "integer", "exclusiveMinimum": 3.5, "maximum": 6.2},
    "empty array": {"type": "array", "maxItems": 0},
    "non-ASCII": {"properties": {"naïve ✓": {"const": "日本\n\t\u2028\x7f"}}, "required": ["naïve ✓"]},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_generated_is_valid(vocabulary: Vocabulary, name: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(SCHEMAS[name], validate_formats=True)
    grammar = json_schema(SCHEMAS[name])
    texts = [generated(vocabulary, grammar, seed) for seed in range(12)]
    for text in texts:
        validator.validate(json.loads(text))


SIMPLE = st.sampled_from(["string", "integer", "number", "boolean", "null"])
LEAVES = st.one_of(
    SIMPLE.map(lambda kind: {"type": kind}),
    st.just({}),
    st.lists(
        st.one_of(st.text(max_size=4), st.integers(-99, 99), st.booleans(), st.none()), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.tuples(st.integers(-300, 300), st.integers(0, 300)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[0] + ends[1]}
    ),
)


def _inner(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.text(max_size=4), inner, max_size=4)
    objects = st.tuples(properties, st.randoms()).map(
        lambda drawn: {
            "type": "object",
            "properties": drawn[0],
            "required": [name for name in drawn[0] if drawn[1].random() < 0.5],
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(LEAVES, _inner, max_leaves=6), st.integers(0, 2**31))
def test_what_any_schema_generates_is_valid(vocabulary: Vocabulary, schema: dict[str, Any], seed: int) -> None:
    text = generated(vocabulary, json_schema(schema), seed)
    jsonschema_rs.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ("tool", {"path": 'a\\b"\n', "line": 120, "mode": 'quo"te\\', "deep": {"x": True}}, True),
        ("tool", {"path": "", "mode": None}, True),
        ("tool", {"path": "", "mode": "x"}, False),
        ("tool", {"path": "", "line": 121, "mode": "r"}, False),
        ("tool", {"mode": "r"}, False),
        ("tool", {"path": "", "mode": "r", "more": 1}, False),
        ("recursive", {"v": None, "next": {"v": None, "next": {"v": None}}}, True),
        ("recursive", {"next": {"v": None}}, False),
        ("array", ["a"], False),
        ("array", ["a", "b", "c", "ddd"], True),
        ("array", ["a", "b", "c", "d", "e"], False),
        ("array", ["a", "bbbb"], False),
        ("tuple", [1, "x", True, False], True),
        ("tuple", [1, "x"], False),
        ("union", [1, [2, [3]]], True),
        ("union", [1, 2, 3], False),
        ("types and enum", None, True),
        ("types and enum", 3, False),
        ("types and properties", None, True),
        ("types and properties", {}, False),
        ("all of", {"a": "x", "b": 3}, True),
        ("all of", {"a": "x", "b": "3"}, False),
        ("reference and description", {"n": 7}, True),
        ("reference and description", {"n": 8}, False),
        ("map", {"any key": -3, "é": 11}, True),
        ("map", {"any key": -4}, False),
        ("pattern", "A12-xyzx\\", True),
        ("pattern", 'A123"', True),
        ("pattern", "A1", False),
        ("search", 'ab"c', True),
        ("search", "abc", False),
        ("lengths", "\\\\\\\\\\", True),
        ("lengths", "x", False),
        ("anything", {"a": [1, -2.5e3, True, None, {"b": []}], "": "x"}, True),
        ("empty object", {}, True),
        ("empty object", {"a": 1}, False),
    ],
)
def test_what_is_valid_gets_in_and_nothing_else(
    vocabulary: Vocabulary, schema: str, value: Any, expected: bool
) -> None:
    for indent in (None, 2):
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        assert accepts(vocabulary, json_schema(SCHEMAS[schema]), text) == expected


@settings(max_examples=60)
@given(
    st.recursive(
        st.one_of(st.text(max_size=5), st.integers(-(10**15), 10**15), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        max_leaves=8,
    )
)
def test_every_object_is_an_object(vocabulary: Vocabulary, value: Any) -> None:
    text = json.dumps({"value": value}, ensure_ascii=False)
    assert accepts(vocabulary, json_object(), text)
    assert not accepts(vocabulary, json_object(), text[:-1])
    assert accepts(vocabulary, json_object(), json.dumps(value)) == isinstance(value, dict)


def test_strings_hold_no_raw_control_characters(vocabulary: Vocabulary) -> None:
    for bad in ('{"a":"\n"}', '{"a":"\t"}', '{"a":"\\x"}', '{"a":"\\ud800"}', "{'a':1}", '{"a":01}', '{"a":1,}'):
        assert not accepts(vocabulary, json_object(), bad), bad


@given(st.integers(-1200, 1200), st.integers(0, 1500))
def test_ranges_of_integers_are_exact(low: int, width: int) -> None:
    """The bodies are regular expressions but for their quotes and spaces."""
    body = integers(low, low + width)
    assert body is not None
    expression = re.compile(body.replace('"', "").replace(" ", ""))
    found = {n for n in range(low - 200, low + width + 200) if expression.fullmatch(str(n))}
    assert found == set(range(low, low + width + 1))
    assert not expression.fullmatch("00")
    assert not expression.fullmatch("-0")


def test_open_ranges_of_integers() -> None:
    assert integers(5, 4) is None
    assert integers(0.2, 0.8) is None
    assert integers(1e300, None) is None
    assert integers(None, -(10**400)) is None
    for low, high, inside, outside in ((3, None, "99999", "2"), (None, -3, "-1234", "-2"), (None, 10**30, "123", "x")):
        expression = re.compile(str(integers(low, high)).replace('"', "").replace(" ", ""))
        assert expression.fullmatch(inside)
        assert not expression.fullmatch(outside)


PATTERNS = [r"^a+b*c?$", r"^[^a-c\d]$", r"^(?:ab|c(d|e))*$", r"^\w+@\w+\.\w{2,3}$", r"^.$", r"x", r"^a|b$",
            r"^\S\s\D\W$",
            r"^[\w.-]+$", r"^a{2}b{1,}c{0,2}$", r"^[\x41-\u0043]$", r"^\/\$\.$", r"^[]a]?$", r"^()$",
            r"^a+?$"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_pythons_does(vocabulary: Vocabulary, pattern: str) -> None:
    if pattern == r"^[]a]?$":  # ECMA: an empty class and then text
        with pytest.raises(OptionError, match="no JSON string"):
            json_schema({"type": "string", "pattern": pattern})
        return
    grammar, matched = json_schema({"type": "string", "pattern": pattern}), 0
    texts = ["", "a", "b", "ab", "aabbc", "abcd", "c", "ce", "x", "axb", "a@b.de", "a-b.c", "\\", '"', "B", "/$.", "é",
             "- \ta", "a\n7 ", "aabcc", "aab", "7", "a b", "- x-", "x a-", "a", "aa"]  # fmt: skip
    for text in texts:
        expected = re.search(pattern, text, re.ASCII) is not None
        assert accepts(vocabulary, grammar, json.dumps(text, ensure_ascii=False)) == expected, text
        matched += expected
    assert 0 < matched < len(texts)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?<n>a)", r"\1", r"\p{L}", "a**", "(", ")", "[", "a{2", "a{3,1}", "a{1,99999}", "(" * 60 + ")" * 60,
     "x" * 5000, "[z-a]", "\\", "a^b", "*", r"\x4", "[\\d-x]",
     "((a*)*)*", "(a?)+", "(|a){2}", "(a?b?|c){3,}"],
)  # fmt: skip
def test_a_pattern_that_is_not_supported_is_named(pattern: str) -> None:
    with pytest.raises(OptionError, match="pattern"):
        pattern_rule(Rules(), pattern)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Any] = {
    "deep": _deep(500),
    "self": {"$ref": "#/a", "a": {"$ref": "#/a"}},
    "circle": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}},
    "root": {"$ref": "#"},
    "growing": {"$ref": "#/a", "a": {"properties": {"x": {"$ref": "#/a", "required": ["y"], "minItems": 3}}}},
    "remote": {"$ref": "https://example.com/schema"},
    "file": {"$ref": "file:///etc/passwd"},
    "other document": {"$ref": "other.json#/a"},
    "missing": {"$ref": "#/nowhere"},
    "not in a list": {"$ref": "#/a/7", "a": [1]},
    "number as reference": {"$ref": 3},
    "items": {"type": "array", "items": {}, "maxItems": 10**9},
    "least items": {"type": "array", "items": {}, "minItems": 10**9},
    "length": {"type": "string", "maxLength": 10**12},
    "negative": {"type": "string", "minLength": -1},
    "bounds": {"type": "integer", "minimum": 5, "maximum": 4},
    "bounds of text": {"type": "integer", "minimum": "5"},
    "swapped": {"type": "array", "minItems": 3, "maxItems": 2},
    "too few described": {"prefixItems": [{}], "items": False, "minItems": 2},
    "type": {"type": "strin"},
    "types": {"type": []},
    "nothing": False,
    "false property": {"properties": {"a": False}},
    "number": 3,
    "list": [],
    "null": None,
    "no options": {"anyOf": []},
    "no constants": {"enum": []},
    "constants of another type": {"type": "integer", "enum": ["a"]},
    "not": {"not": {}},
    "conditions": {"type": "object", "if": {}, "then": {}},
    "conflict": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "no properties": {"type": "object", "properties": 3},
    "many": {"anyOf": [{"anyOf": [{"items": {"const": i * j}} for i in range(100)]} for j in range(100)]},
    "large": {"enum": ["x" * 1000 + str(i) for i in range(2000)]},
    "not finite": {"const": float("nan")},
    "doubling": {
        **{f"a{i}": {"allOf": [{"$ref": f"#/a{i + 1}"}, {"$ref": f"#/a{i + 1}"}]} for i in range(40)},
        "a40": {"properties": {"x": {"not": {}}}},
        "$ref": "#/a0",
    },
    "pattern": {"type": "string", "pattern": "(a{1000}){9999}"},
    "pattern of a number": {"type": "string", "pattern": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_with_the_cause(name: str) -> None:
    with pytest.raises(OptionError, match=r"JSON schema at #|pattern|larger than") as caught:
        json_schema(HOSTILE[name])
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 2000},
        {"type": "array", "items": {"type": "string", "maxLength": 2000}, "maxItems": 2000},
        {"type": "string", "pattern": "^((a{2000}b?){2000}c)*$"},
        {"type": "string", "pattern": "^(a|a|a|a|a|a)*(a|b)*a*(a|ab)*$"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"properties": {f"p{i}": {"type": "string"} for i in range(800)}},
    ],
)
def test_what_is_large_is_read_or_refused_by_llama_cpp_in_bounded_time(
    vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    """The test's own timeout is the bound; either way the process lives and the next grammar works."""
    with suppress(OptionError):
        Constraint(vocabulary, json_schema(schema)).close()
    assert accepts(vocabulary, json_object(), "{}")


@given(st.text(alphabet="ab<>/x", min_size=1, max_size=6), st.text(alphabet="ab<>/x", max_size=14))
@settings(max_examples=60)
def test_until_ends_with_the_first_marker(vocabulary: Vocabulary, marker: str, text: str) -> None:
    rules = Rules()
    grammar = rules.text(rules.until(marker))
    whole = text + marker
    assert accepts(vocabulary, grammar, whole) == (whole.find(marker) == len(text))


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8))
@settings(max_examples=40)
def test_a_literal_is_its_text(vocabulary: Vocabulary, text: str) -> None:
    grammar = f"root ::= {literal(text)} {literal('!')}\n"
    assert accepts(vocabulary, grammar, text + "!")
    assert not accepts(vocabulary, grammar, text + "?")
