"""Items of the Responses API: what becomes which message, texts of custom tools, and items that nobody expects."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.api.bodies import NamedFunction, NamedTool
from rest_local.api.errors import ApiError
from rest_local.api.response_tools import InputText, Toolbox
from rest_local.api.responses import ResponseBody, TranslatedRequest, seal, unseal
from rest_local.api.responses_answer import Writer
from rest_local.chat.tools import CallArguments, CallStart, Content, Reasoning
from rest_local.errors import OptionError

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x = 1"}


def turn(*items: Any, **fields: Any) -> TranslatedRequest:
    return TranslatedRequest.of(ResponseBody.model_validate({"input": list(items), **fields}))


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in turn(*items, **fields).chat.messages]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read."}]}
    second = {**CALL, "call_id": "c2"}
    made = messages(USER, thought, said, CALL, second, RESULT, {**RESULT, "call_id": "c2"}, thought, said)
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool", "assistant"]
    assert made[1]["content"] == "I read."
    assert made[1]["reasoning_content"] == "Hm."
    assert [call["id"] for call in made[1]["tool_calls"]] == ["c1", "c2"]
    assert made[2] == {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "x = 1"}
    assert made[4]["reasoning_content"] == "Hm."


DONE = {"type": "message", "role": "assistant", "content": "Done."}
SEARCH = {"type": "web_search_call", "id": "ws", "status": "completed"}
SING = {"role": "developer", "content": "Sing."}


@pytest.mark.parametrize(
    ("items", "instructions", "said"),
    [
        ([USER, CALL, DONE, DONE], None, ["user Hi", "assistant ", "assistant Done.", "assistant Done."]),
        ([SING, USER], "Be brief.", ["system Be brief.", "developer Sing.", "user Hi"]),
        ([USER, SEARCH], None, ["user Hi"]),  # what another server searched
    ],
)
def test_items_become_messages_in_order(items: list[Any], instructions: str | None, said: list[str]) -> None:
    """Text after a call is a message of its own."""
    made = messages(*items, instructions=instructions)
    assert [f"{message['role']} {message['content']}" for message in made] == said
    assert ["tool_calls" in message for message in made] == [text == "assistant " for text in said]


def test_parts_are_those_of_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    made = messages({"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]})
    assert made[0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    result = {**RESULT, "output": [{"type": "input_text", "text": "seen"}]}
    assert messages(USER, CALL, result)[2]["content"] == "seen"


def test_reasoning_returns_in_any_of_its_forms() -> None:
    thought = "Ümlaut \U0001f600\n"
    assert unseal(seal(thought)) == thought
    for foreign in (None, "", "gAAAAAB", "rest-local:!", "rest-local:/w==", 3):
        assert unseal(foreign) == ""
    sealed = {"type": "reasoning", "encrypted_content": seal(thought), "summary": []}
    foreign = {"type": "reasoning", "encrypted_content": "gAAAAAB", "summary": [{"type": "summary_text", "text": "S"}]}
    assert messages(USER, sealed, CALL)[1]["reasoning_content"] == thought
    assert messages(USER, foreign, CALL)[1]["reasoning_content"] == "S"


def test_an_error_of_the_chat_names_the_item() -> None:
    made = turn({"type": "web_search_call"}, USER, CALL, instructions="Sing.")
    assert str(made.error(OptionError("no", ("messages", 1, "content", 0)))) == "input[1].content[0]: no"
    image = ("messages", 1, "content", 0, "image_url", "url")
    assert str(made.error(OptionError("no", image))) == "input[1].content[0].image_url: no"
    assert str(made.error(OptionError("x", ("messages", 0)))) == "instructions: x"
    assert str(made.error(OptionError("response_format: no"))) == "text.format: no"
    assert str(made.error(OptionError("temperature: no"))) == "temperature: no"


def test_names_of_tools_go_both_ways() -> None:
    inner = {"type": "function", "name": "close", "parameters": {}}
    tools = [
        {"type": "namespace", "name": "agents", "tools": [inner]},
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
    ]
    called = {**CALL, "name": "close", "namespace": "agents"}
    made = turn(USER, called, tools=tools, tool_choice={"type": "custom", "name": "exec"})
    assert [tool["function"]["name"] for tool in made.chat.tools or []] == ["agents__close", "exec"]
    assert made.chat.tool_choice == NamedTool(function=NamedFunction(name="exec"))
    assert made.chat.messages[1].model_dump()["tool_calls"][0]["function"]["name"] == "agents__close"
    writer = Writer(made.id, made.toolbox, sealed=False)
    writer.add([CallStart(0, "x", "agents__close"), CallArguments(0, "{}"), CallStart(1, "y", "exec")])
    writer.add([CallArguments(1, '{"input": "1"}'), CallStart(2, "z", "unknown")])
    writer.close(cut=False)
    assert [(item["type"], item["name"], item.get("namespace")) for item in writer.items] == [
        ("function_call", "close", "agents"),
        ("custom_tool_call", "exec", "functions"),
        ("function_call", "unknown", None),
    ]


def test_the_text_of_a_custom_call_keeps_its_expression() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "add|remove"}
    (tool,) = turn(USER, tools=[{"type": "custom", "name": "list", "format": form}]).chat.tools or ()
    assert tool["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:add|remove)$"
    assert tool["function"]["strict"] is True


def test_the_model_is_told_a_lark_grammar_of_a_custom_call() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "add" | "remove"'}
    (tool,) = turn(USER, tools=[{"type": "custom", "name": "list", "format": form}]).chat.tools or ()
    assert form["definition"] in tool["function"]["description"]
    assert "strict" not in tool["function"]


def test_two_tools_of_one_name_are_refused() -> None:
    inner = {"type": "function", "name": "b"}
    tools = [{"type": "function", "name": "a__b"}, {"type": "namespace", "name": "a", "tools": [inner]}]
    with pytest.raises(ApiError, match="a__b"):
        turn(USER, tools=tools)
    assert turn(USER, tools=[inner, inner]).chat.tools


def test_only_allowed_tools_are_offered() -> None:
    tools = [{"type": "function", "name": name} for name in "abc"] + [{"type": "web_search"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    made = turn(USER, tools=tools, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in made.chat.tools or []] == ["b"]
    assert made.chat.tool_choice == "required"
    nothing = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert turn(USER, tools=tools, tool_choice=nothing).chat.tool_choice == "none"
    with pytest.raises(ApiError, match="web_search"):
        turn(USER, tools=tools[3:], tool_choice="required")


def test_effort_reaches_the_template() -> None:
    assert turn(USER, reasoning={"effort": "xhigh"}).chat.chat_template_kwargs == {"reasoning_effort": "high"}
    off = turn(USER, reasoning={"effort": "none"}, chat_template_kwargs={"a": 1}).chat.chat_template_kwargs
    assert off is not None
    assert off["enable_thinking"] is False
    assert off["a"] == 1
    assert turn(USER, reasoning={"summary": "auto"}).chat.chat_template_kwargs is None


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.text('\\"/\n\t\u2028\U0001f600é', max_size=20)


@given(TEXTS, st.booleans(), st.lists(st.integers(1, 4), min_size=1))
def test_the_text_of_a_call_does_not_depend_on_cuts(text: str, ascii_only: bool, sizes: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader, said, at = InputText(), "", 0
    while at < len(arguments):
        size = sizes[at % len(sizes)]
        said += reader.feed(arguments[at : at + size])
        at += size
    assert said + reader.finish() == text
    assert reader.text == text


@given(st.text('{}":,\\ inputd8af\n', max_size=30))
def test_arguments_of_any_form_are_some_text(arguments: str) -> None:
    reader = InputText()
    said = "".join(map(reader.feed, arguments)) + reader.finish()
    assert reader.text == said
    said.encode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"patch": "a\\nb"}', "a\nb"), ('{"other": 1, "input": "x"}', "x"), ('{"a": "1", "b": "2"}', None), ("{}", "")],
)
def test_a_custom_call_in_another_form_loses_nothing(arguments: str, text: str | None) -> None:
    reader = InputText()
    assert reader.feed(arguments) + reader.finish() == (arguments if text is None else text)


@given(TEXTS, st.integers(0, 60))
def test_a_call_that_is_cut_off_keeps_what_was_said(text: str, length: int) -> None:
    reader = InputText()
    said = reader.feed(json.dumps({"input": text})[:length])
    said += reader.finish()
    assert text.startswith(said)


DELTAS = st.lists(
    st.builds(Content, st.text(min_size=1, max_size=5))
    | st.builds(Reasoning, st.text(min_size=1, max_size=5))
    | st.sampled_from([CallStart(0, "c0", "read"), CallStart(1, "c1", "patch"), CallStart(2, "c2", "tool_search")]),
    max_size=8,
)


@given(DELTAS, st.booleans())
def test_events_tell_what_the_items_are(deltas: list[Any], cut: bool) -> None:
    box = Toolbox()
    box.add([{"type": "custom", "name": "patch"}, {"type": "tool_search", "execution": "client"}], "tools")
    writer = Writer("resp_" + "0" * 48, box, sealed=True)
    events = [event for delta in deltas for event in writer.add([delta])] + writer.close(cut=cut)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == writer.items
    assert [event["output_index"] for event in done] == list(range(len(writer.items)))
    assert [event["item"]["id"] for event in added] == [item["id"] for item in writer.items]
    assert len({item["id"] for item in writer.items}) == len(writer.items)
    assert bool(writer.items) or cut
    for number, item in enumerate(writer.items):
        mine = [event for event in events if event.get("output_index") == number]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        whole = {
            "message": lambda item=item: item["content"][0]["text"],
            "reasoning": lambda item=item: item["content"][0]["text"],
            "function_call": lambda item=item: item["arguments"],
            "custom_tool_call": lambda item=item: item["input"],
            "tool_search_call": lambda: "",
        }[item["type"]]()
        assert text == whole
        last = number == len(writer.items) - 1
        assert item["status"] == ("incomplete" if cut and last else "completed")
