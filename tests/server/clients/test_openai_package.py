"""The `openai` package, in addition to `test_openai_client`: the asynchronous client, streamed calls, parsed answers,
and the class of every error.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from live import Live, Scripted
from pydantic import BaseModel
from recorded import TOOLS

from rest_local.errors import DecodeFailed

MESSAGES: Any = [{"role": "user", "content": "What is in a.py?"}]
CALL = ('<tool_call>\n{"name": "read_', 'file", "arguments": {"path"', ': "a.py"}}\n</tool_call>')


def client_of(live: Live, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", **{"api_key": "any", "max_retries": 0, "timeout": 60} | options)


class Place(BaseModel):
    """What arguments are parsed into."""

    path: str
    line: int


class Entry(BaseModel):
    """What an answer is parsed into; short, whatever the model would like to say."""

    kind: Literal["file", "folder"]
    hidden: bool


def test_an_abandoned_stream_frees_its_slot(quiet: Live) -> None:

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{quiet.url}/v1", api_key="any") as client:
            stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    assert quiet.service.stream().cancelled.wait(30)


def test_calls_arrive_in_deltas(hello: Live) -> None:
    hello.service.answer = CALL
    with (
        client_of(hello) as client,
        client.chat.completions.stream(model="demo", messages=MESSAGES, tools=TOOLS) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("read_file", '{"path": "a.py"}')


def test_an_answer_is_parsed_into_a_type(demo: Live) -> None:
    with client_of(demo) as client:
        made = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Entry, max_tokens=300, temperature=0
        )
    assert isinstance(made.choices[0].message.parsed, Entry)


def test_arguments_are_parsed_into_a_type(hello: Live) -> None:
    hello.service.answer = ('<tool_call>\n{"name": "Place", "arguments": {"path": "a.py", "line": 7}}\n</tool_call>',)
    with client_of(hello) as client:
        made = client.chat.completions.parse(
            model="demo", messages=MESSAGES, tools=[openai.pydantic_function_tool(Place)]
        )
    (call,) = made.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Place(path="a.py", line=7)


def test_an_answer_cut_by_a_limit_has_its_error_class(demo: Live) -> None:
    with client_of(demo) as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Entry, max_tokens=2)


def test_the_client_retries_when_the_queue_is_full(scripted: Scripted) -> None:
    """By its own retries, after the time that the server gives."""
    live = scripted(room=0)
    with client_of(live) as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="demo", prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"

    class Room:
        """Lets the second attempt in."""

        def __init__(self) -> None:
            self.asked = 0

        def __le__(self, running: int) -> bool:  # `running >= room`, as the service asks
            self.asked += 1
            return self.asked == 1

    live.service.room = Room()
    with client_of(live, max_retries=1) as client:
        assert client.completions.create(model="demo", prompt="x").choices[0].text == "Hello world"
    assert live.service.room.asked == 2


def test_an_error_during_a_stream_is_raised(quiet: Live) -> None:
    with client_of(quiet) as client:
        stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        submitted = quiet.service.stream()
        submitted.give("half")
        submitted.end("error", error=DecodeFailed(-3, 4))
        with pytest.raises(openai.APIError, match="llama_decode"):
            list(stream)
