"""The progress of a prompt, and timings with every event of a stream: llama-server's fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from live import Live, data_of

from rest_local.decoding.results import Timings
from rest_local.decoding.stream import Piece, Progress

LONG = "def add(a, b):\n    return a + b\n\n" * 50  # more than a batch of 512 tokens
CALLS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": LONG, "n_predict": 4},
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
}
WANTED = {"stream": True, "return_progress": True, "rest_local": {"policy": "off"}}


def asked(live: Live, path: str, **more: Any) -> list[Any]:
    answer = live.post(path, CALLS[path] | WANTED | more)
    assert answer.status_code == 200, answer.text
    return data_of(answer.text)


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_tells_how_much_of_its_prompt_is_evaluated_and_times(demo: Live, path: str) -> None:
    events = asked(demo, path, cache_prompt=False, timings_per_token=True)
    found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [list(each) for each in found] == [["total", "cache", "processed", "time_ms"]] * len(found)
    assert (found[0]["cache"], found[0]["processed"], found[0]["time_ms"]) == (0, 0, 0)
    assert len({each["total"] for each in found}) == 1
    assert len(found) >= 3, "the prompt is longer than a batch"
    done = [each["processed"] for each in found]
    assert done == sorted(set(done))
    assert done[-1] == found[-1]["total"] > 512
    times = [each["time_ms"] for each in found]
    assert times == sorted(times)
    assert times[-1] > 0
    first, *others = [event["timings"] for event in events if "prompt_progress" in event]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"], first["predicted_ms"]) == (0, 0, 0, 0)
    assert [each["prompt_n"] for each in others] == sorted(each["prompt_n"] for each in others)
    assert others[-1]["prompt_ms"] > 0
    parts = [each for each in events if "prompt_progress" not in each and "timings" in each]
    counts = [each["timings"]["predicted_n"] for each in parts]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert sum("timings" in each for each in asked(demo, path)) <= 1, "unasked at the end only"


def test_progress_begins_with_what_was_in_memory(demo: Live) -> None:
    asked(demo, "/completion")
    (first, *_, last) = [each["prompt_progress"] for each in asked(demo, "/completion") if "prompt_progress" in each]
    assert first["cache"] == first["processed"] == first["total"] - 1, "the last token is always evaluated"
    assert last["processed"] == last["total"]
    assert last["cache"] == first["cache"]


def test_nothing_is_told_unasked(demo: Live) -> None:
    assert not any("prompt_progress" in each for each in asked(demo, "/completion", return_progress=False))
    whole = demo.post("/completion", CALLS["/completion"] | WANTED | {"stream": False}).json()
    assert "prompt_progress" not in whole


def test_other_machines_are_told_neither(scripted: Callable[..., Live]) -> None:
    """How much of a prompt was in memory tells what another client sent."""
    live = scripted(host="127.0.0.1", keys=(b"k",), allowed_hosts=("models.example",), answer=None)
    body = CALLS["/completion"] | WANTED | {"timings_per_token": True, "prompt": "x"}
    with (
        live.client(headers={"authorization": "Bearer k"}) as client,
        client.stream("POST", "/completion", json=body) as answer,
    ):
        stream = live.service.stream()
        stream._pieces.append(Piece("", (), (), progress=Progress(9, 4, 1.0, Timings(cached_tokens=4))))
        stream.give("text")
        stream.end()
        found = data_of("".join(answer.iter_text()))
    assert found[-1]["stop"]
    assert not any("prompt_progress" in each for each in found)
    assert not any("timings" in each for each in found[:-1])
