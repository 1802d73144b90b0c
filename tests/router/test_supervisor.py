"""The parent of a server with one model starts it again, and ends with it."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.serving import process

from rest_local.router import supervisor as supervisors
from rest_local.router.process import ModelProcessFailed
from rest_local.router.supervisor import Supervisor
from tests.router.fake_processes import FakeProcess, looped, setup, turns
from tests.server.live import until


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_a_crash_costs_the_requests_of_that_moment() -> None:
    """Later ones are answered by the process that is started again, with 503 until its model is loaded."""
    with process("--no-code", "--ctx", "32768") as server, httpx.Client(base_url=server.url(), timeout=60) as client:
        (child,) = server.children()
        body = {"prompt": "def main", "n_predict": 10**6, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(child, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        until(lambda: client.post("/completion", json={"prompt": "def main", "n_predict": 2}).status_code == 200)
        assert server.children() != [child]
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
    assert code == 0
    assert '"event": "crash"' in errors
    assert "SIGKILL" in errors


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """Return the children of the supervisor, which are none."""
    monkeypatch.setattr(supervisors, "ModelProcess", FakeProcess)
    FakeProcess.made = []
    return FakeProcess.made


def supervisor(listening: socket.socket) -> Supervisor:
    FakeProcess.gate = asyncio.Event()
    FakeProcess.gate.set()
    return Supervisor(setup(), [listening])


@looped
async def test_a_steady_process_is_started_again_at_once(
    made: list[FakeProcess], listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "STEADY_SECONDS", 0.0)
    served = supervisor(listening)
    serving = asyncio.create_task(served.serve())
    await turns()
    made[0].end()
    await turns()
    assert len(made) == 2
    served.stop()
    await serving
    assert len(made) == 2


@looped
async def test_a_start_that_fails_is_tried_again(
    made: list[FakeProcess], listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "STEADY_SECONDS", 0.0)
    address, served = listening.getsockname(), supervisor(listening)
    serving = asyncio.create_task(served.serve())
    await turns()
    FakeProcess.gate.clear()
    made[0].end()
    await turns()
    made[1].begin_stop()  # its start fails
    await turns(100)
    assert len(made) == 3
    served.stop()
    await serving
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection(*address)


@looped
async def test_it_ends_with_a_process_that_a_signal_has_stopped(
    made: list[FakeProcess], listening: socket.socket
) -> None:
    served = supervisor(listening)
    serving = asyncio.create_task(served.serve())
    await turns()
    made[0].exit_code = 0
    made[0].end()
    await serving
    assert len(made) == 1


@looped
async def test_the_error_of_the_first_start_ends_it(made: list[FakeProcess], listening: socket.socket) -> None:
    served = supervisor(listening)
    FakeProcess.gate.clear()
    serving = asyncio.create_task(served.serve())
    await turns()
    made[0].begin_stop()
    with pytest.raises(ModelProcessFailed):
        await serving


@looped
async def test_a_process_that_ends_soon_is_not_started_again_at_once(
    made: list[FakeProcess], listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "STEADY_SECONDS", 1e12)
    served = supervisor(listening)
    serving = asyncio.create_task(served.serve())
    await turns()
    made[0].end()
    await turns()
    served.stop()
    await serving
    assert len(made) == 1
