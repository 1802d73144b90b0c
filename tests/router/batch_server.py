"""A server with files and batches in a thread of its own, or in a process of its own that can be killed.

    with batch_server(folder, script.ask) as live:
        live.openai().batches.create(...)

As a program, `python batch_server.py FOLDER PORT_FILE SECONDS`, every line of a batch is answered with its own prompt
after so many seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, Route

from rest_local.router.batch_calls import ROUTES, upload_limits
from rest_local.router.batch_running import Ask
from rest_local.router.batches import Batches
from rest_local.router.files import Limits
from rest_local.server.errors import ApiError, on_any_error, on_api_error, on_http_error
from rest_local.server.http import listen
from rest_local.server.security import AccessLog, Gate, Guard
from rest_local.server.settings import Settings


@dataclass
class Script:
    """A server without a model: what each line is answered, and how many are under way.

    answer   status and body of a call, by its JSON
    slots    how many slots there are
    others   slots that other requests use
    hold     calls wait until it is set
    """

    answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: (200, {"model": "m", "said": body.get("prompt")})
    slots: int = 4
    others: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[str, dict[str, Any], bytes | None]] = field(default_factory=list)
    looks: Counter[str] = field(default_factory=Counter)  # at the slots, by path
    running: int = 0
    most: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.hold.set()

    async def ask(self, method: str, path: str, body: bytes, key: bytes | None) -> tuple[int, bytes]:
        if method == "GET":
            self.looks[path] += 1
            busy = self.running + self.others
            return 200, json.dumps([{"is_processing": number < busy} for number in range(self.slots)]).encode()
        value = json.loads(body)
        self.calls.append((path, value, key))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while not self.hold.is_set():
                await asyncio.sleep(0.005)
            status, answer = self.answer(value)
            return status, json.dumps(answer).encode()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@dataclass
class BatchLive:
    """A running server."""

    port: int
    batches: Batches | None
    loop: asyncio.AbstractEventLoop | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=60, **options)


def app_of(batches: Batches, settings: Settings, inner: Starlette | None = None) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        batches.start()
        yield
        await batches.close()

    routes: list[Any] = [Route(each.path, endpoint, methods=[each.method]) for each, endpoint in ROUTES]
    app = Starlette(
        routes=routes + ([Mount("/", inner)] if inner else []),
        middleware=[
            Middleware(AccessLog),
            Middleware(Gate, settings),
            Middleware(Guard, settings, uploads=upload_limits(batches.limits)),
        ],
        exception_handlers={ApiError: on_api_error, 404: on_http_error, 405: on_http_error, Exception: on_any_error},
        lifespan=lifespan,
    )
    app.state.batches = batches
    return app


@contextlib.contextmanager
def batch_server(
    folder: Path,
    ask: Ask,
    *,
    keys: Sequence[bytes] = (),
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
    inner: Starlette | None = None,
) -> Iterator[BatchLive]:
    settings = Settings(port=0, keys=tuple(keys))
    batches = Batches(folder, ask, keys=keys, limits=limits, clock=clock)
    config = uvicorn.Config(app_of(batches, settings, inner), log_config=None, lifespan="on", loop="asyncio")
    server = uvicorn.Server(config)
    started: dict[str, Any] = {}

    async def serve(listening: Any) -> None:
        started["loop"] = asyncio.get_running_loop()
        await server.serve(sockets=[listening])

    with listen(settings) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(serve(listening)), name="batch-server")
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/v1/batches", headers=_bearer(keys)).status_code != 503)
            yield BatchLive(port, batches, started["loop"])
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def _bearer(keys: Sequence[bytes]) -> dict[str, str]:
    return {"authorization": f"Bearer {keys[0].decode()}"} if keys else {}


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Waits until the condition holds; its value."""
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError("it never came to be")


def lines(count: int, *, url: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"n{number}", "method": "POST", "url": url, "body": {"prompt": f"p{number}"} | body}
        for number in range(count)
    ]


def jsonl(some: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in some)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    """The batch, once it is done."""

    def look() -> Any:
        found = client.batches.retrieve(batch_id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return until(look)


def records(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    """The lines of a file of a batch."""
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def main(folder: Path, port_file: Path, seconds: float) -> None:
    async def ask(method: str, path: str, body: bytes, key: bytes | None) -> tuple[int, bytes]:
        if method == "GET":
            return 200, b'[{"is_processing": false}, {"is_processing": false}, {"is_processing": false}]'
        await asyncio.sleep(seconds)
        return 200, json.dumps({"said": json.loads(body)["prompt"]}).encode()

    batches = Batches(folder, ask)
    config = uvicorn.Config(app_of(batches, Settings(port=0)), log_config=None, lifespan="on", loop="asyncio")
    with listen(Settings(port=0)) as listening:
        temporary = port_file.with_suffix(".new")
        temporary.write_text(str(listening.getsockname()[1]))
        temporary.replace(port_file)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
