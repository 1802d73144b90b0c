"""Many clients at once with the real engine: all are served, none fails, and every slot is freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from live import Live, becomes_idle, sent

from rest_local.api.bodies import MAX_PROMPTS
from rest_local.server.security import CLIENT, SECRET, Inner

ROUNDS = 3


def test_eight_clients_are_all_served(demo: Live) -> None:
    """Twice as many clients as slots. benchmarks/server.py has a form of 60 s with times."""
    finished: list[tuple[int, str]] = []
    wrong: list[Any] = []
    ready = threading.Barrier(8)  # a busy machine may take longer to start a thread than others to be answered

    def ask(number: int) -> None:
        with demo.client() as client:
            client.get("/health")  # connects
            ready.wait(60)
            for turn in range(ROUNDS):
                text = f"def function_{number}_{turn}(value):\n"
                body = {"prompt": text, "n_predict": 12, "temperature": 0.5, "ignore_eos": True}
                answer = client.post("/completion", json=body)
                if answer.status_code != 200 or answer.json()["tokens_predicted"] != 12:
                    wrong.append(answer.text)
                finished.append((number, text))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert len(finished) == 8 * ROUNDS
    last_first = max(next(i for i, (number, _) in enumerate(finished) if number == client) for client in range(8))
    assert last_first < 8 * (ROUNDS - 1), "the first answer of each client comes before the last round is over"
    becomes_idle(demo)


def test_as_many_prompts_as_the_limit_says_are_answered(demo: Live) -> None:
    """Four have slots, and more than the queue holds wait."""
    prompts = [f"value_{number} =" for number in range(MAX_PROMPTS)]
    answer = demo.post("/completion", {"prompt": prompts, "max_tokens": 1, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()) == MAX_PROMPTS
    for path in ("/completion", "/v1/completions"):
        refused = demo.post(path, {"prompt": [*prompts, "x"], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert str(MAX_PROMPTS) in refused.json()["error"]["message"]


def test_a_client_is_a_key_else_a_connection(scripted: Callable[..., Live]) -> None:
    """Also when the router, which clients reach, passes on where a request came from."""
    live = scripted()
    with live.client() as one, live.client() as other:
        for client in (one, one, other):
            assert client.post("/completion", json={"prompt": "x"}).status_code == 200
    first, again, second = (stream.request for stream in live.service.streams)
    assert first.client == again.client != second.client
    assert first.owner == second.owner == ""
    keyed = scripted(keys=(b"one", b"two"))
    for key in ("one", "one", "two"):
        answer = keyed.post("/completion", {"prompt": "x"}, headers={"x-api-key": key})
        assert answer.status_code == 200
    first, again, second = (stream.request for stream in keyed.service.streams)
    assert first.client == again.client == first.owner != second.client == second.owner


def test_the_process_of_a_model_knows_the_connection_of_a_request() -> None:
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["client"])

    async def ask(client: bytes) -> None:
        headers = [(SECRET.encode(), b"s"), (CLIENT.encode(), client)]
        await Inner(app, b"s")({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]

    for client in (b"127.0.0.1:5", b"::1:5", b"batch:0"):
        asyncio.run(ask(client))
    assert found == [("127.0.0.1", 5), ("::1", 5), ("batch", 0)]


def test_fifty_disconnects_at_once_free_every_slot(demo: Live) -> None:
    prompt = "\n".join(f"value_{number} = {number}" for number in range(150))  # most of them leave in prefill
    body = {"prompt": prompt, "n_predict": 500, "stream": True}
    connections = [sent(demo, "/completion", body) for _ in range(50)]
    for connection in connections:
        connection.close()
    becomes_idle(demo)
    assert demo.post("/completion", {"prompt": "x", "n_predict": 2}).status_code == 200
    service = demo.serving.state.service
    assert service is not None
    assert (service.running, service.waiting) == (0, 0)
