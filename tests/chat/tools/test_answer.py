"""Answers in every format: written calls are read back, nothing is lost, and the result does not depend on cuts."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import few
from tool_formats import FORMATS, PROPERTIES, SIGNS

from rest_local.chat.conversation import ChatTemplate
from rest_local.chat.tools import AnswerFormat, CallArguments, CallStart, Content, Delta, Reasoning, joined, tools_of
from rest_local.chat.tools.json_formats import CALL
from rest_local.errors import OptionError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {"name": "write_file", "arguments": {"path": 'a "b"\\c\n<d>é', "mode": "w", "lines": [1, 2], "force": True}},
    {"name": "list_files", "arguments": {}},
]
A = {"path": "a"}


def parse(template: str, pieces: Sequence[str], prompt: str = "", tools: Any = TOOLS) -> list[Delta]:
    numbers = count()
    parser = AnswerFormat.of(template).parser(tools_of(tools), prompt, new_id=lambda: f"id{next(numbers)}")
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined([*deltas, *parser.finish()])


def cut(text: str, seed: int) -> Iterator[str]:
    chooser = random.Random(seed)
    while text:
        size = chooser.choice([1, 1, 2, 3, 7, 40])
        yield text[:size]
        text = text[size:]


def calls_of(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    texts = [
        "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == i) for i in range(len(names))
    ]
    return [{"name": name, "arguments": json.loads(text)} for name, text in zip(names, texts, strict=True)]


def content_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def written(name: str, calls: Sequence[dict[str, Any]]) -> str:
    return AnswerFormat.of(SIGNS[name]).format.write(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_written_calls_are_read_back(name: str) -> None:
    for calls in (CALLS, CALLS[:1], CALLS[1:]):
        deltas = parse(SIGNS[name], [written(name, calls)])
        assert calls_of(deltas) == calls
        assert content_of(deltas) == ""
        assert [delta.index for delta in deltas if isinstance(delta, CallStart)] == list(range(len(calls)))
        assert len({delta.id for delta in deltas if isinstance(delta, CallStart)}) == len(calls)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_is_neither_text_nor_a_call_to_run(name: str, forced: bool) -> None:
    """It is cut anywhere. What can be the beginning of a text is kept if the model was free to write one."""
    form, whole = AnswerFormat.of(SIGNS[name]), written(name, CALLS)
    begins = (*form.format.readers, *(["<|channel|>"] if form.format.whole else []))
    for end in range(1, len(whole)):
        parser = form.parser(tools_of(TOOLS), "", forced=forced)
        deltas = joined([*parser.feed(whole[:end]), *parser.finish(cut=True)])
        if parser.calls or forced or any(marker in whole[:end] for marker in begins):
            assert content_of(deltas) == "", whole[:end]
        else:
            assert content_of(deltas) == whole[:end]
        if parser.called:
            assert calls_of(deltas) == CALLS[: parser.calls], whole[:end]


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_ends_by_itself_has_called(name: str) -> None:
    for calls in (CALLS, CALLS[1:]):
        parser = AnswerFormat.of(SIGNS[name]).parser(tools_of(TOOLS), "")
        parser.feed(written(name, calls))
        parser.finish()
        assert parser.called


VALUES = st.recursive(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.integers(-999, 999), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "qwen"])
@few(20)
@given(
    arguments=st.dictionaries(st.from_regex("[a-z_]{1,5}x", fullmatch=True), VALUES, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_arguments_are_read_back(name: str, arguments: dict[str, Any], seed: int) -> None:
    """Except text that a format cannot contain: its own markers, and line ends that Python reads differently."""
    text = json.dumps(arguments, ensure_ascii=False)
    if any(mark in text for mark in ("<|", "|>")):
        return
    calls = [{"name": "write_file", "arguments": arguments}]
    assert calls_of(parse(SIGNS[name], list(cut(written(name, calls), seed)))) == calls


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(0, 99))
@few(50)
def test_a_qwen_text_parameter_is_read_back_exactly(text: str, seed: int) -> None:
    if "</parameter>" in text:
        return
    calls = [{"name": "write_file", "arguments": {"path": text}}]
    assert calls_of(parse(SIGNS["qwen"], list(cut(written("qwen", calls), seed)))) == calls


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", ">", "<|python_tag|>"),
    *(
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant",
        "<|call|>", "<|start|>",
    ),
    *("analysis", "final", "commentary", " to=functions.", "<|constrain|>json", "<think>", "</think>", "[THINK]"),
    *("<|tool_call>call:", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>"),
    *("<｜tool▁calls▁begin｜>", CALL, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "function"),  # noqa: RUF001
    *('{"name": "', '", "arguments": {', '{"name": "write_file", "parameters": {', '"path": "', "}", "{", "]", "["),
    *('"', "\\", ",", ":", ";", "(", ")", "=", "\n", " ", "é", "a", '\\"', "write_file", "<", "|"),
]  # fmt: skip
SOUP = st.lists(st.sampled_from(MARKS), max_size=25).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
@few(15)
@given(text=SOUP, seed=st.integers(0, 1000))
def test_where_the_text_is_cut_does_not_matter(name: str, prompt: str, text: str, seed: int) -> None:
    whole = parse(SIGNS[name], [text], prompt)
    assert parse(SIGNS[name], list(text), prompt) == whole
    assert parse(SIGNS[name], list(cut(text, seed)), prompt) == whole


WORDS = [f"qz{i}qz" for i in range(40)]


@pytest.mark.parametrize("name", FORMATS)
@few(25)
@given(marks=st.lists(st.sampled_from(MARKS), max_size=25), seed=st.integers(0, 1000))
@example(marks=['{"name": "', '", "arguments": {', "}", ",", '"', '"', ":", '"', '"'], seed=1)
def test_no_word_is_lost(name: str, marks: list[str], seed: int) -> None:
    """Words between any markers come out in order: as text, reasoning, a name or arguments."""
    chooser, text, said = random.Random(seed), "", []
    for mark in marks:
        if chooser.random() < 0.6:
            said.append(WORDS[len(said)])
            text += said[-1]
        text += mark
    deltas = parse(SIGNS[name], list(cut(text, seed)))
    out = "".join(f"{delta.name} {delta.id}" if isinstance(delta, CallStart) else delta.text for delta in deltas)
    if name == "harmony":  # words in a header name channels
        said = [word for word in said if word in out]
    assert [word for word in said if word not in out] == []


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("harmony", "gemma", "pythonic")])
def test_arguments_are_emitted_before_they_are_complete(name: str) -> None:
    text = written(name, [{"name": "write_file", "arguments": {"path": "x" * 500}}])
    parser = AnswerFormat.of(SIGNS[name]).parser(tools_of(TOOLS), "")
    deltas = parser.feed(text[: len(text) // 2])
    assert any(isinstance(delta, CallArguments) and len(delta.text) > 100 for delta in deltas)
    assert parser.calls == 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"path": "a"}, "name": "write_file"}</tool_call>', A),
        ("hermes", '<tool_call>{"name": "write_file", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>', A),
        ("hermes", '<tool_call>\n{"name": "write_file", "arguments": {"path": "a"}}}\n</tool_call>', A),
        ("hermes", '<tool_call>{"name": "write_file", "arguments": {"path": "a"}}', A),
        ("hermes", '<tool_call>{"id": "7", "name": "write_file", "parameters": {"path": "a"}}</tool_call>', A),
        ("hermes", '<tool_call>{"name": "write_file", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "write_file"}</tool_call>', {}),
        ("hermes", "<tool_call><function=write_file><parameter=path>a</parameter></function></tool_call>", A),
        ("qwen", "<function=write_file>\n<parameter=path>\na\n</parameter>\n</function>", A),
        ("qwen", "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n", A),
        ("qwen", "<tool_call><function=write_file><parameter=force>True</parameter></function>", {"force": True}),
        ("qwen", "<tool_call><function=write_file><parameter=count>\n7\n</parameter></function>", {"count": 7}),
        ("qwen", "<tool_call><function=write_file><parameter=path>7</parameter></function>", {"path": "7"}),
        ("qwen", "<tool_call><function=other><parameter=path>7</parameter></function>", {"path": 7}),
        ("qwen", "<tool_call><function=write_file><parameter=lines>[1,</parameter></function>", {"lines": "[1,"}),
        ("llama3", '{"name": "write_file", "parameters": {"path": "a"}}', A),
        ("llama3", '\n{"type": "function", "name": "write_file", "parameters": {"path": "a"}}', A),
        ("llama3", '<|python_tag|>{"name": "write_file", "parameters": {"path": "a"}}', A),
        ("mistral", '[TOOL_CALLS]write_file[CALL_ID]abcdef123[ARGS]{"path": "a"}', A),
        ("mistral", '[TOOL_CALLS]write_file{"path": "a"}', A),
        ("mistral", '[TOOL_CALLS] [{"name": "write_file", "arguments": {"path": "a"}, "id": "abcdef123"}]', A),
        ("harmony", ' to=functions.write_file<|channel|>commentary json<|message|>{"path": "a"}<|call|>', A),
        ("harmony", '<|channel|>commentary to=write_file<|message|>{"path": "a"}', A),
        ("deepseek", f'{CALL}write_file<｜tool▁sep｜>{{"path": "a"}}<｜tool▁call▁end｜>', A),  # noqa: RUF001
        ("gemma", '<|tool_call>call:write_file{path:<|"|>a<|"|>}<tool_call|>', A),
        ("gemma", '<|tool_call>call:write_file{path:a, "count":3}<tool_call|>', {**A, "count": 3}),
        ("gemma", r'<|tool_call>call:write_file{path:a, "a\"b":3}<tool_call|>', {**A, 'a"b': 3}),
        ("pythonic", "<|tool_call_start|>[write_file(path='a', force=true)]<|tool_call_end|>", {**A, "force": True}),
        ("pythonic", '<|tool_call_start|>[{"name": "write_file", "arguments": {"path": "a"}}]<|tool_call_end|>', A),
        ("listed", '<|tool_call|>[{"name": "write_file", "arguments": {"path": "a"}}]<|/tool_call|>', A),
    ],
)  # fmt: skip
def test_variants_of_calls_that_models_write(name: str, text: str, expected: dict[str, Any]) -> None:
    deltas = parse(SIGNS[name], list(text))
    assert [call["arguments"] for call in calls_of(deltas)] == [expected]
    assert content_of(deltas) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"city": "Köln"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "write_fi'),
        ("qwen", "<tool_call>\n<function=>\n</function>"),
        ("llama3", '{"name": "Ann", "parameters": {"age": 3}}'),
        ("llama3", '{"path": "x"}'),
        ("llama3", "<|python_tag|>import os\nos.getcwd()"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS] write_file please"),
        ("gemma", "<|tool_call>call:write_file{path:}<tool_call|>"),
        ("gemma", r'<|tool_call>call:write_file{"\x":a}<tool_call|>'),
        ("gemma", '<|tool_call>call:write_file{path:<|"|>never closed'),
        ("gemma", "<|tool_call>call:write_file" + "{a:" * 300 + "}" * 300 + "<tool_call|>"),
        ("pythonic", "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(x=open('a'))]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>" + "[" * 5000 + "<|tool_call_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),  # noqa: RUF001
    ],
)
def test_text_that_is_not_a_call_is_kept_exactly(name: str, text: str) -> None:
    assert parse(SIGNS[name], list(cut("So: " * (name != "llama3") + text, 5))) == [
        Content("So: " * (name != "llama3") + text)
    ]


def test_text_after_an_error_inside_a_call_is_kept() -> None:
    deltas = parse(SIGNS["hermes"], ['<tool_call>{"name": "list_files", "arguments": {}, "more": 1} and so on'])
    assert calls_of(deltas) == [{"name": "list_files", "arguments": {}}]
    assert content_of(deltas) == ', "more": 1} and so on'


def test_an_incomplete_argument_is_not_completed() -> None:
    for name, text in (
        ("qwen", "<tool_call>\n<function=write_file>\n<parameter=path>\nhalf"),
        ("hermes", '<tool_call>{"name": "write_file", "arguments": {"path": "half'),
    ):
        (arguments,) = [delta.text for delta in parse(SIGNS[name], [text]) if isinstance(delta, CallArguments)]
        with pytest.raises(ValueError, match="Unterminated"):
            json.loads(arguments)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes."),
        ("", "\n<think>I see.</think>Yes.", "I see.", "Yes."),
        ("...<think>\n", "I see.\n</think>\n\nYes.", "I see.", "Yes."),
        ("...<think>\n", "I never stop", "I never stop", ""),
        ("", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("", "Use <think> tags.</think>", "", "Use <think> tags.</think>"),
        ("", "<thin", "", "<thin"),
        ("", " <thinking>", "", " <thinking>"),
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_reasoning_is_separated_from_the_answer(
    prompt: str, text: str, reasoning: str, content: str, tools: Any
) -> None:
    for pieces in ([text], list(text)):
        deltas = parse(SIGNS["hermes"], pieces, prompt, tools)
        assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == reasoning
        assert content_of(deltas) == content


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>"
        '{"path": "a"}<|call|>'
    )
    assert parse(SIGNS["harmony"], list(text)) == [
        *(Reasoning("Hm, <b>."), Content("Looking."), CallStart(0, "id0", "write_file")),
        CallArguments(0, '{"path": "a"}'),
    ]
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parse(SIGNS["harmony"], [final], tools=None) == [Reasoning("Hm."), Content("Yes.")]
    assert parse(SIGNS["harmony"], ["Just <text>."]) == [Content("Just <text>.")]
    assert content_of(parse(SIGNS["harmony"], ["<|channel|>never a message"])) == "<|channel|>never a message"


FUNCTION = {"name": "a"}


@pytest.mark.parametrize(
    "tool",
    [
        *(3, {}, {"function": {"name": ""}}, {"function": {"name": 3}}, {"type": "function", "function": 3}),
        *({"function": {"name": "a" * 257}}, {"type": "retrieval", "function": FUNCTION}),
        *({"function": {**FUNCTION, "parameters": [1]}}, {"function": {**FUNCTION, "description": 1}}),
    ],
)
def test_invalid_tools_are_refused(tool: Any) -> None:
    with pytest.raises(OptionError, match=r"^tools\[1\]"):
        tools_of([{"function": FUNCTION}, tool])


ENDS = ("<|im_end|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
ENDS += ("<｜end▁of▁sentence｜>", "<|tool_response>")  # noqa: RUF001


def test_calls_written_by_templates_of_real_models_are_read_back(shared_data: Callable[[str], Path]) -> None:
    """A model writes calls in the form in which its template shows earlier calls."""
    question = {"role": "user", "content": "Please."}
    calls = [{"name": "write_file", "arguments": {"path": "x/y.py", "count": 3}}]
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdef123", "function": call} for call in calls]}
    templates = sorted(shared_data("templates").glob("*.jinja"))
    assert len(templates) >= 17
    for path in templates:
        source = path.read_text("utf-8")
        chat, form = ChatTemplate(source, "<s>", "</s>"), AnswerFormat.of(source)
        prompt = chat.render([question], tools=tools_of(TOOLS))
        whole = chat.render(
            [question, said], tools=tools_of(TOOLS), add_generation_prompt=False, calls_as_text=form.format.write
        )
        answer = whole[_begin(prompt, whole) :]
        for end in ENDS:
            answer = answer.split(end)[0]
        deltas = parse(source, list(answer), prompt if whole.startswith(prompt) else "")
        assert calls_of(deltas) == calls, (path.name, answer)


def _begin(prompt: str, whole: str) -> int:
    """Return where the answer begins: after the prompt, or after the last marker that both have."""
    same = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    return same if same == len(prompt) else 1 + max(whole.rfind(mark, 0, same) for mark in ">\n]")
