"""One model in the process of the server answers as one in a process of its own."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.toy import demo_model

from rest_local import stop
from rest_local.decoding.engine import Engine
from rest_local.router.local import LocalModel
from rest_local.server.settings import ServerSettings
from tests.router.conftest import PATIENCE, Routed, choice, router_of
from tests.server.live import until

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]
HELLO = [{"role": "user", "content": "Hello"}]
VARYING = {"id", "created", "created_at", "timings", "system_fingerprint", "modified_at"}  # times and random names


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Routed]]:
    """Serve the same model in the server's process, and in one of its own."""
    path = tmp_path_factory.mktemp("one") / "one.gguf"
    shutil.copyfile(demo_model(), path)
    models, settings = [choice(path, aliases=("coder",))], ServerSettings(metrics=True)
    with router_of(models, settings, local=True) as local, router_of(models, settings) as other:
        yield [local, other]


def _same(value: Any) -> Any:
    """Return the value without what differs between two answers to one request."""
    if isinstance(value, dict):
        return {key: _same(each) for key, each in value.items() if key not in VARYING}
    return [_same(each) for each in value] if isinstance(value, list) else value


def _said(answer: httpx.Response) -> Any:
    kind = answer.headers["content-type"].partition(";")[0]
    return answer.status_code, kind, _same(answer.json()) if kind == "application/json" else len(answer.text) > 0


@pytest.mark.parametrize(
    "path",
    [
        "/", "/health", "/v1/models", "/v1/models/one", "/v1/models/three", "/slots", "/props", "/props?model=three",
        "/props?model=one", "/datastores", "/api/tags", "/api/ps", "/openapi.json", "/metrics", "/nowhere",
    ],
)  # fmt: skip
def test_what_is_asked_without_a_body(both: list[Routed], path: str) -> None:
    local, other = (_said(each.get(path)) for each in both)
    assert local == other


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "def main", "n_predict": 8, "temperature": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, "temperature": 0, "model": "one"}),
        ("/v1/chat/completions", {"messages": HELLO, "model": "three"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 8, "temperature": 0, "model": "one:latest"}),
        ("/v1/messages", {"messages": HELLO}),
        ("/tokenize", {"content": "def main"}),
        ("/tokenize", {"content": "def main", "model": "three"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/api/show", {"model": "one"}),
        ("/models/load", {"model": "one"}),
        ("/models/unload", {"model": "three"}),
    ],
)
def test_what_is_asked_with_a_body(both: list[Routed], path: str, body: dict[str, Any]) -> None:
    local, other = (_said(each.post(path, body)) for each in both)
    assert local == other


def test_a_page_of_another_site_is_refused(both: list[Routed]) -> None:
    for each in both:
        assert each.get("/slots", headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_a_stream_has_the_same_text(both: list[Routed]) -> None:
    body = {"prompt": "def main", "n_predict": 30, "stream": True, "ignore_eos": True, "temperature": 0}
    texts = []
    for each in both:
        with each.client() as client, client.stream("POST", "/completion", json=body) as answer:
            events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
        assert events[-1]["stop"] is True
        texts.append("".join(event["content"] for event in events))
    assert texts[0] == texts[1] != ""


def test_it_is_unloaded_and_loaded_again(routed: Start, files: Files) -> None:
    live = routed([choice(*files("one"))], local=True)
    first = live.entry("one").process
    assert isinstance(first, LocalModel)
    assert live.ask("one").status_code == 200
    assert live.post("/models/unload", {"model": "one"}).json() == {"success": True}
    assert live.statuses() == {"one": "unloaded"}
    assert live.get("/slots").json() == []
    assert live.statuses() == {"one": "unloaded"}, "which is no use of it"
    assert live.ask("one").status_code == 200
    assert live.entry("one").process is not first


class Held:
    """What loads the model once it may, and tells when it has begun."""

    def __init__(self, path: Path) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._path = path

    def __call__(self) -> Engine:
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        stop.check()
        return Engine.load(self._path, slots=2, threads=1)


@pytest.fixture
def held(files: Files) -> Held:
    return Held(*files("one"))


@pytest.fixture
def loading(routed: Start, held: Held) -> Routed:
    """Return a server whose model is loaded when it is asked for and `held` lets it."""
    return routed([replace(choice(held._path), load=held)], local=True, eager=False)


def test_requests_wait_while_it_loads_and_clients_may_leave(loading: Routed, held: Held) -> None:
    entry = loading.entry("one")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(loading.ask, "one")
        assert held.begun.wait(PATIENCE)
        assert loading.statuses() == {"one": "loading"}
        assert loading.get("/slots").json() == []
        body = json.dumps({"prompt": "a"}).encode()
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", loading.port)) as leaving:
            leaving.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            until(lambda: entry.waiting == 2)
        until(lambda: entry.waiting == 1)
        held.may_end.set()
        assert asked.result(PATIENCE).status_code == 200


def test_a_stop_breaks_off_loading(loading: Routed, held: Held) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(loading.ask, "one")
        assert held.begun.wait(PATIENCE)
        loading.routing.stop()
        until(lambda: bool(loading.process("one").stopping))
        held.may_end.set()
        loading.thread.join(PATIENCE)
        assert not loading.thread.is_alive()
        assert asked.result(PATIENCE).status_code >= 500
    assert not loading.errors


def test_answers_that_take_too_long_end_with_an_error_at_a_stop(routed: Start, files: Files) -> None:
    live = routed([choice(*files("one"))], local=True, drain_seconds=0)
    body = {"prompt": "def main", "n_predict": 10**6, "ignore_eos": True, "stream": True}
    with live.client() as client:
        shifted = body | {"rest_local": {"context_shift": True, "policy": "off"}}
        with client.stream("POST", "/completion", json=shifted) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.routing.stop()
            last = [line for line in lines if line][-1]
    assert "error" in json.loads(last.removeprefix("data: "))
