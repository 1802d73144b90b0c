"""Many clients at once with the real engine: all are served, none fails, and every slot is freed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from live import Live, becomes_idle, sent

from rest_local.api.bodies import MAX_PROMPTS
from rest_local.server.app import ROUTES
from rest_local.server.security import CLIENT, SECRET, Inner


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


def test_without_keys_a_client_is_a_connection(hello: Live) -> None:
    with hello.client() as one, hello.client() as other:
        for client in (one, one, other):
            assert client.post("/completion", json={"prompt": "x"}).status_code == 200
    first, again, second = (stream.request for stream in hello.service.streams)
    assert first.client == again.client != second.client
    assert first.owner == second.owner == ""


CHAT = {"messages": [{"role": "user", "content": "x"}]}
KEYED = [("/completion", {"prompt": "x"}), ("/v1/completions", {"prompt": ["x"]}), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), KEYED)
def test_with_keys_a_client_is_a_key(scripted: Callable[..., Live], path: str, body: dict[str, Any]) -> None:
    live = scripted(keys=(b"one", b"two"))
    for key in ("one", "one", "two"):
        assert live.post(path, body, headers={"x-api-key": key}).status_code == 200
    first, again, second = (stream.request for stream in live.service.streams)
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


@pytest.mark.parametrize("path", [operation.path for operation, _ in ROUTES if operation.streams])
def test_every_call_that_generates_refuses_the_name_of_another_model(hello: Live, path: str) -> None:
    """The router leaves that to the process of its only model."""
    said = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input_prefix": "", "input_suffix": ""}
    body = {"input": "x"} if path == "/v1/responses" else said | {"max_tokens": 1}
    answer = hello.post(path, body | {"model": "other"})
    assert answer.status_code == 404
    assert "no such model" in answer.text
