"""What goes wrong around the processes of models: ends at the wrong moment, strange output, forced stops."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping
from io import RawIOBase
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest

from rest_local.api.errors import ApiError
from rest_local.decoding.engine import Engine
from rest_local.errors import QueueFull
from rest_local.router import forwarding, memory
from rest_local.router import pool as pools
from rest_local.router import process as processes
from rest_local.router.app import RouterState, create_router
from rest_local.router.forwarding import Forwarded
from rest_local.router.memory import Need
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcess, ModelProcessFailed, Setup
from rest_local.router.run import ModelChoice, Routing
from rest_local.server.http import listen
from rest_local.server.security import CLIENT, SECRET, AccessLog
from rest_local.server.settings import Settings

PATIENCE = 60.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a test's coroutine; one that hangs fails."""

    async def bounded() -> None:
        await asyncio.wait_for(work, PATIENCE)

    asyncio.run(bounded())


def setup(name: str = "one") -> Setup:
    def load() -> Engine:
        raise AssertionError("no process loads it")

    return Setup(Settings(), name, load, queue=4, drain_seconds=0, secret=b"s")


class FakeProcess:
    """A process without a process: it is loaded when `gate` is set, and ends when it is told to."""

    made: list[FakeProcess]
    gate: asyncio.Event

    def __init__(self, setup: Setup, on_end: Callable[[Any], None]) -> None:
        self.setup, self._on_end = setup, on_end
        self.meta: dict[str, Any] = {}
        self.loaded_at = 0.0
        self.stopping = self.is_ended = False
        self.exit_code = -9
        self.killed = False
        self.made.append(self)

    @property
    def is_serving(self) -> bool:
        return self.loaded_at > 0 and not self.stopping and not self.is_ended

    async def start(self) -> None:
        if not self.stopping:
            await self.gate.wait()
        if self.stopping:
            self.is_ended = True
            raise ModelProcessFailed("the server is stopping")
        self.loaded_at = 1.0

    def begin_stop(self) -> None:
        self.stopping = True
        self.gate.set()

    async def stop(self) -> None:
        self.begin_stop()
        await asyncio.sleep(0)
        self.end()

    def kill(self) -> None:
        self.killed = self.stopping = True

    def end(self) -> None:
        """It ends, by itself unless it is stopping."""
        if not self.is_ended:
            self.is_ended = True
            self._on_end(self)

    def how_it_ended(self) -> str:
        return "signal 9"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes that pools make."""
    FakeProcess.made, FakeProcess.gate = [], asyncio.Event()
    FakeProcess.gate.set()
    monkeypatch.setattr(pools, "ModelProcess", FakeProcess)
    return FakeProcess.made


def served(name: str, tmp_path: Path, need: Callable[[], Need] = lambda: Need(1, 0, 0)) -> Entry:
    path = tmp_path / f"{name}.gguf"
    path.touch()
    return Entry(setup(name), path, need)


async def turns(n: int = 20) -> None:
    """Lets all tasks go on that can."""
    for _ in range(n):
        await asyncio.sleep(0)


async def use(pool: Pool, entry: Entry) -> None:
    async with pool.using(entry):
        pass


def child_that(code: str) -> Callable[[Setup], Coroutine[Any, Any, Process]]:
    """A stand-in for the process of a model, in the place of `process._started`."""

    async def started(setup: Setup) -> Process:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", code, stdin=pipe, stdout=pipe, stderr=nothing
        )

    return started


LOADED = r'print("{\"event\": \"loaded\", \"meta\": {}}", flush=True);'
READS = "import sys; sys.stdin.readline()"


def test_output_that_is_no_message_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the interpreter may print before the worker begins."""
    monkeypatch.setattr(
        processes, "_started", child_that('print("hello"); print("[1]"); print("{}");' + LOADED + READS)
    )

    async def work() -> None:
        process = ModelProcess(setup(), lambda ended: None)
        await process.start()
        assert process.is_serving
        await process.stop()
        assert process.exit_code == 0

    run(work())


