"""The `openai` package, in addition to `test_openai_client`: the asynchronous client, streamed calls, parsed answers,
and the class of every error.
"""

from typing import Any, Literal

import openai
import pytest
from live import Live, Scripted
from pydantic import BaseModel

from rest_local.errors import DecodeFailed

MESSAGES: Any = [{"role": "user", "content": "What is in a.py?"}]


def client_of(live: Live, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", **{"api_key": "any", "max_retries": 0, "timeout": 60} | options)


class Entry(BaseModel):
    """What an answer is parsed into; short, whatever the model would like to say."""

    kind: Literal["file", "folder"]
    hidden: bool


def test_an_answer_is_parsed_into_a_type(demo: Live) -> None:
    with client_of(demo) as client:
        made = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Entry, max_tokens=300, temperature=0
        )
    assert isinstance(made.choices[0].message.parsed, Entry)


def test_an_answer_cut_by_a_limit_has_its_error_class(demo: Live) -> None:
    with client_of(demo) as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Entry, max_tokens=2)


def test_the_client_retries_when_the_queue_is_full(scripted: Scripted) -> None:
    """By its own retries, after the time that the server gives."""
    live = scripted()

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
