"""Requests on their way through the router: clients that leave, processes that end, what reaches no model."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from rest_local.router import app as forwarding
from rest_local.router.app import Forwarded, RouterState, create_router
from rest_local.router.pool import Pool
from rest_local.server.security import CLIENT, SECRET, AccessLog
from rest_local.server.settings import ServerSettings
from tests.router.fake_processes import FakeProcess, looped, setup, turns, use

PoolOf = Callable[..., Pool]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the lines about requests."""
    return [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]


class Silent:
    """A process on a port of the loopback that reads requests and never answers."""

    def __init__(self, port: int, seen: asyncio.Event) -> None:
        self.port, self.seen, self.setup = port, seen, setup()


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[Silent]:
    seen = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        seen.set()
        await reader.read()  # until the other side closes
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield Silent(server.sockets[0].getsockname()[1], seen)


class Client:
    """A client of an ASGI application that disconnects when `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(dict(message))


SCOPE = {
    "type": "http", "method": "GET", "path": "/props", "query_string": b"", "headers": [(b"host", b"localhost")],
}  # fmt: skip


async def asked(
    pool: Pool, method: str, path: str, settings: ServerSettings | None = None, **request: Any
) -> httpx.Response:
    """Ask a router of these models."""
    app = httpx.ASGITransport(create_router(RouterState(settings or ServerSettings(), pool)))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
        return await client.request(method, path, **request)


@looped
async def test_a_client_that_leaves_is_no_crash_and_is_logged_by_the_process(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with silent() as process:
        pool, client = pool_of("one"), Client()
        entry = pool.entries[0]
        monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
        with caplog.at_level(logging.INFO, "rest_local.server"):
            call = AccessLog(Forwarded(pool, entry, b""))(dict(SCOPE), client.receive, client.send)
            calling = asyncio.create_task(call)
            await process.seen.wait()
            client.gone.set()
            await calling
        assert (client.sent, lines_of(caplog), entry.users) == ([], [], 0)


@looped
async def test_a_client_that_leaves_while_its_model_is_loaded_waits_no_more(
    pool_of: PoolOf, fakes: list[FakeProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise clients that try again would fill the queue."""
    FakeProcess.gate.clear()

    pool, client = pool_of("one"), Client()
    entry = pool.entries[0]
    with caplog.at_level(logging.INFO, "rest_local.server"):
        call = AccessLog(Forwarded(pool, entry, b""))(dict(SCOPE), client.receive, client.send)
        calling = asyncio.create_task(call)
        await turns()
        assert (entry.waiting, entry.status) == (1, "loading")
        client.gone.set()
        await calling
    assert (entry.waiting, entry.status) == (0, "loading")
    assert [line["status"] for line in lines_of(caplog)] == [499]
    FakeProcess.gate.set()
    await use(pool, entry)
    assert len(fakes) == 1, "the load went on"
    await pool.close()


class Scripted(Silent):
    """A process that reads each request and does the next of `acts` with its connection."""

    def __init__(self, port: int, acts: list[bytes | None]) -> None:
        super().__init__(port, asyncio.Event())
        self.acts, self.requests = acts, list[bytes]()
        self.ended = asyncio.Event()
        self.ended.set()

    def how_it_ended(self) -> str:
        return "signal 9 (SIGKILL)"