def test_a_process_that_cannot_be_started_is_a_failure_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(setup: Setup) -> Process:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(processes, "_started", refused)

    async def work() -> None:
        process = ModelProcess(setup(), lambda ended: None)
        with pytest.raises(ModelProcessFailed, match=r"model one: .*Resource temporarily unavailable"):
            await process.start()
        await process.stop()

    run(work())


def test_a_process_that_does_not_stop_is_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its memory would still be taken while the next model is loaded."""
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(processes, "_started", child_that(LOADED + "import time; time.sleep(600)"))

    async def work() -> None:
        process = ModelProcess(setup(), lambda ended: None)
        await process.start()
        await process.stop()
        assert process.ended.is_set()
        assert process.exit_code not in (None, 0)

    run(work())


@pytest.mark.parametrize("forced", [False, True])
def test_a_pool_that_closes_while_a_process_starts_ends_that_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forced: bool
) -> None:
    starting, go_on = asyncio.Event(), asyncio.Event()
    children: list[Process] = []
    code = "import sys; sys.stdin.read()" if forced else READS
    begin = child_that(code)

    async def slowly(setup: Setup) -> Process:
        starting.set()
        await go_on.wait()
        children.append(await begin(setup))
        return children[0]

    monkeypatch.setattr(processes, "_started", slowly)

    async def work() -> None:
        pool = Pool([served("one", tmp_path)])
        using = asyncio.create_task(use(pool, pool.entries[0]))
        await starting.wait()
        if forced:
            pool.kill()
        closing = asyncio.create_task(pool.close())
        await turns()
        go_on.set()
        await closing
        assert children[0].returncode is not None, "it has ended"
        with pytest.raises(ModelProcessFailed):
            await using

    run(work())


def test_a_pool_that_closes_while_a_need_is_read_refuses_the_requests(fakes: list[FakeProcess], tmp_path: Path) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def need() -> Need:
        reading.set()
        assert go_on.wait(PATIENCE)
        return Need(1, 0, 0)

    async def work() -> None:
        pool = Pool([served("one", tmp_path, need)], limit=10)
        using = asyncio.create_task(use(pool, pool.entries[0]))
        await asyncio.to_thread(reading.wait, PATIENCE)
        closing = asyncio.create_task(pool.close())
        await turns()
        go_on.set()
        await closing
        with pytest.raises((ModelProcessFailed, ApiError)):
            await using
        assert all(each.is_ended for each in fakes)

    run(work())


def test_a_pool_closes_although_a_request_never_ends(fakes: list[FakeProcess], tmp_path: Path) -> None:
    """Such as one whose client does not read, when the stop is forced, while another model waits for its room."""

    async def work() -> None:
        pool = Pool([served("one", tmp_path), served("two", tmp_path)], limit=1)
        one, two = pool.entries
        async with pool.using(one):
            waiting = asyncio.create_task(use(pool, two))
            while not one.leaving:
                await asyncio.sleep(0.001)
            await pool.close()
        with pytest.raises((ModelProcessFailed, ApiError)):
            await waiting

    run(work())


def test_a_process_that_ends_while_it_was_to_be_unloaded_stays_so(fakes: list[FakeProcess], tmp_path: Path) -> None:
    """It is not started again, which would unload the model that got its room."""

    async def work() -> None:
        pool = Pool([served("one", tmp_path), served("two", tmp_path)], limit=1)
        one, two = pool.entries
        async with pool.using(one) as process:
            waiting = asyncio.create_task(use(pool, two))
            while not one.leaving:
                await asyncio.sleep(0.001)
            process.end()  # type: ignore[attr-defined]
        await waiting
        await turns()
        assert (one.status, two.status) == ("unloaded", "loaded")
        assert len(fakes) == 2
        await pool.close()

    run(work())


@pytest.mark.parametrize(("exit_code", "n_processes"), [(0, 1), (1, 2), (-9, 2)])
def test_a_process_that_ends_with_success_is_not_started_again_at_once(
    fakes: list[FakeProcess], tmp_path: Path, exit_code: int, n_processes: int
) -> None:
    """Some told it to: a service manager sends SIGTERM to all processes of a service that it stops."""

    async def work() -> None:
        pool = Pool([served("one", tmp_path)])
        await use(pool, pool.entries[0])
        fakes[0].exit_code = exit_code
        fakes[0].end()
        await turns()
        assert len(fakes) == n_processes
        await use(pool, pool.entries[0])
        assert pool.entries[0].status == "loaded"
        await pool.close()

    run(work())


@pytest.mark.parametrize("forced", [False, True])
def test_a_process_that_ends_while_the_server_stops_is_not_started_again(
    fakes: list[FakeProcess], tmp_path: Path, forced: bool
) -> None:
    async def work() -> None:
        pool = Pool([served("one", tmp_path)])
        await use(pool, pool.entries[0])
        if forced:
            pool.kill()
        else:
            pool.begin_stop()
        fakes[0].end()
        await turns()
        assert len(fakes) == 1
        await pool.close()

    run(work())


def test_as_many_requests_wait_for_a_load_as_the_queue_holds(fakes: list[FakeProcess], tmp_path: Path) -> None:
    FakeProcess.gate.clear()

    async def work() -> None:
        pool = Pool([served("one", tmp_path)], queue=3)
        waiting = [asyncio.create_task(use(pool, pool.entries[0])) for _ in range(3)]
        await turns()
        with pytest.raises(QueueFull):
            await use(pool, pool.entries[0])
        FakeProcess.gate.set()
        await asyncio.gather(*waiting)
        await use(pool, pool.entries[0])
        await pool.close()

    run(work())


def test_a_look_is_no_use(fakes: list[FakeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a monitor looks at is idle all the same."""

    async def work() -> None:
        pool = Pool([served("one", tmp_path)])
        entry = pool.entries[0]
        await use(pool, entry)
        entry.used_at = 7.0
        async with pool.using(entry, load=False):
            assert entry.users == 1, "not unloaded meanwhile"
        assert entry.used_at == 7.0
        await use(pool, entry)
        assert entry.used_at > 7.0
        await pool.close()

    run(work())


