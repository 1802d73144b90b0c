"""Servers of several models, each the demo model in a process of its own."""

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.toy import demo_model

from rest_local.decoding.config import EngineConfig
from rest_local.decoding.engine import Engine
from rest_local.router import pool as pools
from rest_local.router import process as processes
from rest_local.router.app import ModelChoice, Routing
from rest_local.router.memory import Need, need_of
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import LONGEST_LINE, ModelProcess, Setup
from rest_local.server.http import listen
from rest_local.server.settings import ServerSettings
from tests.router.fake_processes import FakeProcess, served
from tests.server.live import Live
from tests.support.forked import can_fork
from tests.support.warm import Warm

GIGABYTE = 1 << 30
PATIENCE = 60.0


def refuses(port: int) -> bool:
    """Return True if no process listens on a port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@dataclass
class Routed(Live):
    """A running router. `ask` sends a request, by default a completion of `model`."""

    errors: list[BaseException] = field(default_factory=list)

    @property
    def routing(self) -> Routing:
        return cast("Routing", self.serving)

    def ask(self, model: str | None, path: str = "/completion", **body: Any) -> httpx.Response:
        given = {"prompt": "def main", "n_predict": 4, "temperature": 0} | body
        return self.post(path, given if model is None else given | {"model": model})

    def entry(self, name: str) -> Entry:
        return self.routing.pool.entry(name)

    def process(self, name: str) -> ModelProcess:
        process = self.entry(name).process
        assert process is not None
        return cast("ModelProcess", process)

    def statuses(self) -> dict[str, str]:
        return {row["id"]: row["status"]["value"] for row in self.get("/v1/models").json()["data"]}


def choice(path: Path, *, need: int = GIGABYTE, aliases: tuple[str, ...] = (), **options: Any) -> ModelChoice:
    """Return the model of that file, which is said to take `need` bytes."""
    load = partial(Engine.load, path, **({"slots": 2, "threads": 1} | options))
    return ModelChoice(path.stem, path, load, partial(_need, path, need), aliases)


def _need(path: Path, need: int) -> Need:
    need_of(EngineConfig(model=path))  # raises for a file that is no model
    return Need(need, 0, 0)


class Forked:
    """What a pool needs of `asyncio.subprocess.Process`, for a process that is forked."""

    def __init__(self, pid: int, ending: socket.socket, commands: int, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout = pid, self, stdout
        self._ending, self._commands = ending, open(commands, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._commands.write(data)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._commands.close()

    async def wait(self) -> int:
        self._ending.setblocking(False)
        code = int(await asyncio.get_running_loop().sock_recv(self._ending, 8))
        self._ending.close()
        self._commands.close()
        return code


async def forked(warm: Warm, fresh: Callable[[Setup], Awaitable[Any]], setup: Setup) -> Forked:
    """Fork the process of a model, in half a second instead of two. One that inherits sockets is a fresh one."""
    if setup.sockets:
        process: Forked = await fresh(setup)
        return process
    (its_stdin, commands), (told, its_stdout) = os.pipe(), os.pipe()
    code = "import os, sys; os.setsid(); from rest_local.router.process import main; sys.exit(main())"
    child, ending = warm.started(code, [its_stdin, its_stdout, 2])
    os.close(its_stdin)
    os.close(its_stdout)
    stdout = asyncio.StreamReader(LONGEST_LINE)
    pipe = open(told, "rb", buffering=0)  # noqa: SIM115
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
    process, data = Forked(child, ending, commands, stdout), pickle.dumps(setup)
    process.write(len(data).to_bytes(8, "little") + data)
    return process


@pytest.fixture(scope="session", autouse=True)
def _models_are_forked() -> Iterator[None]:
    """Fork the processes of models. Tests that start the command have fresh ones."""
    with contextlib.ExitStack() as stack:
        if can_fork():
            warm = stack.enter_context(Warm(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-")))))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(processes, "_started", partial(forked, warm, processes._started))
        yield


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[Path]]:
    """Return `files("a", "b")`, which gives the demo model under these names."""

    def made(*names: str) -> list[Path]:
        paths = [tmp_path / f"{name}.gguf" for name in names]
        for path in paths:
            shutil.copyfile(demo_model(), path)
        return paths

    return made


@contextlib.contextmanager
def router_of(
    models: Sequence[ModelChoice], settings: ServerSettings | None = None, **options: Any
) -> Iterator[Routed]:
    """Run a router of `models` in a thread, with those loaded that it loads at its start, and stop it at the end."""
    routing = Routing(replace(settings or ServerSettings(), port=0), models, **({"drain_seconds": 5} | options))
    errors: list[BaseException] = []

    with listen(routing.settings) as listening:
        port = listening.getsockname()[1]  # a router that cannot load its model closes the socket

        def run() -> None:
            try:
                routing.run([listening])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="router")
        thread.start()
        live = Routed(port, cast("Any", routing), thread, errors=errors)
        try:
            assert routing.loaded.wait(300)
            yield live
        finally:
            live.stop()


@pytest.fixture
def routed() -> Iterator[Callable[..., Routed]]:
    """Return `routed([choice(path)], limit=...)`, which starts routers that are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(router_of(*given, **options))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """Return the processes that pools make, which are none."""
    FakeProcess.made, FakeProcess.gate = [], asyncio.Event()
    FakeProcess.gate.set()
    monkeypatch.setattr(pools, "ModelProcess", FakeProcess)
    return FakeProcess.made


@pytest.fixture
def pool_of(fakes: list[FakeProcess], tmp_path: Path) -> Callable[..., Pool]:
    """Return `pool_of("one", "two", limit=1)`, which makes a pool of `fakes`, each of which takes one byte."""
    return lambda *names, **options: Pool([served(name, tmp_path) for name in names], **options)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """Serve two models, `one` (also called `coder`) and `two`, for tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("one", "two"):
        shutil.copyfile(demo_model(), folder / f"{name}.gguf")
    models = [choice(folder / "one.gguf", slots=5, aliases=("coder",)), choice(folder / "two.gguf")]
    with router_of(models, ServerSettings(metrics=True)) as live:
        yield live
