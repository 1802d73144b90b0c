"""Work of requests outside of the event loop: preparing requests, scoring prompts.

Contract: templates are rendered and texts are tokenized in worker threads, inside a `Stop`. A client that disconnects,
or a server that stops, sets it, and the work ends at the next part, within milliseconds. The model must not be freed
before `Workers.ended`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import anyio
from starlette.requests import Request as HttpRequest

from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.scoring import Scorer
from rest_local.errors import QueueFull
from rest_local.server.errors import ApiError
from rest_local.server.streaming import watched
from rest_local.stop import Stop

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service

MAX_SCORING = 4  # requests that are scored or wait for it

T = TypeVar("T")


class Workers:
    """The worker threads of one server."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stops: set[Stop] = set()
        self._stopping = False

    async def run(self, request: HttpRequest, call: Callable[[], T]) -> T:
        """The result of `call`, which runs in a thread. Raises what it raises, and ServiceClosed if it is stopped."""
        stop = Stop()

        def work() -> T:
            with self._changed:
                self._stops.add(stop)
                if self._stopping:
                    stop.set()
            try:
                with stop.here():
                    stop.check()
                    return call()
            finally:
                with self._changed:
                    self._stops.discard(stop)
                    self._changed.notify_all()

        try:
            async with watched(request.receive, stop.set):
                return await anyio.to_thread.run_sync(work)
        finally:
            stop.set()  # if the request's task is cancelled, the thread runs on until it reads this

    def stop(self) -> None:
        """Stop all work, and all that begins later. Any thread."""
        with self._changed:
            self._stopping = True
            stops = list(self._stops)
        for stop in stops:
            stop.set()

    def ended(self, seconds: float) -> bool:
        """Wait until no work is running, `seconds` at most; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._stops, seconds)


class Scoring:
    """Log-probabilities of a prompt's own tokens, for requests with `echo` and `logprobs`.

    One prompt at a time is scored, in a thread of its own. The engine serves other requests between two parts of it.
    """

    def __init__(self) -> None:
        self.scorer: Scorer | None = None
        self._threads: anyio.CapacityLimiter | None = None  # belongs to the server's loop
        self._active = 0

    async def scores(
        self, request: HttpRequest, service: Service, prompts: Sequence[Sequence[int]], top: int
    ) -> list[list[TokenLogprobs]]:
        """Log-probabilities by prompt, of each token after the first.

        Raises QueueFull for more than MAX_SCORING requests, ApiError if the client disconnects, and what `Scorer` and
        `Service.run` raise.
        """
        if self._active >= MAX_SCORING:
            raise QueueFull(MAX_SCORING)
        self._threads = self._threads or anyio.CapacityLimiter(1)
        self._active += 1
        left = threading.Event()
        try:
            with anyio.CancelScope() as turn:

                def leave() -> None:
                    left.set()
                    turn.cancel()  # if it waits for the thread; a thread that has begun reads `left`

                async with watched(request.receive, leave):
                    return await anyio.to_thread.run_sync(
                        self._score, service, prompts, top, left, limiter=self._threads
                    )
        finally:
            left.set()  # if the server stops: the thread ends by itself
            self._active -= 1
        raise _gone()

    def _score(
        self, service: Service, prompts: Sequence[Sequence[int]], top: int, left: threading.Event
    ) -> list[list[TokenLogprobs]]:
        def run(part: Callable[[], None]) -> None:
            if left.is_set():
                raise _gone()
            service.run(lambda engine: part())

        def opened(engine: Engine) -> Scorer:
            self.scorer = self.scorer or Scorer(engine)
            return self.scorer

        scorer = service.run(opened)
        return [scorer.score(prompt, top, run) for prompt in prompts]

    def close(self) -> None:
        """Free the scorer. Must be called after the service is closed, which then runs no part any more."""
        if self.scorer is not None:
            self.scorer.close()


def _gone() -> ApiError:
    return ApiError(400, "the client disconnected before its prompt was scored")