def test_room_is_made_by_models_that_are_not_in_use(fakes: list[FakeProcess], tmp_path: Path) -> None:
    """Though they were used later: the request would wait for a running answer."""

    async def work() -> None:
        pool = Pool([served(name, tmp_path) for name in ("one", "two", "three")], limit=2)
        one, two, three = pool.entries
        async with pool.using(one):
            await use(pool, two)
            await use(pool, three)
            assert [entry.status for entry in pool.entries] == ["loaded", "unloaded", "loaded"]
        await pool.close()

    run(work())


def test_a_model_in_use_is_not_idle_however_long_that_takes(fakes: list[FakeProcess], tmp_path: Path) -> None:
    """Its new requests would wait for its running answers, and for another load."""

    async def work() -> None:
        pool = Pool([served("one", tmp_path)], idle=0.001)
        pool.start()
        entry = pool.entries[0]
        async with pool.using(entry):
            for _ in range(20):  # each longer than the time between two looks, and than `idle`
                await asyncio.sleep(0.002)
                assert entry.status == "loaded"
            await use(pool, entry)
        while entry.status != "unloaded":
            await asyncio.sleep(0.001)
        assert len(fakes) == 1
        await pool.close()

    run(work())


def test_requests_that_waited_for_a_load_come_before_the_next_load(fakes: list[FakeProcess], tmp_path: Path) -> None:
    """Models that take turns in the same room serve a request each time, so that none waits for ever."""
    answered: list[str] = []

    async def ask(pool: Pool, entry: Entry) -> None:
        async with pool.using(entry):
            answered.append(entry.setup.name)

    async def work() -> None:
        pool = Pool([served(name, tmp_path) for name in ("one", "two", "three")], limit=1)
        await asyncio.gather(*(ask(pool, entry) for _ in range(4) for entry in pool.entries))
        assert answered == ["one"] * 4 + ["two"] * 4 + ["three"] * 4
        assert len(fakes) == 3
        await pool.close()

    run(work())


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_second_signal_ends_processes_that_take_long_to_end(tmp_path: Path) -> None:
    """The process of the model does not obey. The private folder is removed all the same."""
    program = """
import signal, sys
from pathlib import Path
from rest_local.router import process, run
from rest_local.router.memory import Need
from rest_local.server.http import listen
from rest_local.server.settings import Settings
from tests.router.test_router_faults import LOADED, child_that
process._started = child_that(LOADED + "import sys; sys.stdin.read()")
choice = run.ModelChoice("one", Path(sys.argv[1]), print, lambda: Need(1, 0, 0))
routing = run.Routing(Settings(port=0), [choice], drain_seconds=5)
close = routing.pool.close
async def told():
    print("closing", flush=True)
    await close()
routing.pool.close = told
with listen(routing.settings) as listening:
    print(routing.folder, flush=True)
    import threading
    threading.Thread(target=lambda: (routing.loaded.wait(), print("loaded", flush=True)), daemon=True).start()
    routing.run([listening])
print("ended", flush=True)
"""
    path = tmp_path / "one.gguf"
    path.touch()
    server = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        folder = Path(server.stdout.readline().strip())
        assert folder.is_dir()
        for line in ("loaded", "closing"):
            assert server.stdout.readline().strip() == line
            server.send_signal(signal.SIGTERM)
        assert server.stdout.readline().strip() == "ended"
        assert server.wait(PATIENCE) == 0
        assert not folder.exists()
    finally:
        server.kill()
        server.communicate()


