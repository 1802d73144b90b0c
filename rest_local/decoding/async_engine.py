"""The engine for asyncio: the calls of `Engine`, awaited.

    async with await AsyncEngine.load("model.gguf", slots=4) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        async for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.result.draft.tokens_per_step)

Contract: the engine decodes in the thread of a `Service`, and everything that takes time (opening, templates,
tokenizing, closing) runs in other threads, so the event loop is never blocked. A request begins when its stream is
iterated and is cancelled when the iteration stops: at a `break`, an exception, or the cancellation of the task. Call
everything from the one event loop, except for `AsyncStream.cancel`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local.decoding.config import EngineConfig, EngineOptions
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import ChatOptions, Request, RequestOptions
from rest_local.decoding.service import QUEUE, Service, Wake
from rest_local.decoding.stream import Piece, Result
from rest_local.decoding.streaming import Chat, Stream
from rest_local.errors import ServiceClosed
from rest_local.llama.model import Model

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
Submit = Callable[[Callable[[], Request], Wake], Stream]


class AsyncStream:
    """Iterate it once for the pieces of the answer. `result` holds what has come so far and is complete afterwards.

    The iteration raises what is wrong with the request, QueueFull, ServiceClosed, and what the request ended with.
    """

    def __init__(self, submit: Submit, make_request: Callable[[], Request]) -> None:
        self._submit, self._make_request = submit, make_request
        self._stream: Stream | None = None
        self._news = asyncio.Event()

    @property
    def result(self) -> Result:
        return Result() if self._stream is None else self._stream.result

    def cancel(self) -> None:
        """End the answer before the next forward pass. Its text so far stays in `result`. From any thread."""
        if self._stream is not None and not self._stream.done:
            self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if self._stream is None:
            loop = asyncio.get_running_loop()

            def wake(ended: bool) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._news.set)

            self._stream = await _in_thread(lambda: self._submit(self._make_request, wake), Stream.cancel)
        stream = self._stream
        try:
            while True:
                self._news.clear()
                done = stream.done  # before the pieces are taken: all of them are there then
                for piece in stream.poll():
                    yield piece
                if done:
                    break
                await self._news.wait()
        finally:
            self.cancel()
        if stream.error:
            raise stream.error


class AsyncChatStream(AsyncStream):
    """The stream of an answer in a conversation, as `ChatStream`."""

    def __init__(self, submit: Submit, make: Callable[[], tuple[Request, Chat]]) -> None:
        super().__init__(submit, self._request)
        self._make = make
        self._chat: Chat | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The finished answer in OpenAI's form: role, content, reasoning_content, tool_calls."""
        return {"role": "assistant", "content": ""} if self._chat is None else self._chat.message(self.result)

    def _request(self) -> Request:
        request, self._chat = self._make()
        return request


class AsyncEngine:
    """Make one with `await AsyncEngine.load(...)`; `close` it, or use `async with`.

    Takes over the engine that it is made of and closes it. `queue`: requests that may wait for a slot.
    """

    def __init__(self, engine: Engine, *, queue: int = QUEUE) -> None:
        self._engine = engine
        self._service = Service(engine, queue=queue)
        self._closed = False

    @classmethod
    async def load(
        cls, model: str | Path | None = None, *, queue: int = QUEUE, **options: Unpack[EngineOptions]
    ) -> AsyncEngine:
        """As `Engine.load`."""
        return await cls.open(EngineConfig(model=model, **options), queue=queue)

    @classmethod
    async def open(cls, config: EngineConfig, *, queue: int = QUEUE) -> AsyncEngine:
        """As `Engine(config)`. Raises ModelError, DatastoreError, OptionError."""
        return cls(await _in_thread(lambda: Engine(config), Engine.close), queue=queue)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def model(self) -> Model:
        return self._engine.model

    @property
    def n_ctx(self) -> int:
        """Tokens of context of one request."""
        return self._engine.n_ctx

    @property
    def warnings(self) -> list[str]:
        """As `Engine.warnings`."""
        return self._engine.warnings

    def statistics(self) -> dict[str, Any]:
        """As `Service.statistics`."""
        return self._service.statistics()

    def generate(
        self, prompt: str | Sequence[int] | NDArray[np.int32], **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """As `Engine.generate`; what is wrong with the arguments is raised when the stream is iterated."""
        return AsyncStream(self._submit, lambda: self._engine.request(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> AsyncChatStream:
        """As `Engine.chat`; what is wrong with the arguments is raised when the stream is iterated."""
        return AsyncChatStream(self._submit, lambda: self._engine.chat_request(messages, **options))

    async def tokenize(self, text: str) -> list[int]:
        """As `Engine.tokenize`."""
        return await asyncio.to_thread(self._engine.tokenize, text)

    async def close(self) -> None:
        """End all requests and free everything; again does nothing."""
        await asyncio.to_thread(self._close)

    def _submit(self, make_request: Callable[[], Request], wake: Wake) -> Stream:
        if self._closed:  # else the tokenizer of the closed model would say so, in other words
            raise ServiceClosed
        return self._service.submit(make_request(), wake)

    def _close(self) -> None:
        self._closed = True
        self._service.close()
        self._engine.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _in_thread(call: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What `call` returns, from a thread. A thread cannot be cancelled: where the task is, `undo` gets the result."""
    lock, given_up, made = threading.Lock(), threading.Event(), list[T]()

    def work() -> T:
        result = call()
        with lock:
            if not given_up.is_set():
                made.append(result)
                return result
        undo(result)
        return result

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        with lock:
            given_up.set()
        for result in made:
            undo(result)
        raise