@contextlib.asynccontextmanager
async def answering(*acts: bytes | None) -> AsyncIterator[Scripted]:
    """Answer each request with the next bytes of `acts` and reset the connection, or with None reset it at once."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
        if act := process.acts.pop(0):
            writer.write(act)
            await writer.drain()
            writer.close()
        else:
            writer.transport.abort()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    process = Scripted(server.sockets[0].getsockname()[1], list(acts))
    async with server:
        yield process


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.mark.parametrize(("act", "status"), [(OK, 200), (None, 502), (b"HTTP/1.1 200", 502)])
@looped
async def test_a_process_that_ends_before_it_answers(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch, act: bytes | None, status: int
) -> None:
    async with answering(act) as process:
        pool = pool_of("one")
        monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
        answer = await asked(pool, "POST", "/tokenize", json={})
        assert answer.status_code == status
        assert process.requests[0].endswith(b"{}")
        if status == 502:
            error = answer.json()["error"]
            assert error["code"] == "model_crashed"
            assert "signal 9 (SIGKILL)" in error["message"]
        assert pool.entries[0].users == 0


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def streamed(pool: Pool, client: Client) -> list[bytes]:
    """Return the parts that a client got of a stream, of which the last one is empty."""
    await Forwarded(pool, pool.entries[0], b"{}")(dict(SCOPE), client.receive, client.send)
    return [message["body"] for message in client.sent[1:]]


@looped
async def test_an_answer_that_has_begun_is_not_begun_again(pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has the first part of a stream, and sees that the answer is not complete."""
    async with answering(EVENTS + b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2", OK) as process:
        pool, client = pool_of("one"), Client()
        monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
        assert await streamed(pool, client) == [b"data: 1\n\n"]
        assert client.sent[-1]["more_body"] is True
        assert process.acts == [OK]


@looped
async def test_chunks_are_passed_on_whole(pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"x", b"\r\n0\r\n\r\n", 30_000 * b"long"]
    sent = EVENTS + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    async with answering(sent) as process:
        pool = pool_of("one")
        monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
        assert await streamed(pool, Client()) == [*parts, b""]


class Slow(Client):
    """A client that reads when `reads` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await super().send(message)
        await self.reads.wait()


@looped
async def test_what_a_client_does_not_read_is_not_read_from_the_process(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(EVENTS)
        with contextlib.suppress(ConnectionError):
            for _ in range(1 << 10):  # 64 MB, more than sockets hold
                writer.write(b"10000\r\n%b\r\n" % bytes(1 << 16))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        writer.close()
        gone.set()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        pool, client = pool_of("one"), Slow()
        process = Silent(server.sockets[0].getsockname()[1], asyncio.Event())
        monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
        streaming = asyncio.create_task(streamed(pool, client))
        while not client.sent:
            await asyncio.sleep(0.001)
        await turns(100)
        assert len(client.sent) == 1
        assert not gone.is_set()
        client.reads.set()
        assert len(await streaming) == (1 << 10) + 1


def test_only_the_server_says_where_a_request_comes_from() -> None:
    """A client's own headers of these names do not reach the process, nor do those of its connection."""
    told = [
        (SECRET.encode(), b"x"), (CLIENT.encode(), b"10.0.0.1"), (b"connection", b"close, X-Hop, host"),
        (b"x-hop", b"1"), (b"host", b"h"),
        (b"transfer-encoding", b"chunked"), (b"authorization", b"Bearer k"), (b"x_rest_local_client", b"y"),
    ]  # fmt: skip
    scope = SCOPE | {"headers": told, "client": ("127.0.0.1", 5)}
    found = forwarding._request(scope, Silent(0, asyncio.Event()), b"{}")  # type: ignore[arg-type]
    assert found.split(b"\r\n") == [
        b"GET /props HTTP/1.1", b"host: h", b"authorization: Bearer k", b"x_rest_local_client: y",
        CLIENT.encode() + b": 127.0.0.1:5", SECRET.encode() + b": s", b"content-length: 2", b"", b"{}",
    ]  # fmt: skip


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    [
        ("GET", "/props", {"sec-fetch-site": "cross-site"}, b"", 403),
        ("GET", "/datastores?model=two", {"sec-fetch-site": "same-site"}, b"", 403),
        ("GET", "/", {"sec-fetch-site": "cross-site"}, b"", 200),
        ("GET", "/slots?model=two", {}, b"", 200),
        ("GET", "/metrics?model=two", {}, b"", 200),
        ("HEAD", "/slots", {}, b"", 200),
        ("HEAD", "/metrics", {}, b"", 200),
        ("GET", "/v1/models", {}, b"", 200),
        ("GET", "/nowhere", {}, b"", 404),
        ("GET", "/completion", {}, b"", 405),
        ("GET", "/models/load", {}, b"", 405),
        ("GET", "/v1/batches", {}, b"", 501),
        ("POST", "/v1/files", JSON, b"{}", 501),
        ("POST", "/models/load", {"content-type": "text/plain"}, b"{}", 415),
        ("POST", "/models/load", JSON | {"origin": "http://example.org"}, b"{}", 403),
        ("POST", "/completion", JSON, b"{", 400),
        ("POST", "/completion", JSON, b"[]", 400),
        ("POST", "/completion", JSON, b'{"model": 1}', 400),
        ("POST", "/completion", JSON, b'{"prompt": NaN}', 400),
        ("POST", "/completion", JSON, b'{"model": "three"}', 404),
        ("POST", "/completion", JSON, b"x" * 9000, 413),
        ("POST", "/completion", JSON | {"authorization": "Bearer x"}, b"{}", 401),
        ("GET", "/v1/models", {"authorization": "Bearer x"}, b"", 401),
    ],
)
@looped
async def test_looks_faults_and_pages_of_other_sites_load_no_model(
    pool_of: PoolOf,
    fakes: list[FakeProcess],
    method: str,
    path: str,
    headers: dict[str, str],
    content: bytes,
    status: int,
) -> None:
    """An image of another page needs no Origin and no answer to have an effect. Those with a wrong key are the only
    ones whose server has keys."""
    keys = (b"k",) if "authorization" in headers else ()
    settings = ServerSettings(metrics=True, max_body=8192, keys=keys)
    pool = pool_of("one", "two")
    answer = await asked(pool, method, path, settings, headers=headers, content=content)
    assert answer.status_code == status, answer.text
    if status >= 400:
        assert set(answer.json()) == {"error"}
    if status == 501:
        assert "rest-local batch" in answer.json()["error"]["message"]
    assert not fakes
