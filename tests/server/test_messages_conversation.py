"""Anthropic's conversations and tools as a chat: what each block becomes, and which place an error names."""

import json
from typing import Any

import pytest

from rest_local.api.bodies import check
from rest_local.api.errors import ApiError
from rest_local.api.messages import MessagesBody, Translated, translated
from rest_local.errors import OptionError, Place

PIXEL = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "ä.py", "lines": [1, 2]}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks) if blocks else "hi"}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(content: Any = "x = 1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def made(*messages: Any, late_system: bool = True, **fields: Any) -> Translated:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}
    return translated(check(json.dumps(body).encode(), MessagesBody), late_system=late_system)


def messages_of(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return [each.model_dump(exclude_none=True) for each in made(*messages, **fields).body.messages]


def refusal(*messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        made(*messages, **fields)
    assert caught.value.status == 400
    return caught.value


MARKED = text("You code.") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BLOCKS = [text("x-anthropic-billing-header: cc_version=1;"), MARKED, text(""), text("Be brief.")]


@pytest.mark.parametrize(
    ("system", "messages", "said"),
    [
        ("S", [user(), assistant(text(" a\n"))], [("system", "S"), ("user", "hi"), ("assistant", " a\n")]),
        (BLOCKS, [user()], [("system", "You code.\n\nBe brief."), ("user", "hi")]),
        ("S", [{"role": "system", "content": "First."}, user()], [("system", "S\n\nFirst."), ("user", "hi")]),
        ("S", [user(text("a"), text("b")), user(text("c"))], [("system", "S"), ("user", "a\nb\nc")]),
    ],
)
def test_texts_become_messages(system: Any, messages: list[Any], said: list[tuple[str, str]]) -> None:
    """A system message in front joins the system prompt, and messages of one role are one."""
    found = messages_of(*messages, *([user()] if messages[-1]["role"] == "assistant" else []), system=system)
    assert [(each["role"], each["content"]) for each in found][: len(said)] == said


@pytest.mark.parametrize("late", [True, False])
def test_a_later_system_message_does_not_change_the_beginning(late: bool) -> None:
    before = messages_of(user(text("a")), system="S", late_system=late)
    said = messages_of(user(text("a")), {"role": "system", "content": "b"}, system="S", late_system=late)
    assert said[0] == before[0]
    expected = [("user", "a"), ("system", "b")] if late else [("user", "a\nb")]
    assert [(each["role"], each["content"]) for each in said[1:]] == expected


def test_calls_and_results() -> None:
    asked = (assistant(text("I look.")), assistant(CALL))  # two messages of one role
    said = messages_of(user(), *asked, user(text("and then?"), result(is_error=False)))
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "user"]
    assert said[1]["content"] == "I look."
    (call,) = said[1]["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("toolu_1", "function", "read")
    assert json.loads(call["function"]["arguments"]) == CALL["input"]
    assert "ä" in call["function"]["arguments"]
    assert said[2] == {"role": "tool", "tool_call_id": "toolu_1", "name": "read", "content": "x = 1"}
    assert said[3] == {"role": "user", "content": "and then?"}, "results first: they belong to the calls"


@pytest.mark.parametrize(
    ("content", "more", "expected"),
    [
        (None, {}, ""),
        ("", {}, ""),
        ([], {}, ""),
        ([text("a"), text("b")], {}, "a\nb"),
        ("no such file", {"is_error": True}, "Error: no such file"),
        ("Error: no such file", {"is_error": True}, "Error: no such file"),
        ([{"type": "tool_reference", "tool_name": "write"}], {}, "The tool write is available."),
        (
            [{"type": "search_result", "source": "a.md", "title": "A", "content": [text("found")]}],
            {},
            "<search_result>\ntitle: A\nsource: a.md\nfound\n</search_result>",
        ),
    ],
)
def test_contents_of_a_result(content: Any, more: Any, expected: str) -> None:
    assert messages_of(user(), assistant(CALL), user(result(content, **more)))[2]["content"] == expected


def test_images_become_parts_and_those_of_a_result_follow_it() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    image = {"type": "image", "source": PIXEL}
    assert messages_of(user(text("look"), image))[0]["content"] == [text("look"), part]
    said = messages_of(user(), assistant(CALL), user(result([text("a"), image])))
    assert said[2]["content"] == "a"
    assert said[3] == {"role": "user", "content": [part]}


def test_documents_become_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "the text"}
    document = {"type": "document", "source": source, "title": "T", "context": "C", "citations": {"enabled": True}}
    expected = "<document>\ntitle: T\ncontext: C\nthe text\n</document>"
    assert messages_of(user(document))[0]["content"] == expected
    of_blocks = {"type": "document", "source": {"type": "content", "content": [text("the text")]}}
    assert messages_of(user(of_blocks))[0]["content"] == "<document>\nthe text\n</document>"


def test_thoughts_are_passed_back_and_what_is_encrypted_is_left_out() -> None:
    thought = {"type": "thinking", "thinking": "I think.", "signature": "s"}
    said = messages_of(user(), assistant(thought, {"type": "redacted_thinking", "data": "?"}, CALL), user(result()))
    assert said[1]["reasoning_content"] == "I think."
    assert said[1]["content"] == ""
    assert "redacted" not in str(said)


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    chat = made(user(), {"role": "assistant", "content": "The sign is"}, thinking={"type": "adaptive"})
    assert chat.begun == "The sign is"
    assert len(chat.body.messages) == 1
    assert chat.body.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert made(user(), {"role": "assistant", "content": ""}).begun == ""


SEARCHED: list[Any] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
        {"type": "web_search_result", "url": "http://x", "title": "t", "encrypted_content": "z", "page_age": None}]},
]  # fmt: skip
ADVISED: list[Any] = [
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "advisor", "input": {}},
    {"type": "advisor_tool_result", "tool_use_id": "srvtoolu_2",
     "content": {"type": "advisor_result", "text": "Wait.", "encrypted_content": "z"}},
]  # fmt: skip
FROM_MCP: list[Any] = [
    {"type": "mcp_tool_use", "id": "m", "name": "list", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [text("a"), text("b")]},
]