def test_an_unexpected_error_at_the_start_ends_the_server(tmp_path: Path) -> None:
    def need() -> Need:
        raise ZeroDivisionError

    path = tmp_path / "one.gguf"
    path.touch()
    routing = Routing(Settings(port=0), [ModelChoice("one", path, print, need)], limit=1)
    with listen(routing.settings) as listening, pytest.raises(ZeroDivisionError):
        routing.run([listening])
    assert routing.loaded.is_set()
    assert not routing.folder.exists()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about requests."""
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


def test_a_client_that_leaves_is_no_crash_and_is_logged_by_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with silent() as process:
            pool, client = Pool([served("one", tmp_path)]), Client()
            entry = pool.entries[0]
            monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
            with caplog.at_level(logging.INFO, "rest_local.server"):
                call = AccessLog(Forwarded(pool, entry, b""))(dict(SCOPE), client.receive, client.send)
                calling = asyncio.create_task(call)
                await process.seen.wait()
                client.gone.set()
                await calling
            assert (client.sent, lines_of(caplog), entry.users) == ([], [], 0)

    run(work())


def test_a_client_that_leaves_while_its_model_is_loaded_waits_no_more(
    fakes: list[FakeProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else clients that try again would fill the queue."""
    FakeProcess.gate.clear()

    async def work() -> None:
        pool, client = Pool([served("one", tmp_path)]), Client()
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

    run(work())


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
    """`acts`: for each request the bytes of an answer, after which the connection is reset; None: reset at once."""

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


@pytest.mark.parametrize(
    ("acts", "status", "left"),
    [((OK,), 200, 0), ((None, OK), 200, 0), ((b"HTTP/1.1 200", OK), 200, 0), ((None, None, OK), 502, 1)],
)
def test_a_request_whose_process_ends_before_it_answers_is_sent_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: tuple[bytes | None, ...], status: int, left: int
) -> None:
    """Not a third time: it may be what ends the process."""

    async def work() -> None:
        async with answering(*acts) as process:
            pool = Pool([served("one", tmp_path)])
            monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
            app = create_router(RouterState(Settings(), pool, tmp_path))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                answer = await client.post("/tokenize", json={})
            assert answer.status_code == status
            assert len(process.acts) == left
            assert len(set(process.requests)) == 1, "with its body"
            assert process.requests[0].endswith(b"{}")
            if status == 502:
                error = answer.json()["error"]
                assert error["code"] == "model_crashed"
                assert "signal 9 (SIGKILL)" in error["message"]
            assert pool.entries[0].users == 0

    run(work())


