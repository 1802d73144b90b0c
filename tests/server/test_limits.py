"""Limits of one client: connections, unread streams, work for requests that it has abandoned."""

import asyncio
import logging
import os
import resource
import select
import socket
import threading
from typing import Any

import pytest
from live import Live, Scripted, sent, until
from starlette.requests import Request

from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.errors import ServiceClosed
from rest_local.llama.tokenizer import Tokenizer
from rest_local.server import http, state, streaming
from rest_local.server.http import SPARE_DESCRIPTORS, connection_limit, listen
from rest_local.server.settings import ServerSettings
from rest_local.server.state import Workers

STREAM = {"prompt": "x", "stream": True, "n_probs": 4}
MOST_PIECES = 20_000  # If a stream is never ended, the test fails instead of filling the memory.


def test_connections_beyond_the_limit_are_refused_when_they_are_made(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle connections count, and refused ones do not fill the log."""
    monkeypatch.setattr(http, "connection_limit", lambda descriptors: 8)
    monkeypatch.setattr(http, "_logged_at", -http.LOG_SECONDS)
    live = scripted()
    with caplog.at_level(logging.WARNING):
        clients = [socket.create_connection(("127.0.0.1", live.port), timeout=60) for _ in range(40)]
        said = [client.recv(1 << 16) for client in clients[8:]]
    assert all(answer.startswith(b"HTTP/1.1 503 ") and b'"busy"' in answer for answer in said)
    assert not select.select(clients[:8], [], [], 0)[0], "the first were told something"
    clients[3].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert clients[3].recv(1 << 16).startswith(b"HTTP/1.1 200 "), "those that are connected are served"
    assert len([record for record in caplog.records if "connections are open" in record.getMessage()]) == 1
    for client in clients:
        client.close()
    assert live.get("/health").status_code == 200


def test_the_connection_limit_follows_the_descriptor_limit(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """If there are more connections than descriptors, the process keeps some free and does not log a line for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, wanted = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")), 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + SPARE_DESCRIPTORS + wanted, hard))
    try:
        assert wanted - 4 <= connection_limit() <= wanted
        live = scripted()
        with caplog.at_level(logging.WARNING):
            clients = [socket.create_connection(("127.0.0.1", live.port), timeout=60) for _ in range(wanted + 20)]
            assert clients[-1].recv(100).startswith(b"HTTP/1.1 503 ")
            for client in clients:
                client.close()
        assert live.get("/health").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(caplog.records) < 5


def test_a_kept_connection_is_closed_after_a_while(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 1)
    live = scripted()
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        said = b""
        while not said.endswith(b"}"):
            said += client.recv(1 << 16)
        assert client.recv(1 << 16) == b"", "closed by the server"


def fill(live: Live, number: int = 0) -> int:
    """Give pieces until the request is cancelled, and return their number."""
    stream = live.service.stream(number)
    (token,) = live.service.engine.model.vocabulary.tokenize("x").tolist()
    entry = TokenLogprobs(token, -1.0, tuple((token, -1.0) for _ in range(4)))
    given = 0
    while not stream.cancelled.is_set() and given < MOST_PIECES:
        stream.give("x" * 200, logprobs=(entry,) * 50)
        given += 1
        stream.cancelled.wait(0.001)  # the loop gets its turn
    return given


def test_a_reader_that_stalls_is_cut_off(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(streaming, "BACKLOG", 1 << 40)
    live = scripted(answer=None)
    with sent(live, "/completion", STREAM, buffer=4096):
        assert fill(live) < MOST_PIECES
    live.service.answer = ("next",)
    assert live.post("/completion", {"prompt": "x"}).json()["content"] == "next"


def test_a_client_that_pauses_and_reads_on_is_not_cut_off(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    paused, resumed = threading.Event(), threading.Event()

    class Watched(http.TimedProtocol):
        def pause_writing(self) -> None:
            super().pause_writing()
            paused.set()

        def resume_writing(self) -> None:
            super().resume_writing()
            resumed.set()

    monkeypatch.setattr(http, "TimedProtocol", Watched)
    monkeypatch.setattr(http, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(streaming, "BACKLOG", 1 << 40)
    live, read = scripted(), bytearray()
    live.service.answer = None
    with sent(live, "/completion", STREAM, buffer=4096) as client:
        stream = live.service.stream()
        while not paused.is_set():
            stream.give("x" * 100_000)
            paused.wait(0.02)

        def read_on() -> None:
            while not read.endswith(b"\r\n0\r\n\r\n") and (part := client.recv(1 << 20)):
                read.extend(part)

        reader = threading.Thread(target=read_on)
        reader.start()
        assert resumed.wait(30)
        assert not stream.cancelled.wait(1.2)
        stream.end()
        reader.join(30)
    assert read.endswith(b"\r\n0\r\n\r\n")


def test_what_waits_for_a_reader_is_bounded(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit ends the request long before the stall limit; a client that reads on gets the error."""
    monkeypatch.setattr(http, "STALL_SECONDS", 3600.0)
    monkeypatch.setattr(streaming, "BACKLOG", 500)
    live = scripted(answer=None)
    with sent(live, "/completion", STREAM, buffer=4096) as client:
        assert fill(live) < MOST_PIECES
        said = b""
        while part := client.recv(1 << 20):
            said = said[-4096:] + part
            if b"\r\n0\r\n\r\n" in said:
                break
    assert b"its reader is too slow" in said


def test_an_answer_that_is_not_streamed_has_no_backlog_limit(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client reads nothing before the end, so it cannot lag."""
    monkeypatch.setattr(streaming, "BACKLOG", 10)
    live = scripted(answer=("x",) * 1000)
    assert live.post("/completion", {"prompt": "x"}).json()["content"] == "x" * 1000


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let tokenizing set `inside` and wait for `go`. `calls` counts its calls."""

    class Held:
        inside, go, calls = threading.Event(), threading.Event(), 0

    call = Tokenizer._call

    def watched(self: Tokenizer, text: str) -> Any:
        Held.calls += 1
        Held.inside.set()
        assert Held.go.wait(60)
        return call(self, text)

    monkeypatch.setattr(Tokenizer, "_call", watched)
    yield Held
    Held.go.set()


LONG = "for number in range(10): print(number)\n" * 20_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "prediction": {"content": LONG}}),
        ("/infill", {"input_prefix": LONG, "input_suffix": LONG}),
    ],
)
def test_a_disconnect_ends_tokenizing(scripted: Scripted, held: Any, path: str, body: dict[str, Any]) -> None:
    live = scripted()
    workers = live.serving.state.workers
    with sent(live, path, body):
        assert held.inside.wait(60)
        (stop,) = workers._stops
    until(lambda: stop._is_set)
    held.go.set()
    assert workers.ended(60)
    assert held.calls <= 2, "one part was under way"
    assert not live.service.streams


def test_a_stop_ends_tokenizing(scripted: Scripted, held: Any) -> None:
    live = scripted(drain_seconds=60)
    with sent(live, "/tokenize", {"content": LONG}) as client:
        assert held.inside.wait(60)
        (stop,) = live.serving.state.workers._stops
        live.serving.stop()
        until(lambda: stop._is_set)
        held.go.set()
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert held.calls <= 2


def test_no_work_begins_after_a_stop() -> None:
    """It does not wait for its client either."""
    workers, begun = Workers(), list[int]()

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def work() -> None:
        workers.stop()
        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(ServiceClosed):
            await workers.run(request, lambda: begun.append(1))

    asyncio.run(work())
    assert not begun
    assert workers.ended(0)


def test_a_thread_that_does_not_stop_cannot_keep_the_server_running(
    scripted: Scripted, held: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system call in a thread cannot be interrupted: the server ends without the thread."""
    monkeypatch.setattr(state, "WORKERS_SECONDS", 0.5)
    monkeypatch.setattr(http, "END_SECONDS", 0)
    live = scripted(drain_seconds=1)
    with sent(live, "/tokenize", {"content": LONG}):
        assert held.inside.wait(60)
        live.serving.stop()
        live.thread.join(20)
        ended = not live.thread.is_alive()
        held.go.set()
    assert ended
    assert "still being prepared" in caplog.text


def test_a_prompt_beyond_the_context_is_not_read_to_its_end(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    call = Tokenizer._call

    def watched(self: Tokenizer, text: str) -> Any:
        read.append(len(text))
        return call(self, text)

    live = scripted(n_ctx=512)
    monkeypatch.setattr(Tokenizer, "_call", watched)
    exact = len(live.service.engine.model.vocabulary.tokenize(LONG))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/completion", {"prompt": LONG}),
        ("/completion", {"prompt": [5, LONG]}),
        ("/v1/completions", {"prompt": [LONG, LONG]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ]
    for path, body in bodies:
        read.clear()
        answer = live.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
        assert sum(read) < len(LONG) / 10
        told = answer.json()["error"]
        assert (told["n_ctx"], told["param"]) == (512, "messages" if "messages" in body else "prompt")
        assert told["type"] == "exceed_context_size_error", "llama-server's"
        if "messages" in body:
            assert abs(told["n_prompt_tokens"] / exact - 1) < 0.1, "estimated from what was read"


def test_accepted_sockets_have_the_tcp_protocol() -> None:
    """Only on those does asyncio turn off Nagle's algorithm, which delays an event until the last is acknowledged."""
    with listen(ServerSettings(port=0)) as listening, socket.create_connection(listening.getsockname()[:2]) as client:
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
