"""Forced calls: whatever the logits are, text under the grammar is read back as a call of one of the tools.

An independent validator checks the arguments against the schemas.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.spelling import generated
from tool_formats import FORMATS, PROPERTIES, SIGNS

from rest_local.chat.tools import AnswerFormat, CallArguments, CallStart, Content, Delta, Reasoning, joined, tools_of
from rest_local.errors import OptionError
from rest_local.grammar.constraint import Constraint
from rest_local.llama.model import Model
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary

WRITE: dict[str, Any] = {
    "type": "object",
    "properties": PROPERTIES | {"inner": {"type": "object"}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"write_file": WRITE, "list-files": NOTHING}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]

MARKS = ("</think>", "\n</parameter>\n", '<|"|>', "<|end|>")


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


def parse(name: str, text: str, prompt: str = "") -> list[Delta]:
    parser = AnswerFormat.of(SIGNS[name]).parser(tools_of(TOOLS), prompt)
    return joined([delta for piece in text for delta in parser.feed(piece)] + parser.finish())


def check(deltas: list[Delta], most: int) -> list[str]:
    """Check that each call is valid and that there is no other text, and return the names of the calls."""
    assert [delta for delta in deltas if isinstance(delta, Content)] == []
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    assert 1 <= len(names) <= most
    for i, name in enumerate(names):
        text = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == i)
        jsonschema_rs.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))
    return names


@pytest.mark.parametrize("name", FORMATS)
def test_required_gives_calls_of_the_tools(vocabulary: Vocabulary, name: str) -> None:
    grammar = AnswerFormat.of(SIGNS[name]).forced(tools_of(TOOLS), "required", "")
    assert grammar is not None
    found = [
        called for seed in range(10) for called in check(parse(name, generated(vocabulary, grammar, seed, MARKS)), 32)
    ]
    assert set(found) == set(SCHEMAS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_function_is_called_once(vocabulary: Vocabulary, name: str) -> None:
    form = AnswerFormat.of(SIGNS[name])
    for called in SCHEMAS:
        grammar = form.forced(tools_of(TOOLS), {"type": "function", "function": {"name": called}}, "")
        assert grammar is not None
        for seed in range(3):
            assert check(parse(name, generated(vocabulary, grammar, seed, MARKS)), 1) == [called]


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls_can_be_turned_off(vocabulary: Vocabulary, name: str) -> None:
    grammar = AnswerFormat.of(SIGNS[name]).forced(tools_of(TOOLS), "required", "", parallel=False)
    assert grammar is not None
    for seed in range(4):
        check(parse(name, generated(vocabulary, grammar, seed, MARKS)), 1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_formats_grammar_accepts_the_calls_it_writes(vocabulary: Vocabulary, name: str) -> None:
    """Compared by what is read back, because line breaks and spaces of earlier calls may differ."""
    form = AnswerFormat.of(SIGNS[name])
    grammar = form.forced(tools_of(TOOLS), "required", "")
    assert grammar is not None
    calls = [{"name": "write_file", "arguments": {"path": "a b/c.py", "lines": [1, 20]}}]
    text = form.format.write(calls).removesuffix("<|call|>")
    with Sampler(vocabulary, Sampling(grammar=grammar)) as sampler:
        for token in vocabulary.tokenize(text).tolist():
            assert sampler.constraint.allows(token), (text, vocabulary.piece(token))
            sampler.accept(token)
        assert sampler.constraint.allows(int(vocabulary.ends[0]))


@pytest.mark.parametrize("prompt", ["<think>\n", ""])
def test_reasoning_may_come_before_a_forced_call(vocabulary: Vocabulary, prompt: str) -> None:
    form = AnswerFormat.of("<think> </think> <tool_call>")
    grammar = form.forced(tools_of(TOOLS), "required", prompt)
    assert grammar is not None
    opening = "" if prompt else "<think>"
    constraint = Constraint(vocabulary, grammar)
    call = '\n\n<tool_call>\n{"name": "list-files", "arguments": {}}\n</tool_call>'
    for token in vocabulary.tokenize(f"{opening}I need <files>.</think>{call}").tolist():
        assert constraint.follow(token)
    assert constraint.allows(int(vocabulary.ends[0]))
    for seed in range(4):
        deltas = parse("hermes", generated(vocabulary, grammar, seed, MARKS), prompt)
        check([delta for delta in deltas if not isinstance(delta, Reasoning)], 32)


@pytest.mark.parametrize("choice", ["sometimes", {}, {"function": {"name": "other"}}, {"function": 3}, 7, ["required"]])
def test_an_unknown_tool_choice_is_refused(choice: Any) -> None:
    with pytest.raises(OptionError, match="tool_choice"):
        AnswerFormat.of("").forced(tools_of(TOOLS), choice, "")


def test_required_without_tools_is_refused() -> None:
    with pytest.raises(OptionError, match="no tools"):
        AnswerFormat.of("").forced([], "required", "")


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "harmony", "deepseek"])
def test_what_cannot_be_kept_of_a_schema_is_left_out_unless_the_tool_is_strict(
    vocabulary: Vocabulary, name: str
) -> None:
    """The rest is kept: clients send `format` and `uniqueItems` without a thought."""
    kept = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    lost = {"not": {"required": ["x"]}, "properties": {"n": {"type": "integer", "uniqueItems": True}}}
    form = AnswerFormat.of(SIGNS[name])
    grammars = []
    for function in ({"name": "f", "parameters": {**kept, **lost}}, {"name": "f", "parameters": kept}):
        grammars.append(form.forced(tools_of([{"function": function}]), "required", ""))
    assert grammars[0] == grammars[1]
    with pytest.raises(OptionError, match="tool f"):
        form.forced(
            tools_of([{"function": {"name": "f", "parameters": {**kept, **lost}, "strict": True}}]), "required", ""
        )


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_a_response_format_is_kept(vocabulary: Vocabulary, name: str) -> None:
    form = AnswerFormat.of(SIGNS[name])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted in (schema, None):
        for seed in range(4):
            parser = form.parser((), "")
            deltas = joined(
                [*parser.feed(generated(vocabulary, form.schema(wanted, ""), seed, MARKS, b"final")), *parser.finish()]
            )
            (content,) = [delta.text for delta in deltas if isinstance(delta, Content)]
            jsonschema_rs.Draft202012Validator(wanted or {"type": "object"}).validate(json.loads(content))
