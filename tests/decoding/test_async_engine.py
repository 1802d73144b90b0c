"""`AsyncEngine` gives the answers of `Engine`, never blocks the event loop, and leaves no request without a reader."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from support.toy import demo_model

from rest_local import Engine
from rest_local.decoding.service import AsyncEngine, _in_thread
from rest_local.errors import OptionError, ServiceClosed

pytestmark = pytest.mark.anyio
PROMPT = "def add(a, b):\n"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
LONG = 400  # tokens: more than any test waits for
OPTIONS: dict[str, Any] = {"n_ctx": 512, "threads": 1, "policy": "off"}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, str]]:
    """Yield what the engine itself answers."""
    with Engine.load(demo_model(), **OPTIONS) as engine:
        generated = "".join(piece.text for piece in engine.generate(PROMPT, max_tokens=20))
        yield {"generate": generated, "chat": "".join(piece.text for piece in engine.chat(QUESTION, max_tokens=20))}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine(anyio_backend: str) -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.load(demo_model(), **OPTIONS) as engine:
        yield engine


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait until it holds, a minute at most."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


async def test_answers_are_those_of_the_engine(engine: AsyncEngine, expected: dict[str, str]) -> None:
    stream = engine.generate(PROMPT, max_tokens=20)
    assert "".join([piece.text async for piece in stream]) == expected["generate"]
    assert (stream.result.text, stream.result.finish_reason) == (expected["generate"], "length")
    chat = engine.chat(QUESTION, max_tokens=20)
    assert "".join([piece.text async for piece in chat]) == expected["chat"]
    assert chat.message == {"role": "assistant", "content": expected["chat"]}
    assert len(await engine.tokenize(PROMPT)) > 3
    assert engine.statistics()["requests"] == 2


async def test_a_break_ends_the_request(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, max_tokens=LONG, ignore_end=True)
    async for _ in stream:
        break
    await becomes(lambda: stream.result.finish_reason == "cancelled" and engine.statistics()["running"] == 0)
    assert len(stream.result.tokens) < LONG


async def test_cancelling_the_task_ends_the_request(engine: AsyncEngine) -> None:
    stream, begun = engine.generate(PROMPT, max_tokens=LONG, ignore_end=True), asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await becomes(lambda: engine.statistics()["running"] == 0)
    assert len(stream.result.tokens) < LONG


async def test_a_task_that_is_cancelled_while_it_submits_leaves_no_request(engine: AsyncEngine) -> None:
    submit, held, streams = engine._service.submit, threading.Event(), []

    def slow(*arguments: Any) -> Any:
        held.wait(60)
        streams.append(submit(*arguments))
        return streams[-1]

    engine._service.submit = slow  # type: ignore[method-assign]
    stream = engine.generate(PROMPT, max_tokens=LONG, ignore_end=True)
    task = asyncio.create_task(anext(stream.__aiter__()))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    await becomes(lambda: bool(streams) and streams[0].done)
    assert streams[0].result.finish_reason == "cancelled"


@pytest.mark.parametrize("late", [True, False])
async def test_what_a_thread_makes_for_a_cancelled_task_is_undone(late: bool) -> None:
    undone: list[int] = []
    held, made = threading.Event(), threading.Event()

    def make() -> int:
        held.wait(60)
        made.set()
        return 7

    task = asyncio.create_task(_in_thread(make, undone.append))
    await asyncio.sleep(0.02)
    if not late:
        held.set()
        made.wait(60)
        time.sleep(0.05)  # the thread has ended; the loop has not seen it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    await becomes(lambda: undone == [7])


async def test_what_is_wrong_is_raised_by_the_iteration(engine: AsyncEngine) -> None:
    for stream in (engine.generate("x", max_tokens=-1), engine.chat([{"content": "x"}])):
        with pytest.raises(OptionError):
            async for _ in stream:
                pass


async def test_a_closed_engine_ends_and_refuses(engine: AsyncEngine) -> None:
    stream, pieces = engine.generate(PROMPT, max_tokens=LONG, ignore_end=True), 0
    async for _ in stream:
        pieces += 1
        if pieces == 1:
            await engine.close()
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises(ServiceClosed):
        async for _ in engine.generate(PROMPT):
            pass


async def test_the_loop_runs_while_the_engine_decodes(engine: AsyncEngine) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    async for _ in engine.generate(PROMPT, max_tokens=50, ignore_end=True):
        pass
    ticking.cancel()
    assert ticks > 50