@pytest.mark.parametrize(
    ("blocks", "name", "found"),
    [
        (SEARCHED, "web_search", '[{"type": "web_search_result", "url": "http://x", "title": "t"}]'),
        (ADVISED, "advisor", '{"type": "advisor_result", "text": "Wait."}'),
        (FROM_MCP, "list", "a\nb"),
    ],
)
def test_tools_that_ran_elsewhere_are_calls_and_results(blocks: list[Any], name: str, found: str) -> None:
    """Another server began the conversation with text, two calls one after another, and text."""
    again = [each | {key: "again" for key in ("id", "tool_use_id") if key in each} for each in blocks]
    said = messages_of(user(), assistant(text("Look:"), *blocks, *again, text("Done.")), user(text("b")))
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert [each.get("content") for each in said] == ["hi", "Look:", found, "", found, "Done.", "b"]
    assert said[1]["tool_calls"][0]["function"]["name"] == said[2]["name"] == name
    assert said[4]["tool_call_id"] == said[3]["tool_calls"][0]["id"] == "again"
    begun = made(user(), assistant(*blocks, text("Do")))
    assert (begun.begun, [each.role for each in begun.body.messages]) == ("Do", ["user", "assistant", "tool"])
    assert "no earlier tool_use" in refusal(user(), assistant(blocks[1], text("x")), user()).message


def test_fields_of_the_answer() -> None:
    chat = made(
        user(), stop_sequences=["a", "b"], temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "u1"},
        stream=True, output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        thinking={"type": "enabled", "budget_tokens": 2000}, service_tier="auto", context_management={"edits": []},
    ).body  # fmt: skip
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_k, chat.top_p) == (5, ["a", "b"], 0.5, 3, 0.9)
    assert (chat.prompt_cache_key, chat.stream, chat.model) == ("u1", True, "m")
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == {"type": "object"}


def test_a_model_reasons_only_if_requested() -> None:
    for thinking in (None, {"type": "disabled"}):
        assert made(user(), thinking=thinking).body.chat_template_kwargs == {
            "enable_thinking": False,
            "thinking": False,
        }


def test_tools_and_choices() -> None:
    chat = made(user(), tools=[READ | {"strict": True, "cache_control": {"type": "ephemeral"}}]).body
    assert chat.tools == [
        {
            "type": "function",
            "function": {
                "name": "read",
                "description": "Reads.",
                "parameters": READ["input_schema"],
                "strict": True,
            },
        }
    ]
    assert chat.tool_choice is None
    for choice, expected in [("auto", "auto"), ("any", "required"), ("none", "none")]:
        assert made(user(), tools=[READ], tool_choice={"type": choice}).body.tool_choice == expected
    forced = {"type": "tool", "name": "read", "disable_parallel_tool_use": True}
    chat = made(user(), tools=[READ], tool_choice=forced).body
    assert chat.tool_choice.function.name == "read"  # type: ignore[union-attr]
    assert chat.parallel_tool_calls is False


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "bash_20250124", "name": "bash"}, ["command", "restart"]),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, ["insert_text", "view_range"]),
        ({"type": "memory_20250818", "name": "memory"}, ["rename", "/memories"]),
    ],
)
def test_the_model_is_told_the_arguments_of_tools_that_anthropic_defines(tool: Any, words: list[str]) -> None:
    (offered,) = made(user(), tools=[tool]).body.tools or ()
    assert offered["function"]["name"] == tool["name"]
    assert offered["function"]["parameters"] == {"type": "object"}
    assert all(word in offered["function"]["description"] for word in words)


