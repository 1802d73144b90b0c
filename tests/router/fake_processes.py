"""Stand-ins for the processes of models, and pools of them, for tests in one event loop."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

from rest_local.decoding.engine import Engine
from rest_local.router.memory import Need
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcessFailed, Setup
from rest_local.server.settings import ServerSettings

PATIENCE = 60.0
P = ParamSpec("P")


def looped(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine. One that hangs fails."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*arguments, **named), PATIENCE)

        asyncio.run(bounded())

    return run


def setup(name: str = "one") -> Setup:
    def load() -> Engine:
        raise AssertionError("no process loads it")

    return Setup(ServerSettings(), name, load, queue=4, drain_seconds=0, secret=b"s")


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
        self.ended = asyncio.Event()
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
        self.stopping = True

    def end(self) -> None:
        """End, by itself unless it is stopping."""
        if not self.is_ended:
            self.is_ended = True
            self.ended.set()
            self._on_end(self)

    def how_it_ended(self) -> str:
        return "signal 9"


def served(name: str, tmp_path: Path, need: Callable[[], Need] = lambda: Need(1, 0, 0)) -> Entry:
    path = tmp_path / f"{name}.gguf"
    path.touch()
    return Entry(setup(name), path, need)


async def turns(n: int = 20) -> None:
    """Let all tasks go on that can."""
    for _ in range(n):
        await asyncio.sleep(0)


async def use(pool: Pool, entry: Entry) -> None:
    async with pool.using(entry):
        pass


def child_that(code: str) -> Callable[[Setup], Coroutine[Any, Any, Process]]:
    """Return a stand-in for the process of a model, in place of `process._started`."""

    async def started(setup: Setup) -> Process:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", code, stdin=pipe, stdout=pipe, stderr=nothing
        )

    return started


LOADED = r'print("{\"event\": \"loaded\", \"meta\": {}}", flush=True);'
READS = "import sys; sys.stdin.readline()"
