"""Every template renders every conversation completely: system prompts, tools, calls, results, parts, any order."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.chat.conversation import ChatTemplate
from rest_local.chat.renderer import render
from rest_local.chat.tools import tools_of
from rest_local.errors import OptionError, TemplateFailed

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS_TOO = "{% for t in tools or [] %}<|tool|>{{ t | tojson }}{% endfor %}" + CHATML
STRICT = (  # Like Gemma 2 and the older Mistrals, it takes no system role, only turns of text.
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SINGLE = CHATML.replace(
    "{% for c in",
    "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}{% for c in",
)
TEXT_ARGUMENTS = CHATML.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
SHORT_IDS = CHATML.replace(
    "{% for c in m.tool_calls or [] %}",
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}({{ c.id }})",
)
NOT_NONE = (  # like DeepSeek: an extra answer next to the calls, if the content is not none
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.content is not none %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
IN_PARTS = (  # like SmolVLM: text in any other form is left out
    "{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ANSWERS_IN_PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
)
NOT_EMPTY = (  # like Ministral 3: turns without those of calls and results, and no empty answer
    "{% set n = namespace(turns=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (n.turns % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% set n.turns = n.turns + 1 %}{% endif %}"
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    "{% endfor %}"
) + TOOLS_TOO
OWN = {"chatml": CHATML, "tools": TOOLS_TOO, "strict": STRICT, "single": SINGLE, "text arguments": TEXT_ARGUMENTS,
       "short ids": SHORT_IDS, "not none": NOT_NONE, "in parts": IN_PARTS,
       "answers in parts": ANSWERS_IN_PARTS, "not empty": NOT_EMPTY}  # fmt: skip

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather now",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_files"}},
]


def _call(name: str, arguments: str, known: str) -> dict[str, Any]:
    return {"id": known, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "You are terse."}
QUESTION = {"role": "user", "content": "Weather in Köln & <Bonn>?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        _call("get_weather", '{"city": "Köln"}', "call_0123456789abcdefghijklmn"),
        _call("list_files", "{}", "call_1123456789abcdefghijklmn"),
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_0123456789abcdefghijklmn", "content": "rain 11"},
    {"role": "tool", "tool_call_id": "call_1123456789abcdefghijklmn", "content": "a.txt b.txt"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "developer": [{"role": "developer", "content": "You are terse."}, QUESTION],
    "parts": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Weather in Köln & <Bonn>?"}]}],
    "turns": [SYSTEM, QUESTION, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Thanks!"}],
    "two questions": [SYSTEM, QUESTION, {"role": "user", "content": "Quickly."}],
    "two answers": [QUESTION, {"role": "assistant", "content": "Rain."}, {"role": "assistant", "content": "Snow."},
                    {"role": "user", "content": "Which?"}],
    "greeting first": [{"role": "assistant", "content": "Hello."}, QUESTION],
    "late system": [SYSTEM, QUESTION, {"role": "assistant", "content": "Rain."},
                    {"role": "system", "content": "Now in French."}, {"role": "user", "content": "Again."}],
    "results": [SYSTEM, QUESTION, CALLS, *RESULTS],
    "results and answer": [QUESTION, CALLS, *RESULTS, {"role": "assistant", "content": "Rain."},
                           {"role": "user", "content": "Thanks!"}],
    "interrupted": [QUESTION, CALLS, *RESULTS, {"role": "user", "content": "Stop."}],
    "results with text": [SYSTEM, QUESTION, CALLS, *RESULTS, {"role": "user", "content": "And?"},
                          {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Thanks!"}],
    "stopped at once": [QUESTION, {"role": "assistant", "content": ""}, {"role": "user", "content": "Again!"}],
    "one result": [QUESTION, {**CALLS, "content": "", "tool_calls": CALLS["tool_calls"][:1]}, RESULTS[0]],
    "content and calls": [QUESTION, {**CALLS, "content": "Let me look."}, *RESULTS],
    "results the other way": [QUESTION, CALLS, *RESULTS[::-1]],
    "reasoning": [QUESTION, {**CALLS, "reasoning_content": "Need data."}, *RESULTS],
    "legacy": [QUESTION, {"role": "assistant", "content": None,
                          "function_call": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
               {"role": "function", "name": "get_weather", "content": "rain 11"}],
    "broken arguments": [QUESTION, {"role": "assistant", "tool_calls": [_call("get_weather", '{"city": "Kö', "x")]},
                         {"role": "tool", "tool_call_id": "x", "content": "error 7"}],
}  # fmt: skip


# With tools wherever tools are called, and where nothing is; without them elsewhere.
CASES = [
    *((name, TOOLS if any(m.keys() & {"tool_calls", "function_call"} for m in messages) else None)
      for name, messages in CONVERSATIONS.items()),
    ("system", TOOLS), ("turns", TOOLS), ("results", None),
]  # fmt: skip


def _words(messages: list[dict[str, Any]]) -> list[str]:
    """Return texts that the prompt must contain."""
    words = []
    for message in messages:
        content = message.get("content") or ""
        words += [content] if isinstance(content, str) else [part["text"] for part in content]
        calls = [call["function"] for call in message.get("tool_calls", [])] + [message.get("function_call") or {}]
        words += [call["name"] for call in calls if call]
        words += ["Kö" for call in calls if "Kö" in call.get("arguments", "")]
    return [word for word in words if word]


def _plain(text: str) -> str:
    """Return the text without JSON escapes, because some templates quote results."""
    return re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)


def _check(template: str, name: str, tools: list[dict[str, Any]] | None, strict: bool) -> None:
    messages = copy.deepcopy(CONVERSATIONS[name])
    chat = ChatTemplate(template, "<s>", "</s>")
    prompt = chat.render(messages, tools=tools_of(tools))
    assert messages == CONVERSATIONS[name]
    for word in _words(messages):
        assert word in _plain(prompt), word
    assert "None" not in prompt.replace("Union[", "")
    if tools:
        assert "get_weather" in prompt
        assert "list_files" in prompt
        assert "Weather now" in prompt
    if strict:
        without = chat.render(messages, tools=tools_of(tools), add_generation_prompt=False)
        assert prompt.startswith(without[: len(without) // 2])
        assert len(prompt) >= len(without)


@pytest.mark.parametrize(("name", "tools"), CASES)
@pytest.mark.parametrize("template", OWN)
def test_nothing_is_lost_in_templates_of_every_kind(
    template: str, name: str, tools: list[dict[str, Any]] | None
) -> None:
    _check(OWN[template], name, tools, strict=True)


def test_nothing_is_lost_in_the_templates_of_real_models(shared_data: Callable[[str], Path]) -> None:
    """One template after the other: the process that renders keeps few of them compiled."""
    templates = sorted(shared_data("templates").glob("*.jinja"))
    assert len(templates) >= 17
    for path, (name, tools) in itertools.product(templates, CASES):
        if "istral" in path.name and name == "content and calls":
            continue  # their templates drop text next to a call, and accept no message with it before
        try:
            _check(path.read_text("utf-8"), name, tools, strict=False)
        except (AssertionError, TemplateFailed) as error:
            raise AssertionError(f"{path.name}, {name}: {error}") from error


def test_the_prompt_ends_where_the_answer_begins(shared_data: Callable[[str], Path]) -> None:
    ends = r"(assistant\|>|<\|im_start\|>assistant\n|model\n|\[/INST\]|<think>\n(</think>)?|</think>\n*|" + (
        r"<\|end_header_id\|>\n\n|<\|end_of_role\|>|<\|assistant\|>\n|<channel\|>|<\|start\|>assistant)$"
    )
    for path in sorted(shared_data("templates").glob("*.jinja")):
        chat = ChatTemplate(path.read_text("utf-8"), "<s>", "</s>")
        for name in ("question", "system", "turns"):
            assert re.search(ends, chat.render(CONVERSATIONS[name])), (path.name, name)


def test_capabilities_of_real_models(shared_data: Callable[[str], Path]) -> None:
    def able(name: str) -> dict[str, bool]:
        source = shared_data(f"templates/{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, "<s>", "</s>").capabilities.__dict__

    qwen, llama = able("Qwen-Qwen2.5-7B-Instruct"), able("meta-llama-Llama-3.1-8B-Instruct")
    gemma, mistral = able("google-gemma-2-2b-it"), able("mistralai-Mistral-Nemo-Instruct-2407")
    assert all(qwen[key] for key in ("system", "tools", "tool_calls", "tool_results", "parallel_calls"))
    assert (llama["tool_calls"], llama["parallel_calls"]) == (True, False)
    assert [gemma[key] for key in ("system", "tools", "tool_calls", "tool_results")] == [False] * 4
    assert mistral["short_ids"]
    assert mistral["alternates"]


def test_text_is_put_into_parts_where_a_template_loses_it() -> None:
    turns = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, QUESTION]
    assert ChatTemplate(IN_PARTS).render(turns) == (
        "system: You are terse.<end>user: Hi<end>assistant: Yes<end>user: Weather in Köln & <Bonn>?<end>assistant:"
    )
    assert ChatTemplate(IN_PARTS).capabilities.part_roles
    assert "<|assistant|>Yes<|end|>" in ChatTemplate(ANSWERS_IN_PARTS).render(turns)
    assert ChatTemplate(CHATML).capabilities.part_roles == frozenset()


def test_long_ids_are_shortened_alike_in_calls_and_results() -> None:
    ids = re.findall(r"\(([^)]*)\)", ChatTemplate(SHORT_IDS).render(CONVERSATIONS["results"]))
    assert len(ids) == 4
    assert ids[:2] == ids[2:]
    assert all(len(known) == 9 and known.isalnum() for known in ids)


def test_the_system_message_joins_the_first_user_message() -> None:
    assert ChatTemplate(STRICT).render([SYSTEM, QUESTION]) == (
        "<user>You are terse.\n\nWeather in Köln & <Bonn>?<assistant>"
    )
    assert ChatTemplate(STRICT).render([SYSTEM]) == "<user>You are terse.<assistant>"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([3], r"messages\[0\]"),
        ([QUESTION, {"content": "x"}], r"messages\[1\]"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [7]}], r"content\[0\]"),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], r"tool_calls\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], r"tool_calls\[0\]"),
    ],
)
def test_invalid_messages_are_refused_with_their_place(messages: Any, place: str) -> None:
    with pytest.raises(OptionError, match=place):
        ChatTemplate(CHATML).render(messages)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text("ab", max_size=3)), max_size=9)
)
def test_the_strictest_template_accepts_any_order_of_roles(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": f"{text}{i}."} for i, (role, text) in enumerate(said)]
    if messages:
        prompt = ChatTemplate(STRICT).render(messages)
        assert all(message["content"] in prompt for message in messages)


CONVERSATION = [
    {"role": "user", "content": "What is <2+2>?"},
    {"role": "assistant", "content": "It is 4 & nothing else."},
    {"role": "user", "content": "Danke schön"},
]


def _render(template: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return render(template, CONVERSATION if messages is None else messages, bos="<s>", eos="</s>", **options)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ raise_exception.__code__.co_code }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9999999 }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('roles must\nalternate') }}",
        "{% for %}",
        "{{ messages[9].role }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson | nothing }}",
    ],
)
def test_errors_of_the_sandbox_and_the_template_are_one_line(template: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        _render(template)
    assert "\n" not in str(caught.value)
