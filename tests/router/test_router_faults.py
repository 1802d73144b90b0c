"""A model's process and the server around it at their edges: strange output, forced stops, a parent that is gone."""

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path

import pytest

from rest_local.router import memory
from rest_local.router import process as processes
from rest_local.router.app import ModelChoice, Routing
from rest_local.router.memory import Need
from rest_local.router.pool import Pool
from rest_local.router.process import ModelProcess, ModelProcessFailed, Setup
from rest_local.server.http import listen
from rest_local.server.settings import ServerSettings
from tests.router.fake_processes import LOADED, PATIENCE, READS, child_that, looped, served, setup, turns, use


@looped
async def test_output_that_is_no_message_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the interpreter may print before the worker begins."""
    monkeypatch.setattr(
        processes, "_started", child_that('print("hello"); print("[1]"); print("{}");' + LOADED + READS)
    )

    process = ModelProcess(setup(), lambda ended: None)
    await process.start()
    assert process.is_serving
    await process.stop()
    assert process.exit_code == 0


@looped
async def test_a_process_that_cannot_be_started_is_a_failure_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(setup: Setup) -> Process:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(processes, "_started", refused)

    process = ModelProcess(setup(), lambda ended: None)
    with pytest.raises(ModelProcessFailed, match=r"model one: .*Resource temporarily unavailable"):
        await process.start()
    await process.stop()


@looped
async def test_a_process_that_does_not_stop_is_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its memory would still be taken while the next model is loaded."""
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(processes, "_started", child_that(LOADED + "import time; time.sleep(600)"))

    process = ModelProcess(setup(), lambda ended: None)
    await process.start()
    await process.stop()
    assert process.ended.is_set()
    assert process.exit_code not in (None, 0)


@pytest.mark.parametrize("forced", [False, True])
@looped
async def test_a_pool_that_closes_while_a_process_starts_ends_that_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forced: bool
) -> None:
    starting, go_on = asyncio.Event(), asyncio.Event()
    children: list[Process] = []
    code = "import signal; signal.pause()" if forced else READS
    begin = child_that(code)

    async def slowly(setup: Setup) -> Process:
        starting.set()
        await go_on.wait()
        children.append(await begin(setup))
        return children[0]

    monkeypatch.setattr(processes, "_started", slowly)

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


def test_a_second_signal_ends_processes_that_take_long_to_end(tmp_path: Path) -> None:
    """The process of the model does not obey."""
    program = """
import signal, sys
from pathlib import Path
from rest_local.router import app, process
from rest_local.router.memory import Need
from rest_local.server.http import listen
from rest_local.server.settings import ServerSettings
from tests.router.fake_processes import LOADED, child_that
process._started = child_that(LOADED + "import signal; signal.pause()")
choice = app.ModelChoice("one", Path(sys.argv[1]), print, lambda: Need(1, 0, 0))
routing = app.Routing(ServerSettings(port=0), [choice], drain_seconds=5)
close = routing.pool.close
async def told():
    print("closing", flush=True)
    await close()
routing.pool.close = told
with listen(routing.settings) as listening:
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
        for line in ("loaded", "closing"):
            assert server.stdout.readline().strip() == line
            server.send_signal(signal.SIGTERM)
        assert server.stdout.readline().strip() == "ended"
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.communicate()


def test_an_unexpected_error_at_the_start_ends_the_server(tmp_path: Path) -> None:
    def need() -> Need:
        raise ZeroDivisionError

    path = tmp_path / "one.gguf"
    path.touch()
    routing = Routing(ServerSettings(port=0), [ModelChoice("one", path, print, need)], limit=1)
    with listen(routing.settings) as listening, pytest.raises(ZeroDivisionError):
        routing.run([listening])
    assert routing.loaded.is_set()


@pytest.mark.parametrize(("text", "expected"), [("1000000\n", 800_000), ("max\n", None), (None, None)])
def test_the_default_limit_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, expected: int | None
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert memory.default_limit() == (expected or int(memory.DEFAULT_SHARE * memory.physical()))
