"""Runs the lines of one batch, as far as other requests leave the machine to it.

Contract:

- Every line ends with one record: an answer, or why there is none. A server that is busy or loads a model is waited
  for; another fault of the server is tried again, `TRIES` times in all.
- `run` returns when all lines have a record, and soon after the batch is cancelled or expires. What was not answered
  then, or is under way when the task is cancelled, has no record.
- A line is started only while no request of others is running and a slot stays free; after `TRICKLE_SECONDS` without
  any, one is started in any case. Lines of different models do not run at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
from pydantic_core import from_json

from rest_local.router.batch_lines import Line, answered, body_of, not_run

log = logging.getLogger("rest_local.server")

Ask = Callable[[str, str, bytes, "bytes | None"], Awaitable[tuple[int, bytes]]]
"""One call in the server: method, path with query, body and API key to status and body."""


MOST_AT_ONCE = 32  # lines
POLL_SECONDS = 0.2  # between two looks at slots that others use
LOOK_SECONDS = 5.0  # between two looks at the clock
TRICKLE_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds, before a line is tried again
TRIES = 3
END_SECONDS = 5.0  # for calls that were cancelled to end
_BUSY = ("busy", "loading")
_FAULT = {"message": "the server failed at this request", "type": "server_error", "param": None, "code": "failed"}


class Runner:
    """One run.

    source    the file that the lines were read from
    write     adds a record to the results
    over      whether to stop: the batch was cancelled, or its time is over
    changed   set when `over` may have changed
    """

    def __init__(
        self,
        source: Path,
        ask: Ask,
        key: bytes | None,
        write: Callable[[Mapping[str, Any]], Awaitable[None]],
        over: Callable[[], bool],
        changed: asyncio.Event,
    ) -> None:
        self._source, self._ask, self._key = source, ask, key
        self._write, self._over, self._changed = write, over, changed
        self._running: dict[asyncio.Task[dict[str, Any]], Line] = {}
        self._started = time.monotonic()  # a line, the last time

    async def run(self, lines: Sequence[Line]) -> None:
        """Run these. Raises what `write` raises."""
        left = deque(lines)
        try:
            while (left or self._running) and not self._over():
                self._changed.clear()
                for _ in range(await self._room(left[0].model) if left else 0):
                    self._start(left.popleft())
                    if not left or left[0].model != next(iter(self._running.values())).model:
                        break
                await self._wait(POLL_SECONDS if left else LOOK_SECONDS)
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running, timeout=END_SECONDS)

    def _start(self, line: Line) -> None:
        self._running[asyncio.create_task(self._answer(line))] = line
        self._started = time.monotonic()

    async def _wait(self, seconds: float) -> None:
        """Until a line ends or something has changed; writes what has ended."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((changed, *self._running), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            await self._write(task.result())

    async def _room(self, model: str) -> int:
        """How many lines of a model may be started now."""
        if any(line.model != model for line in self._running.values()):
            return 0
        slots, busy = await self._slots(model)
        ours = len(self._running)
        if busy > ours:  # by requests of others
            late = time.monotonic() - self._started > TRICKLE_SECONDS
            return 1 if late and not ours else 0
        return min(max(slots - 1, 1), MOST_AT_ONCE) - ours

    async def _slots(self, model: str) -> tuple[int, int]:
        """The number of slots of a model, and how many are in use; one where that cannot be found out."""
        try:
            status, data = await self._ask("GET", f"/slots?model={quote(model, safe='')}", b"", self._key)
            found = from_json(data) if status == 200 else []
            return max(len(found), 1), sum(bool(slot["is_processing"]) for slot in found)
        except Exception as error:
            log.debug("the slots of a model are not known: %r", error)
            return 1, 0

    async def _answer(self, line: Line) -> dict[str, Any]:
        """The record of a line."""
        try:
            body = await anyio.to_thread.run_sync(body_of, self._source, line)
        except (OSError, ValueError) as error:
            log.warning("a line of a batch cannot be read again: %s", error)
            return not_run(line.job, "input_unreadable", "the line cannot be read from the input any more")
        pause, faults = FIRST_PAUSE, 0
        while True:
            status, answer = await self._asked(line.job.url, body)
            if status in (429, 503) and _code(answer) in _BUSY:
                pass
            elif status < 500 or status == 501 or (faults := faults + 1) >= TRIES:
                return answered(line.job, status, answer)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _asked(self, url: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON of an answer; 502 for what is none."""
        try:
            status, data = await self._ask("POST", url, body, self._key)
            return status, from_json(data)
        except Exception as error:
            log.warning("a request of a batch failed: %r", error)
            return 502, {"error": _FAULT}


def _code(answer: Any) -> Any:
    """The code of an error."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None
