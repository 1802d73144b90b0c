"""Live servers: one with the demo model for the whole session, others with a scripted service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fake_service import FakeEngine, FakeService

from rest_local.decoding.engine import Engine
from rest_local.server.run import Serving, listen
from rest_local.server.settings import Settings


@dataclass
class Live:
    """A server that answers. `service`: the scripted one, where there is one."""

    port: int
    serving: Serving
    service: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)


@contextlib.contextmanager
def served(serving: Serving) -> Iterator[Live]:
    """The server in a thread of its own, stopped at the end."""
    with listen(serving.settings) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=serving.run, args=(listening,), name="server")
        thread.start()
        try:
            yield Live(port, serving)
        finally:
            serving.stop()
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def demo() -> Iterator[Live]:
    """The demo model, four slots, everything on."""
    settings = Settings(port=0, metrics=True, aliases=("coder",))
    serving = Serving(settings, "demo", lambda: Engine.load(slots=4), drain_seconds=5)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


@pytest.fixture
def scripted() -> Iterator[Callable[..., Live]]:
    """`scripted(keys=(b"k",), room=2)`: a server whose service does what the test says."""
    with contextlib.ExitStack() as stack:

        def start(*, room: int = 64, n_ctx: int = 512, drain_seconds: int = 5, **settings: Any) -> Live:
            made: list[FakeService] = []

            def service(engine: Any, queue: int) -> Any:
                made.append(FakeService(engine, room=room))
                return made[0]

            serving = Serving(
                replace(Settings(port=0), **settings),
                "demo",
                lambda: FakeEngine(n_ctx),  # type: ignore[arg-type, return-value]
                start=service,
                drain_seconds=drain_seconds,
            )
            live = stack.enter_context(served(serving))
            assert serving.loaded.wait(60)
            live.service = made[0]
            return live

        yield start
