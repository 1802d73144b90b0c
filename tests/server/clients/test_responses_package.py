"""OpenAI's Responses API with the `openai` package: whole and streamed, tools, parsed answers, errors.

Every answer and every event is also validated by the package's types, which the client itself does not do.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from live import Live, call, data_of, pieces, prompt_of
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_openai_package import client_of

from rest_local.errors import DecodeFailed

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
READ = {
    "type": "function", "name": "read_file", "description": "Reads a file.", "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}  # fmt: skip
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
PATCHED = '*** Begin Patch\n*** Update File: ä.py\n-"a\\b"\n+\U0001f600\n*** End Patch'


def events_of(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, in which each is named by its type, and numbered without gaps."""
    answer = live.post("/v1/responses", body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n", 1) for block in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def kinds(events: list[dict[str, Any]]) -> Iterator[str]:
    """Return types without the prefix, and repeated deltas once."""
    last = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind != last or not kind.endswith("delta"):
            yield kind
        last = kind


def test_a_stream_is_the_whole_answer(demo: Live) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "def area(radius):", "max_output_tokens": 12, "temperature": 0}
    asked |= {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"}
    with client_of(demo) as client:
        whole = client.responses.create(**asked)
        deltas = []
        with client.responses.stream(**asked) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                last = event
    Response.model_validate(whole.model_dump())
    assert 0 < whole.usage.output_tokens <= 12
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert (whole.instructions, whole.metadata, whole.temperature) == ("Be brief.", {"a": "b"}, 0)
    assert (whole.id[:5], whole.output[0].id[:4]) == ("resp_", "msg_")
    assert "".join(deltas) == whole.output_text != ""
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_reasoning_calls_and_text_are_items_of_their_own(hello: Live) -> None:
    hello.service.answer = pieces("<think>Look first.</think>I read it.\n" + call("read_file", path="a.py"))
    events = events_of(hello, {"input": "What is in a.py?", "tools": [READ]})
    item = ["output_item.added"]
    part = [*item, "content_part.added"]
    assert list(kinds(events)) == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        *part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        *item, "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = Response.model_validate(events[-1]["response"])
    thought, said, called = final.output
    assert (thought.type, thought.content[0].text, thought.encrypted_content) == ("reasoning", "Look first.", None)
    assert (said.type, said.content[0].text) == ("message", "I read it.")
    assert (called.type, called.name, called.arguments) == ("function_call", "read_file", '{"path": "a.py"}')
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
    assert final.tools[0].name == "read_file"


def test_the_text_of_a_custom_tool_is_no_json(hello: Live) -> None:
    hello.service.answer = pieces(call("apply_patch", input=PATCHED), 3)
    events = events_of(hello, {"input": "Edit it.", "tools": [PATCH]})
    assert list(kinds(events))[2:-1] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert len(deltas) >= 1
    assert "".join(deltas) == PATCHED
    (called,) = Response.model_validate(events[-1]["response"]).output
    assert (called.type, called.name, called.input) == ("custom_tool_call", "apply_patch", PATCHED)


def test_a_search_for_tools_is_the_clients(hello: Live) -> None:
    hello.service.answer = pieces(call("tool_search", query="files"))
    tools = [{"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {}}]
    with client_of(hello) as client:
        made = client.responses.create(model="demo", input="Find a tool.", tools=tools)
        (found,) = Response.model_validate(made.model_dump()).output
        assert (found.type, found.execution, found.arguments) == ("tool_search_call", "client", {"query": "files"})
        hello.service.answer = pieces(call("read_file", path="b.py"))
        output = {"type": "tool_search_output", "call_id": found.call_id, "execution": "client", "tools": [READ]}
        items: Any = [{"role": "user", "content": "Find a tool."}, found.model_dump(), output]
        more = client.responses.create(model="demo", input=items, tools=tools)
    assert more.output[0].type == "function_call"
    prompt = prompt_of(hello, 1)
    assert "Found: read_file" in prompt
    assert "Reads a file." in prompt


def test_a_forced_custom_call_keeps_its_grammar(demo: Live) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r"\*\*\* Begin\n([+-][a-z]{1,4}\n){1,2}\*\*\* End\n?"}
    with client_of(demo) as client:
        made = client.responses.create(
            model="demo", input="Hi", tools=[{"type": "custom", "name": "patch", "format": form}],
            tool_choice="required", max_output_tokens=300, parallel_tool_calls=False,
        )  # fmt: skip
    assert re.fullmatch(form["definition"], made.output[-1].input)


def test_a_limit_leaves_an_answer_incomplete(demo: Live) -> None:
    with client_of(demo) as client:
        made = client.responses.create(model="demo", input="def add(a, b):", max_output_tokens=2, temperature=0)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[-1].status == "incomplete"
    events = events_of(demo, {"input": "def add(a, b):", "max_output_tokens": 2, "temperature": 0})
    assert events[-1]["type"] == "response.incomplete"


def test_logprobs_are_those_of_the_text(demo: Live) -> None:
    with client_of(demo) as client:
        made = client.responses.create(
            model="demo", input="Hi", max_output_tokens=4, temperature=0, top_logprobs=2,
            include=["message.output_text.logprobs"],
        )  # fmt: skip
    entries = made.output[0].content[0].logprobs
    assert len(entries) == made.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = events_of(demo, {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "top_logprobs": 2})
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in entries][: len(streamed)]


def test_the_last_event_of_a_failed_stream_has_what_there_was(quiet: Live) -> None:
    with (
        quiet.client() as client,
        client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as answer,
    ):
        submitted = quiet.service.stream()
        submitted.give("half")
        submitted.end("error", error=DecodeFailed(-3, 4))
        text = answer.read().decode()
    events = data_of(text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    for event in events:
        EVENT.validate_python(event)
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert "llama_decode" in failed["error"]["message"]
    assert failed["output"], "the item that was begun"
    assert failed["store"] is False


MESSAGE = {"role": "user", "content": "Hi"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [MESSAGE, MESSAGE, MESSAGE, {"type": "sonnet"}]}, "input[3].type"),
    ({"input": [{"type": None}]}, "input[0].type"),
    ({"input": [{"role": "poet", "content": "Hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "image_url"),
    ({"input": [MESSAGE, {"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[1].call_id"),
    ({"input": [MESSAGE, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[1].call_id"),
    ({"input": [MESSAGE, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
    ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary[0].text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": "Hi", "tools": [READ, {"type": "code_interpreter"}]}, "tools[1].type"),
    ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "Hi", "tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.definition"),
    ({"input": "Hi", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools"),
    ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
    ({"input": "Hi", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"input": "Hi", "tools": [READ], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"input": "Hi", "text": {"format": {"type": "yaml"}}}, "text"),
    ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": [MESSAGE, {"type": "item_reference", "id": "msg_1_0"}]}, "input[1]"),
    ({"input": "Hi", "background": True}, "background"),
    ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
    ({"input": "Hi", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "Hi", "metadata": {"a": 1}}, "metadata"),
    ({"input": "Hi", "truncation": "some"}, "truncation"),
    ({"input": "word " * 4000}, "input"),
]


def test_bad_input_is_refused_by_its_place(hello: Live) -> None:
    for body, param in WRONG:
        answer = hello.post("/v1/responses", body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert param in error["param"]
        assert error["param"] in error["message"] or error["code"] == "context_length_exceeded"
        assert not hello.service.streams


def test_a_schema_that_cannot_be_kept_names_the_clients_field(hello: Live) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "array", "uniqueItems": True}}
    answer = hello.post("/v1/responses", {"input": "Hi", "text": {"format": form}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("text.format")
    assert answer.json()["error"]["param"] == "text"


def test_fields_that_are_null_are_absent(hello: Live) -> None:
    names = (
        "instructions", "previous_response_id", "store", "tools", "tool_choice", "parallel_tool_calls",
        "max_output_tokens", "text", "reasoning", "include", "top_logprobs", "truncation", "metadata", "temperature",
        "prompt_cache_key", "user", "background", "conversation", "prompt", "stream", "model", "service_tier",
    )  # fmt: skip
    item = {"type": None, "id": None, "status": None, "role": "user", "content": "Hi"}
    answer = hello.post("/v1/responses", dict.fromkeys(names) | {"input": [item]})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