def test_tools_that_cannot_run_here_are_left_out_or_refused() -> None:
    assert [tool["function"]["name"] for tool in made(user(), tools=[SEARCH, READ]).body.tools or ()] == ["read"]
    alone = refusal(user(), tools=[SEARCH])
    assert alone.message == "tools[0].type: web_search_20250305 runs on Anthropic's servers, not on this one"
    forced = refusal(user(), tools=[READ, SEARCH], tool_choice={"type": "tool", "name": "web_search"})
    assert forced.message.startswith("tools[1].type: ")


WRONG: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("messages[0].role", [assistant(text("a")), user()], {}),
    ("messages", [{"role": "system", "content": "s"}], {}),
    ("messages[0].content", [{"role": "user", "content": ""}], {}),
    ("messages[0].content", [{"role": "user", "content": []}], {}),
    ("messages[0].content", [user(text(""))], {}),
    ("messages[1].content", [user(), assistant(), user()], {}),
    ("messages[0].content[0].type", [user({"type": "hologram"})], {}),
    ("messages[0].content[1].type", [user(text("a"), {"text": "b"})], {}),
    ("messages[0].content[0].text", [user({"type": "text", "text": 1})], {}),
    ("messages[0].content[0].tool_use_id", [user(result())], {}),
    ("messages[2].content[0].tool_use_id", [user(), assistant(text("a")), user(result())], {}),
    ("messages[2].content[0].content[0].type", [user(), assistant(CALL), user(result([{"type": "x"}]))], {}),
    ("messages[2].content[0].content", [user(), assistant(CALL), user(result(5))], {}),
    ("messages[2].content[0].content", [user(), assistant(CALL), user(result(["a"]))], {}),
    ("messages[1].content[0]", [user(), assistant(CALL)], {}),
    ("messages[1].content[0].input", [user(), assistant(CALL | {"input": "{}"}), user(result())], {}),
    ("messages[1].content[0].id", [user(), assistant({"type": "tool_use"}), user()], {}),
    ("messages[1].content[0].type", [user(), assistant({"type": "image", "source": PIXEL}), user()], {}),
    ("messages[0].content[0].source", [user({"type": "image"})], {}),
    ("messages[0].content[0].source.type", [user({"type": "image", "source": {"type": "url", "url": "http://x"}})], {}),
    ("messages[0].content[0].source.media_type", [user({"type": "image", "source": PIXEL | {"media_type": "x"}})], {}),
    ("messages[0].content[0].source.type", [user({"type": "document", "source": PIXEL})], {}),
    ("system[0].type", [user()], {"system": [{"type": "image"}]}),
    ("tools[0].name", [user()], {"tools": [{"input_schema": {}}]}),
    ("tools[0].input_schema", [user()], {"tools": [{"name": "f"}]}),
    ("tools[1].type", [user()], {"tools": [READ, {"type": "computer_20250124", "name": "computer"}]}),
    ("tools[0].type", [user()], {"tools": [{"type": 5, "name": "x"}]}),
    ("tool_choice", [user()], {"tool_choice": {"type": "any"}}),
    ("tool_choice.name", [user()], {"tools": [READ], "tool_choice": {"type": "tool", "name": "write"}}),
    ("messages[1]", [user(), assistant(text("{"))], {"tools": [READ], "tool_choice": {"type": "any"}}),
    ("messages[1]", [user(), assistant(text("{"))], {"output_format": {"type": "json_schema", "schema": {}}}),
    ("mcp_servers", [user()], {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("max_tokens", [user()], {"max_tokens": None}),
    ("messages", [], {}),
    ("messages[0].role", [{"role": "tool", "content": "x"}], {}),
    ("messages[1].content", [user(), {"role": "user"}], {}),
    ("thread", [user()], {"thread": {"type": "create"}}),
    ("thinking.type", [user()], {"thinking": {"type": "loud"}}),
]


def test_an_error_names_its_place() -> None:
    for place, messages, fields in WRONG:
        error = refusal(*messages, **fields)
        assert error.message.startswith(f"{place}: ")
        assert error.param == place.partition("[")[0].partition(".")[0]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("messages", 0), "system"),
        (("messages", 4, "content"), "messages[2].content"),
        (("messages", 4, "content", 0), "messages[2].content[0].content[1]"),
        (("messages", 4, "content", 0, "image_url", "url"), "messages[2].content[0].content[1].source"),
        (("messages", 4, "content", 1, "image_url"), "messages[2].content[1].source"),
        (("messages", 4, "content", 7), "messages[2].content"),
        (("messages", 9, "content"), "messages[9].content"),
        (("tools", 0, "type"), "tools[0].type"),
    ],
)
def test_an_error_of_the_chat_gets_the_place_in_the_body(place: Place, expected: str) -> None:
    image = {"type": "image", "source": PIXEL}
    chat = made(user(), assistant(CALL), user(result([text("a"), image]), image), system="S")

    def fails() -> None:
        raise OptionError("cannot be read: [5]", place)

    with pytest.raises(OptionError) as caught:
        chat.run(fails)
    assert str(caught.value) == f"{expected}: cannot be read: [5]"
