"""How likely a prompt's own tokens are, for a request that asks it with `echo` and `logprobs`.

Contract: one prompt at a time is scored, in a thread that no other call waits for; `MOST` requests at once may be at it
or wait, and who comes then is refused. Between two parts the engine does what others wait for. A client that goes away,
or a server that stops, ends it before the next part. Knows nothing about answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
from starlette.requests import Request as HttpRequest

from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.scoring import Scorer
from rest_local.errors import QueueFull
from rest_local.server.errors import ApiError
from rest_local.server.running import watched

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service

MOST = 4


class Scoring:
    """One server's. Its memory is spent only where somebody asks."""

    def __init__(self) -> None:
        self.scorer: Scorer | None = None
        self._threads: anyio.CapacityLimiter | None = None  # belongs to the server's loop
        self._under_way = 0

    async def scores(
        self, request: HttpRequest, service: Service, prompts: Sequence[Sequence[int]], top: int
    ) -> list[list[TokenLogprobs]]:
        """Of each prompt, of each token behind the first. Raises QueueFull, ApiError for a client that is gone, and
        what `Scorer` and `Service.run` raise."""
        if self._under_way >= MOST:
            raise QueueFull(MOST)
        self._threads = self._threads or anyio.CapacityLimiter(1)
        self._under_way += 1
        left = threading.Event()
        try:
            with anyio.CancelScope() as turn:

                def leave() -> None:
                    left.set()
                    turn.cancel()  # where it waits for its turn; a thread that has begun reads `left`

                async with watched(request.receive, leave):
                    return await anyio.to_thread.run_sync(
                        self._score, service, prompts, top, left, limiter=self._threads
                    )
        finally:
            left.set()  # the server stops: the thread is left to end by itself
            self._under_way -= 1
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
        """Frees it; behind the service, which then runs no part any more."""
        if self.scorer is not None:
            self.scorer.close()


def _gone() -> ApiError:
    return ApiError(400, "the client went away before its prompt was scored")