def test_an_answer_that_has_begun_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has the first part of a stream: the error is the last event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def work() -> None:
        async with answering(head + b"9\r\ndata: 1\n\n\r\n", OK) as process:
            pool = Pool([served("one", tmp_path)])
            monkeypatch.setattr(pool, "_process", AsyncMock(return_value=process))
            app = create_router(RouterState(Settings(), pool, tmp_path))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                answer = await client.post("/tokenize", json={})
            assert answer.text.startswith("data: 1\n\ndata: ")
            assert "model_crashed" in answer.text
            assert process.acts == [OK]

    run(work())


def test_only_the_server_says_where_a_request_comes_from() -> None:
    """A client's own headers of these names do not reach the process, nor do those of its connection."""
    told = [
        (SECRET.encode(), b"x"), (CLIENT.encode(), b"10.0.0.1"), (b"connection", b"close, X-Hop, host"),
        (b"x-hop", b"1"), (b"host", b"h"),
        (b"transfer-encoding", b"chunked"), (b"authorization", b"Bearer k"), (b"x_rest_local_client", b"y"),
    ]  # fmt: skip
    scope = SCOPE | {"headers": told, "client": ("127.0.0.1", 5)}
    _, _, found = forwarding._of_client(scope)
    assert found == [
        (b"host", b"h"), (b"authorization", b"Bearer k"), (b"x_rest_local_client", b"y"),
        (CLIENT.encode(), b"127.0.0.1:5"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/props", {"sec-fetch-site": "cross-site"}, 403),
        ("GET", "/datastores?model=two", {"sec-fetch-site": "same-site"}, 403),
        ("GET", "/", {"sec-fetch-site": "cross-site"}, 200),
        ("HEAD", "/slots", {}, 200),
        ("HEAD", "/metrics", {}, 200),
        ("POST", "/models/load", {"content-type": "text/plain"}, 415),
        ("POST", "/models/load", {"content-type": "application/json", "origin": "http://example.org"}, 403),
    ],
)
def test_pages_of_other_sites_and_looks_load_no_model(
    fakes: list[FakeProcess], tmp_path: Path, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """An image of another page needs no Origin and no answer to have an effect."""
    settings = Settings(metrics=True)

    async def work() -> None:
        pool = Pool([served(name, tmp_path) for name in ("one", "two")])
        transport = httpx.ASGITransport(create_router(RouterState(settings, pool, tmp_path)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
        assert answer.status_code == status
        assert not fakes

    run(work())


class Commanded:
    """A server of one model that counts what it is told."""

    def __init__(self) -> None:
        self.stops = self.reloads = 0

    def stop(self) -> None:
        self.stops += 1

    def reload(self) -> None:
        self.reloads += 1


@pytest.mark.parametrize(("commands", "stops"), [(b"", 1), (b'{"do": "reload"}\n', 1), (b'{"do": "stop"}\n', 2)])
def test_a_process_ends_with_its_parent_whatever_came_before(commands: bytes, stops: int) -> None:
    serving = Commanded()
    processes.obey(cast("RawIOBase", io.BytesIO(commands)), cast("Any", serving))
    assert serving.stops == stops
    assert serving.reloads == (b"reload" in commands)


def test_half_a_command_ends_a_process() -> None:
    """Its parent was killed while it wrote."""
    serving = Commanded()
    with pytest.raises(ValueError, match="Unterminated"):
        processes.obey(cast("RawIOBase", io.BytesIO(b'{"do": "re')), cast("Any", serving))
    assert serving.stops == 1


@pytest.mark.parametrize(("text", "expected"), [("1000000\n", 800_000), ("max\n", None), (None, None)])
def test_the_default_limit_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, expected: int | None
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert memory.default_limit() == (expected or int(memory.DEFAULT_SHARE * memory._physical()))
