"""The `openai` package: parsed answers, retries, faults in mid-stream, and what the demo model answers."""

from collections.abc import Iterator
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
    """In each protocol whose package does so."""
    import anthropic

    shared: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 300}
    with client_of(demo) as client:
        made = client.chat.completions.parse(**shared, response_format=Entry, temperature=0)
        response = client.responses.parse(model="demo", input="What is in a.py?", text_format=Entry, temperature=0)
    with anthropic.Anthropic(base_url=demo.url, api_key="any", max_retries=0, timeout=60) as other:
        message = other.messages.parse(**shared, extra_body={"temperature": 0}, output_format=Entry)
    assert isinstance(made.choices[0].message.parsed, Entry)
    assert isinstance(response.output_parsed, Entry)
    assert isinstance(message.parsed_output, Entry)


def test_an_answer_cut_by_a_limit_has_its_error_class(demo: Live) -> None:
    with client_of(demo) as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Entry, max_tokens=2)


def test_the_client_retries_when_the_queue_is_full(scripted: Scripted) -> None:
    """It retries by itself after the time that the server gives."""
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


# ---- With the demo model -------------------------------------------------------------------------------------------


ASKED = [{"role": "user", "content": "Write a function that adds two numbers."}]
# Two runs of one request give the same bits only in the same batches: alone, not drafted, evaluated whole.
SAME = {"cache_prompt": False, "ignore_eos": True, "rest_local": {"policy": "off"}}


@pytest.fixture
def client(demo: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="any dummy", max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream_have_the_same_text(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": ASKED, "max_tokens": 40, "temperature": 0, "extra_body": SAME}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.timings["predicted_n"] == 40
    assert {"draft_n", "draft_n_accepted", "prompt_ms", "predicted_per_second"} <= last.timings.keys()
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_draws_the_same_again(client: openai.OpenAI) -> None:
    def answers(seed: int, n: int = 1) -> list[str]:
        made = client.chat.completions.create(
            model="demo", messages=ASKED, max_tokens=16, temperature=1.5, seed=seed, n=n, extra_body=SAME
        )
        return [choice.message.content for choice in made.choices]

    assert len(set(answers(seed=2**40 + 3, n=3))) > 1, "each choice draws for itself"
    assert answers(seed=11) == answers(seed=11)


def test_logprobs_of_the_target(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="demo", messages=ASKED, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3, extra_body=SAME
    )
    entries = made.choices[0].logprobs.content
    assert len(entries) == made.usage.completion_tokens == 12
    assert b"".join(bytes(e.bytes) for e in entries).decode() == made.choices[0].message.content
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 3
        assert entry.logprob == tops[0] <= 0, "greedy: the token itself is the likeliest"


def test_prediction_is_counted(client: openai.OpenAI) -> None:
    """The drafts of this policy do not depend on measured times."""
    prompt = [{"role": "user", "content": "Say it again."}]
    said = client.chat.completions.create(model="demo", messages=prompt, max_tokens=60, temperature=0)
    text = said.choices[0].message.content
    again = client.chat.completions.create(
        model="demo",
        messages=prompt,
        max_tokens=60,
        temperature=0,
        prediction={"type": "content", "content": [{"type": "text", "text": text}]},
        extra_body={"rest_local": {"policy": "respec"}},
    )
    details = again.usage.completion_tokens_details
    assert again.choices[0].message.content == text
    assert 0 < details.accepted_prediction_tokens <= again.usage.completion_tokens
    assert said.usage.completion_tokens_details is None, "without a prediction there are no counts"


def test_completions_echo_ids_and_several_prompts(client: openai.OpenAI) -> None:
    ids = [319, 348, 383]
    by_id = client.completions.create(model="demo", prompt=ids, max_tokens=4, temperature=0, echo=True, extra_body=SAME)
    said = client.completions.create(
        model="demo", prompt=ids, max_tokens=4, temperature=0, logprobs=1, extra_body=SAME
    ).choices[0]
    text = "def _get"
    alone = client.completions.create(
        model="demo", prompt=text, max_tokens=4, temperature=0, echo=True, extra_body=SAME
    )
    by_text = client.completions.create(  # Near-ties may come out differently in one batch.
        model="demo", prompt=[text, text], max_tokens=4, temperature=0, n=2, echo=True, extra_body=SAME
    )
    assert by_id.choices[0].text.startswith(text)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(text) for choice in by_text.choices)
    assert alone.choices[0].text == by_id.choices[0].text
    assert text + said.text == alone.choices[0].text
    assert "".join(said.logprobs.tokens) == said.text
    assert all(value < 0 for value in said.logprobs.token_logprobs)
    assert said.logprobs.text_offset[1] == len(said.logprobs.tokens[0])
    with pytest.raises(openai.BadRequestError, match="leave out echo or logprobs"):
        client.completions.create(model="demo", prompt=ids, echo=True, logprobs=1)


def test_suffix_fills_the_gap(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="demo", prompt="def add(a, b):\n    return", suffix="\n\nprint(add(1, 2))\n", max_tokens=8, temperature=0
    )
    assert made.usage.prompt_tokens > 10
    assert made.choices[0].text
