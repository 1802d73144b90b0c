"""Many clients at once with the real engine: all are served, none fails, and every slot is freed."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fake_service import FakeEngine
from live import Live, Scripted, becomes_idle, sent

from rest_local.api.bodies import MAX_PROMPTS
from rest_local.api.errors import ApiError
from rest_local.server import state as module
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


def test_a_client_is_a_key_else_a_connection(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    """The router, which clients reach, passes on where a request came from."""
    live = scripted()
    with live.client() as one, live.client() as other:
        for client in (one, one, other):
            assert client.post("/completion", json={"prompt": "x"}).status_code == 200
    first, again, second = (stream.request for stream in live.service.streams)
    assert first.client == again.client != second.client
    assert first.owner == second.owner == ""
    keyed, tokenized = scripted(keys=(b"one", b"two")), list[str | None]()
    tokenize = FakeEngine.tokenize

    def watched(self: FakeEngine, text: str, **how: Any) -> list[int]:
        tokenized.append(how.get("owner"))
        return tokenize(self, text, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "tokenize", watched)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body, key in (
        ("/completion", {"prompt": "x"}, "one"), ("/v1/completions", {"prompt": ["x"]}, "one"),
        ("/v1/chat/completions", chat, "two"),
    ):  # fmt: skip
        assert keyed.post(path, body, headers={"x-api-key": key}).status_code == 200
    first, again, second = (stream.request for stream in keyed.service.streams)
    assert first.client == again.client == first.owner != second.client == second.owner
    assert tokenized == [first.owner, first.owner, second.owner], "whose texts are tokenized once"


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


# ---- Prompts that are scored for echo with logprobs ----------------------------------------------------------------


PATH = "/v1/completions"
BODY = {"prompt": "def f():", "echo": True, "logprobs": 1, "max_tokens": 0}


class Endless:
    """A scorer whose prompts have parts until `free`."""

    def __init__(self) -> None:
        self.begun, self.free, self.ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def score(self, tokens: Sequence[int], top: int, run: Callable[[Callable[[], None]], object]) -> list[Any]:
        self.begun.release()
        try:
            while not self.free.is_set():
                run(lambda: None)
        finally:
            self.ended.release()
        return []

    def close(self) -> None:
        pass


def scored_by(live: Live) -> Endless:
    live.serving.state.scoring.scorer = scorer = Endless()  # type: ignore[assignment]
    return scorer


def test_a_disconnect_ends_the_scoring_of_the_prompt(scripted: Scripted) -> None:
    live = scripted()
    scorer = scored_by(live)
    with sent(live, PATH, BODY):
        assert scorer.begun.acquire(timeout=30)
    assert scorer.ended.acquire(timeout=30)
    scorer.free.set()
    assert live.post(PATH, BODY).status_code == 200
    assert len(live.service.streams) == 1, "nothing is generated after a disconnect"


def test_a_disconnect_while_waiting_for_scoring_frees_the_place() -> None:
    scoring, scorer = module.Scoring(), Endless()
    scoring.scorer = scorer  # type: ignore[assignment]
    service: Any = SimpleNamespace(run=lambda call: call(None))

    async def never() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def at_once() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    def scores(receive: Callable[[], Any]) -> Any:
        request: Any = SimpleNamespace(receive=receive)
        return scoring.scores(request, service, [[1, 2]], 0)

    async def main() -> None:
        first = asyncio.create_task(scores(never))
        await asyncio.to_thread(scorer.begun.acquire)
        for _ in range(2 * module.MAX_SCORING):
            with pytest.raises(ApiError, match="disconnected"):
                await asyncio.wait_for(scores(at_once), 30)
        scorer.free.set()
        assert await asyncio.wait_for(first, 30) == [[]]

    asyncio.run(main())
    assert not scorer.begun.acquire(blocking=False), "no other request was scored"


def test_requests_beyond_the_scoring_queue_are_refused(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCORING", 1)
    live = scripted()
    scorer = scored_by(live)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.post, PATH, BODY)
        assert scorer.begun.acquire(timeout=30)
        refused = live.post(PATH, BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert live.post(PATH, BODY | {"logprobs": None}).status_code == 200, "others do not wait for it"
        scorer.free.set()
        assert first.result(60).status_code == 200


def test_a_server_that_stops_leaves_no_thread_scoring(scripted: Scripted) -> None:
    live = scripted(drain_seconds=1)
    scorer = scored_by(live)
    with sent(live, PATH, BODY):
        assert scorer.begun.acquire(timeout=30)
        live.stop()
        assert scorer.ended.acquire(timeout=30)


@pytest.mark.parametrize(
    ("shift", "said"), [(True, "leave out echo or logprobs"), (False, "exceeds the available context size (32 tokens)")]
)
def test_a_prompt_longer_than_the_context_cannot_be_scored(scripted: Scripted, shift: bool, said: str) -> None:
    long = BODY | {"prompt": "x = 1\n" * 100, "rest_local": {"context_shift": shift}}
    answer = scripted(n_ctx=32).post(PATH, long)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"


@pytest.mark.parametrize("path", [operation.path for operation, _ in ROUTES if operation.streams])
def test_every_call_that_generates_refuses_the_name_of_another_model(hello: Live, path: str) -> None:
    """The router leaves that to the process of its only model."""
    said = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input_prefix": "", "input_suffix": ""}
    body = {"input": "x"} if path == "/v1/responses" else said | {"max_tokens": 1}
    answer = hello.post(path, body | {"model": "other"})
    assert answer.status_code == 404
    assert "no such model" in answer.text
