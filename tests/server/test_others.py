"""What other machines do not see: the tokens of each step, and how much of a prompt was cached."""

import json
import threading
from typing import Any

import pytest
from fake_service import FakeStream
from live import Live, Scripted, data_of

from rest_local.api.answers import GROUP_TOKENS
from rest_local.decoding.logprobs import TokenLogprobs

PROMPT = 40  # tokens
TAKEN_MOST = 30_000  # looks, a millisecond each
KEY = {"authorization": "Bearer k"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "x", "n_probs": 1}),
    ("/v1/completions", {"prompt": "x", "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
]
ALL = [
    *BODIES,
    ("/v1/responses", {"input": "x", "top_logprobs": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
]


USERS: dict[str, dict[str, Any]] = {
    "one user": {},
    "other machines": {"allowed_hosts": ("llm.example.org",), "keys": (b"k",)},
    "several keys": {"keys": (b"k", b"other")},
}


@pytest.fixture(params=USERS)
def users(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def others(users: str) -> bool:
    return users != "one user"


@pytest.fixture
def live(scripted: Scripted, users: str) -> Live:
    return scripted(metrics=True, answer=None, **USERS[users])


def entries(event: dict[str, Any]) -> int:
    """Return the ids or log-probabilities in an event."""
    if event.get("stop"):  # llama-server's last event repeats all of them
        return 0
    choice = event.get("choices", [{}])[0] if event.get("choices") else {}
    logprobs = choice.get("logprobs") or {}
    told = event.get("completion_probabilities") or logprobs.get("content") or logprobs.get("tokens") or ()
    return max(len(told), len(event.get("tokens", ())))


def give(stream: FakeStream, steps: list[int]) -> None:
    """Give steps of these numbers of tokens. The server reads each before the next."""
    (token,) = stream._vocabulary.tokenize("x").tolist()
    for size in steps:
        stream.give("x" * size, logprobs=(TokenLogprobs(token, -1.0, ((token, -1.0),)),) * size)
        for _ in range(TAKEN_MOST):
            if not stream._pieces:
                break
            threading.Event().wait(0.001)


def test_ids_and_log_probabilities_go_out_in_whole_groups(live: Live, others: bool) -> None:
    """One group for 16 tokens, whatever the steps gave: the size of steps reveals what the datastore contains."""
    steps = [1, 5, 2, 7, 1, 1, 9, 3, 4, 8]
    for number, (path, body) in enumerate(BODIES):
        with live.client() as client, client.stream("POST", path, json=body | {"stream": True}, headers=KEY) as answer:
            stream = live.service.stream(number)
            give(stream, steps)
            stream.end()
            told = [count for event in data_of(answer.read().decode()) if (count := entries(event))]
        assert sum(told) >= sum(steps) - 1, path
        if others:
            assert all(count % GROUP_TOKENS == 0 for count in told[:-1]), (path, told)


NAMES = ("cache_n", "prompt_ms", "prompt_per_second", "cache_read", "prompt_eval_duration", "draft_n")


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_in_memory_is_not_told(live: Live, others: bool, stream: bool) -> None:
    """It would confirm a guess of another client's prompt, and so would the time of the prompt."""
    for path, body in ALL:
        live.service.forget(None)
        found: list[str] = []
        for number, cached in enumerate((0, 21)):
            asking = live.later(path, body | {"stream": stream}, headers=KEY)
            submitted = live.service.stream(number)
            submitted.give("xx")
            evaluated = PROMPT - cached
            submitted.timings = {"cached_tokens": cached, "prompt_tokens": evaluated, "prompt_ms": 10.0 * evaluated}
            submitted.end()
            found.append(asking.result(60).text)
        assert (_without_ids(found[0]) == _without_ids(found[1])) == others, path
        for text in found:
            assert any(name in text for name in NAMES) != others, path
            if "timings" in text:
                assert f'"prompt_n":{PROMPT}' in (text if others else found[0]), path


VARYING = ("id", "item_id", "created", "created_at", "completed_at", "total_duration")


def _without_ids(text: str) -> list[Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items() if key not in VARYING}
        return [clean(each) for each in value] if isinstance(value, list) else value

    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [clean(json.loads(line)) for line in lines if line.startswith("{")]


def test_metrics_for_other_machines_have_no_prompt_tokens(live: Live, others: bool) -> None:
    text = live.get("/metrics", headers=KEY).text
    assert "llamacpp:tokens_predicted_total" in text
    for name in ("prompt_tokens_total", "prompt_seconds_total", "prompt_tokens_seconds"):
        assert (f"llamacpp:{name}" in text) != others, name
