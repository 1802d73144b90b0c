"""What is done about keywords that a grammar cannot keep: refused by name, rewritten, or left out for a tool."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.json_schema_suite import Bytes
from rest_local.errors import OptionError
from rest_local.grammar import gbnf, json_schema, lark
from rest_local.grammar.schema import widened


@pytest.fixture(scope="module")
def vocabulary() -> Bytes:
    return Bytes()


UNREADABLE = "the pattern cannot be kept: unclosed group"
REFUSED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"uniqueItems": True},
    "contains": {"contains": {}},
    "contains, minContains": {"contains": {"type": "null"}, "minContains": 2},
    "not": {"not": {"type": "null"}},
    "if, then": {"if": {"type": "null"}, "then": {"const": None}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False},
    "unevaluatedItems": {"anyOf": [{"prefixItems": [{}]}, {}], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "the format regex": {"type": "string", "format": "regex"},
    "the format uri-reference": {"format": "uri-reference"},
    "the format of-our-own": {"type": ["string", "null"], "format": "of-our-own"},
    "the pattern cannot be kept: look-around": {"type": "string", "pattern": "^(?=a)b$"},
    "the pattern cannot be kept: backreferences": {"type": "string", "pattern": "^(a)\\1$"},
    "the pattern cannot be kept: lookarounds": {"type": "string", "pattern": "\\bword\\b"},
    UNREADABLE: {"type": "string", "pattern": "(a"},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "required: true is of draft 3": {"type": "string", "required": True},
    "divisibleBy is of draft 3": {"divisibleBy": 2},
    "disallow is of draft 3": {"disallow": "string"},
    "extends is of draft 3": {"extends": {"type": "string"}},
    "$ref to another document, https://example.com/a": {"$ref": "https://example.com/a"},
    "no value is valid": {"allOf": [{"type": "string"}, {"type": "integer"}]},
}


@pytest.mark.parametrize("said", REFUSED)
@pytest.mark.parametrize("place", ["at the top", "in a property", "in $defs"])
def test_what_is_not_kept_is_refused_by_name_with_the_way_out(said: str, place: str) -> None:
    schema: dict[str, Any] = REFUSED[said]
    if place == "in a property":
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    elif place == "in $defs":
        schema = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}, "$defs": {"a": schema}}
    with pytest.raises(OptionError, match=f"^JSON schema: {re.escape(said)}") as caught:
        json_schema(schema)
    assert "\n" not in str(caught.value)
    assert "1(8)" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_reference_that_leads_to_itself_is_refused_in_words(schema: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        json_schema(schema)
    assert str(caught.value) == "JSON schema: no value is valid; a $ref that leads to itself has no end"


@pytest.mark.parametrize("make", [lambda: gbnf("root ::= root"), lambda: lark("start: start")])
def test_a_rule_that_is_only_itself_is_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(OptionError, match=r"^grammar: it allows nothing$"):
        make()


def test_names_of_properties_and_values_are_no_keywords(vocabulary: Bytes) -> None:
    """A property may be called `not`, a default may hold anything, and so may what the standard does not know."""
    names = ["not", "if", "uniqueItems", "required", "extends", "enum", "default"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
        "default": {"required": True, "extends": 1},
        "examples": [{"required": True, "format": "x"}],
        "x-mine": {"required": True, "not": {}},
    }
    assert vocabulary.accepts(json_schema(schema), json.dumps(dict.fromkeys(names, 1)))
    assert not vocabulary.accepts(json_schema(schema), json.dumps(dict.fromkeys(names, "x")))


A, ANY = {"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object"}
REWRITTEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["x"]]),
    ({"type": "integer", "not": False}, [1], ["x"]),
    ({"type": "integer", "if": {"minimum": 3}}, [1], ["x"]),
    ({"type": "integer", "then": {"minimum": 3}, "else": {"minimum": 3}, "minContains": 3}, [1], ["x"]),
    ({**A, "dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": []}}, [{"a": 1}], [3]),
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
    ({**ANY, "additionalProperties": {"type": "integer"}, "propertyNames": {"type": "string", "title": "key"}},
     [{"a": 1}], [{"a": "x"}]),
    ({**ANY, "additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}},
     [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
    ({**ANY, "propertyNames": {"const": "a"}, "required": ["a"]}, [{"a": [1]}], [{}, {"b": 1}]),
    ({**ANY, "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
     [{"abc": 1}], [{"A": 1}, {"a": "x"}]),
    ({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({**A, "unevaluatedProperties": {"type": "string"}}, [{"a": 1, "b": "x"}], [{"b": 1}]),
    ({**A, "additionalProperties": True, "unevaluatedProperties": False}, [{"a": 1, "b": 1}], [{"a": "x"}]),
    ({"anyOf": [A, {"type": "null"}], "unevaluatedProperties": True}, [None, {"a": 1}], [3]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"type": "array", "items": [{"type": "integer"}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"type": "array", "items": {"type": "integer"}, "unevaluatedItems": False}, [[1, 2]], [["x"]]),
    ({"type": "string", "required": False}, ["x"], [1]),
    ({"format": "date"}, ["2024-02-29", "2000-02-29", 3], ["2023-02-29", "1900-02-29", "2024-04-31", "x"]),
    ({"type": "string", "format": "date", "pattern": "^20"}, ["2024-02-29"], ["2023-02-29", "1904-02-29"]),
    ({"type": "string", "format": "time"}, ["10:00:59Z", "23:59:60Z", "23:59:60.5+00:00"],
     ["10:00:60Z", "23:59:60+01:00", "24:00:00Z"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:60Z", "2024-02-29t10:00:00.5-07:00"],
     ["2023-02-29T10:00:00Z", "2024-02-29T10:00:60Z", "2024-02-29"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a/~0~1/é"], ["a", "/~", "/~2"]),
    ({"type": "string", "format": "relative-json-pointer"}, ["0", "12#", "1/a"], ["", "01", "/a"]),
    ({"type": "string", "format": "byte"}, ["", "YQ==", "YWI=", "YWJj"], ["Y", "YQ", "Y===", "Y Q="]),
    ({"type": "string", "format": "password"}, ["x"], [3]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]),
    ({"type": "integer", "format": "uint8", "minimum": 0}, [0, 255], [-1, 256]),
    ({"type": "integer", "format": "int64"}, [2**53 - 1], ["x"]),
    ({**A, "required": ["b"]}, [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), REWRITTEN)
def test_what_can_be_said_otherwise_is_kept(
    vocabulary: Bytes, schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = json_schema(schema)
    said = [json.dumps(value, ensure_ascii=False) for value in (*valid, *invalid)]
    assert [vocabulary.accepts(grammar, text) for text in said] == [True] * len(valid) + [False] * len(invalid)


@pytest.mark.parametrize("said", [said for said in REFUSED if said not in ("no value is valid", UNREADABLE)])
def test_a_tool_keeps_the_rest_of_its_schema(vocabulary: Bytes, said: str) -> None:
    """`widened` allows more, never less, and what is left can be kept."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "odd": REFUSED[said]},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = json_schema(widened(schema))
    assert vocabulary.accepts(grammar, '{"n": 1}')
    assert not vocabulary.accepts(grammar, '{"n": "x"}')
    assert not vocabulary.accepts(grammar, '{"n": 1, "other": 2}')


def test_a_widened_schema_allows_what_the_schema_allows(vocabulary: Bytes) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "one": {"oneOf": [{"type": "number"}, {"type": "integer"}, {"type": "string", "format": "uri-reference"}]},
            "code": {"type": "string", "pattern": "^(?!x)[a-z]+$", "format": "regex"},
        },
        "required": ["tags", "one", "code"],
        "additionalProperties": False,
    }
    with pytest.raises(OptionError):
        json_schema(schema)
    grammar = json_schema(widened(schema))
    validator = jsonschema_rs.Draft202012Validator(schema)
    for value in ({"tags": ["a"], "one": 1.5, "code": "ab"}, {"tags": [], "one": "a/b", "code": "y"}):
        assert validator.is_valid(value)
        assert vocabulary.accepts(grammar, json.dumps(value))
    assert not vocabulary.accepts(grammar, '{"tags": [1], "one": 1, "code": "a"}')
    assert not vocabulary.accepts(grammar, '{"tags": [], "one": null, "code": "a"}')
