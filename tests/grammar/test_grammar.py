"""Grammars allow exactly their language; what cannot be kept is refused with the cause."""

import json
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
from support.spelling import generated

from rest_local.errors import OptionError
from rest_local.grammar import Grammar, any_object, compiler, gbnf, json_schema, lark
from rest_local.grammar.compiler import Tokens
from rest_local.grammar.constraint import Constraint
from rest_local.grammar.grammar import Lark
from rest_local.llama.vocabulary import Vocabulary


def accepts(vocabulary: Vocabulary, grammar: Grammar, text: str) -> bool:
    constraint, end = Constraint(vocabulary, grammar), int(vocabulary.ends[0])
    return all(constraint.follow(token) for token in vocabulary.tokenize(text).tolist()) and constraint.allows(end)


NODE = {"$ref": "#/$defs/node"}
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
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "null"}, "next": NODE}, "required": ["v"],
                           "additionalProperties": False}},
    },
    "all of": {
        "allOf": [{"$ref": "#/definitions/a"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
        "definitions": {"a": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}},
    },
    "discriminated": {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
                                for kind in ("a", "b")]},
    "formats": {"type": "array", "items": False, "minItems": 3, "prefixItems": [
        {"type": "string", "format": f} for f in ("date", "uuid", "ipv4")]},
    "non-ASCII": {"type": "object", "properties": {"naïve ✓": {"const": "日本\n\t\u2028"}}, "required": ["naïve ✓"]},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_generated_is_valid(vocabulary: Vocabulary, name: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(SCHEMAS[name], validate_formats=True)
    for seed in range(8):
        validator.validate(json.loads(generated(vocabulary, json_schema(SCHEMAS[name]), seed)))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [-0.1, 1.01, 991]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5}, [0.5, 2.4], [0, 2.5]),
        ({"type": "integer", "minimum": 5, "exclusiveMaximum": 8}, [5, 7], [4, 8, 5.5]),
        ({"type": "integer", "multipleOf": 3}, [0, 3, 21], [4, 20]),
        ({"type": "string", "format": "date"}, ["2024-01-31", "2024-02-29"], ["2024-02-30", "2024-13-01", "x"]),
        ({"type": "string", "pattern": "^[A-Z]\\d{2,4}(-(x|yz)+)?.?$"}, ["A12-xyzx\\", 'A123"'], ["A1", "a12"]),
        ({"type": "string", "pattern": 'b"'}, ['ab"c'], ["abc"]),
        ({"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "\\\\\\\\\\", "日本語"], ["x", "abcdef"]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"any": 1, "é": 2}], [{"a": "x"}]),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
         [{"a1": 3}], [{"a1": "x"}, {"b": 1}]),
        ({"type": "object", "required": ["here"]}, [{"here": 1}], [{}]),
        ({"type": "object", "minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}], [{"a": "x"}, 3, []]),
        ({"enum": ["a", None, 3, [1], {"a": 1}]}, ["a", None, 3, [1], {"a": 1}], ["b", 4, [2]]),
        ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}]),
        ({"type": ["string", "null"], "enum": ["a", None, 3]}, ["a", None], [3]),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
         [1, [2, [3]]], ["x", [1, 2, 3]]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x"], [None]),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 5}}}, [5], [4]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
         [[True]], [[], [1], [True] * 3]),
        ({"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": {"type": "boolean"},
          "minItems": 2}, [[1, "x"], [1, "x", True]], [[1], [2, "x"], [1, "x", 3]]),
        ({"type": "boolean"}, [True, False], [0, "true"]),
        ({"type": "null"}, [None], [0]),
    ],
)  # fmt: skip
def test_keywords_are_kept(vocabulary: Vocabulary, schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Valid values are allowed with and without line breaks, invalid ones are not."""
    grammar = json_schema(schema)
    for value, expected in [*((value, True) for value in valid), *((value, False) for value in invalid)]:
        for indent in (None, 2):
            text = json.dumps(value, ensure_ascii=False, indent=indent)
            assert accepts(vocabulary, grammar, text) is expected, text


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer"}, ["0", "-7", "9" * 15, str(2**53 - 1)], ["9" * 16, "1" * 17, "-" + "1" * 17]),
        ({"type": "number"}, ["-12.5", "1" * 16, "0." + "3" * 10], ["1" * 17, "0." + "3" * 11, "0.5" + "0" * 10]),
        ({"type": ["null", "integer"]}, ["null", "1" * 16], ["1" * 17]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0.25"], ["0." + "3" * 11]),
        ({"type": "integer", "minimum": 5}, ["1" * 16], ["4", "1" * 17]),
        ({"type": "integer", "exclusiveMinimum": 10**17}, ["1" * 18], ["1" * 16]),
        ({"type": "integer", "maximum": -(10**17)}, ["-" + "1" * 18], ["-1"]),
        ({"type": "integer", "enum": [10**18]}, ["1" + "0" * 18], ["1"]),
        ({"type": "object"}, ['{"a": [1, {"b": 0.5}]}'], ['{"a": ' + "1" * 17 + "}", '{"a": 0.' + "3" * 11 + "}"]),
        ({}, ["[1]", "null", '"x"'], ["1" * 17, "[" + "1" * 17 + "]"]),
        ({"type": "array", "items": {"properties": {"n": {"type": "number", "multipleOf": 0.25}}}},
         ['[{"n": 1.25}]'], ['[{"n": 1.3}]', '[{"n": ' + "1" * 17 + "}]"]),
    ],
)  # fmt: skip
def test_numbers_without_limits_come_to_an_end(
    vocabulary: Vocabulary, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    """Otherwise a small model writes digits up to the token limit. Limits of the schema take precedence."""
    grammar = json_schema(schema)
    assert [accepts(vocabulary, grammar, text) for text in valid] == [True] * len(valid)
    assert [accepts(vocabulary, grammar, text) for text in invalid] == [False] * len(invalid)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        _deep(500),
        {"$ref": "#/a", "a": {"$ref": "#/a"}},
        {"$ref": "#"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#/nowhere"},
        {"$ref": 3},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "strin"},
        {"enum": []},
        False,
        3,
        None,
        [],
        {"const": float("nan")},
        {"enum": ["x" * 1000 + str(i) for i in range(2000)]},
        {"type": "string", "pattern": 5},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_invalid_and_empty_schemas_are_refused_with_the_cause(schema: Any) -> None:
    with pytest.raises(OptionError, match=r"^JSON schema: .") as caught:
        json_schema(schema)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


GBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "one regular expression": ('root ::= [a-z]+ "x"', ["ax", "abxx"], ["x", "ab"]),
    "numbers": ('root ::= "-"? [0-9]{1,3} ("." [0-9]+)?', ["-12.5", "7"], ["1234", "1."]),
    "rules": ('root ::= item ("," item)*\nitem ::= [a-c]+ # one\n', ["a,bc"], ["a,", "d"]),
    "itself": ('root ::= "(" root ")" | "x"', ["((x))"], ["((x)"]),
    "itself first": ('root ::= root "a" | "b"', ["baa"], ["ab"]),
    "escapes": (
        'root ::= "\\"\\\\\\n\\x41\\u0042\\u00e9\\U0001F600" [\\u4e00-\\u4e02\\]]',
        ['"\\\nABé😀丁', '"\\\nABé😀]'],
        ["A"],
    ),
    "anything but": ('root ::= [^"\\n/]+ "/"', ["a b/"], ['a"/']),
    "names": ("root ::= top-level\ntop-level ::= rootA\nrootA ::= root-b\nroot-b ::= [ab]", ["a"], ["c"]),
    "may be empty": ('root ::= ("a"?){200}', ["", "aaa"], ["b"]),
    "arithmetic": (
        'root ::= sum "=\\n"\nsum ::= value ([-+*/] value)*\nvalue ::= [0-9]+ | "(" sum ")"',
        ["(1+2)*34=\n"],
        ["(1+2*34=\n", "1+=\n"],
    ),
}


@pytest.mark.parametrize("name", GBNF)
def test_gbnf_allows_what_it_says(vocabulary: Vocabulary, name: str) -> None:
    text, valid, invalid = GBNF[name]
    grammar = gbnf(text)
    assert [said for said in (*valid, *invalid) if accepts(vocabulary, grammar, said)] == valid


@pytest.mark.parametrize(
    "text",
    ["root ::= (", "top ::= [a]", "root ::= undefined", "!", "", "root ::= \0", "root ::= <think>", "(" * 90_000],
)
def test_gbnf_that_cannot_be_read_is_one_line_with_the_way_out(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        OptionError, match=r"^grammar: (the GBNF cannot be read: .*write the grammar in Lark|give)"
    ) as caught:
        gbnf(text)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_grammar_is_compiled_once_for_a_vocabulary_while_it_is_among_the_newest(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = Tokens._compile

    def counted(self: Tokens, text: str) -> Any:
        compiled.append(text)
        return compile_(self, text)

    monkeypatch.setattr(Tokens, "_compile", counted)
    grammars = [lark(f'start: "once {number}"') for number in range(compiler._KEPT + 1)]
    for grammar in (*grammars, *grammars[1:]):
        vocabulary.grammar_tokens().matcher(grammar.compiled_text)
    assert compiled == [grammar.compiled_text for grammar in grammars]
    vocabulary.grammar_tokens().matcher(grammars[0].compiled_text)
    assert compiled[-1] == grammars[0].compiled_text
    assert len(vocabulary.grammar_tokens()._compiled) == compiler._KEPT


def test_special_tokens_match_only_their_names(vocabulary: Vocabulary) -> None:
    """Text never matches them. An unknown name is refused once the vocabulary is known."""
    control = next(i for i in range(vocabulary.size) if vocabulary.is_control(i) and not vocabulary.is_end(i))
    name = vocabulary.piece(control).decode()
    assert vocabulary.special_token(name) == control
    assert vocabulary.special_token("<none>") is None
    assert not Constraint(vocabulary, lark("start: /(.|\\n)*/")).allows(control)
    builder = Lark(vocabulary.special_token)
    constraint = Constraint(vocabulary, builder.grammar(builder.literal(f"a{name}b")))
    spelled = [*vocabulary.tokenize("a").tolist(), control, *vocabulary.tokenize("b").tolist()]
    assert constraint.longest(spelled) == 3
    builder = Lark(vocabulary.special_token)
    assert (
        Constraint(vocabulary, builder.grammar(f"{builder.until(name)} {builder.literal('b')}")).longest(spelled) == 3
    )
    unknown = lark("start: <|no_such_token|>")
    with pytest.raises(OptionError, match="no_such_token"):
        Constraint(vocabulary, unknown)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 100_000},
        {"type": "array", "items": {"type": "string", "maxLength": 2000}, "maxItems": 2000},
        {"type": "string", "pattern": "^((a{2000}b?){2000}c)*$"},
        {"type": "string", "pattern": "^(a|a|a|a|a|a)*(a|b)*a*(a|ab)*$"},
        {"properties": {f"p{i}": {"type": "string"} for i in range(800)}},
        {"enum": list(range(50_000))},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_large_schema_is_kept_or_refused_and_the_next_works(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    with suppress(OptionError):
        Constraint(vocabulary, json_schema(schema))
    assert accepts(vocabulary, any_object(), "{}")
