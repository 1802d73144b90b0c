"""Many requests in the same forward passes, in the calling thread: what `Engine.batch` and offline batches use.

Contract:

- As many requests are decoded together as give the most tokens per second by the cost curve, and at most as many as the
  engine has slots. The next one starts as soon as one has ended.
- An error of one request ends that request and no other.
- An engine of exact settings has one slot, so its requests take turns.

Knows nothing about files, texts or the order of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from rest_local.calibration.cost import CostCurve
from rest_local.decoding.core import RequestState
from rest_local.decoding.decoder import Decoder
from rest_local.decoding.prefill import STALL_MS
from rest_local.decoding.request import Request
from rest_local.decoding.stream import Result
from rest_local.errors import RestLocalError

# Nothing reads along, so prompts are evaluated in parts as large as a batch: the fastest for all.
PATIENT_MS = 1e9
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CLOSE = 0.5
"""Share of the most tokens per second. The curve of a busy machine errs by as much: on the toy model it led to 2 at a
time in place of 16, which cost a third more. It also overstates what the cells of others cost with flash attention,
which skips them. And on a GPU, 4 of 32 at a time give a quarter of the tokens."""


@dataclass(frozen=True)
class Finished:
    """One request of a batch that has ended.

    Attributes:
        number: its place among the requests that were given, from 0
        result: its answer, incomplete if there is an `error`
        error: what ended it, None if it was answered
    """

    number: int
    request: Request
    result: Result
    error: RestLocalError | None = None


class RunningBatch:
    """Requests that the engine's thread decodes together: `add` while it `has_room`, `step`, `close` at the end."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._running: dict[int, tuple[Request, RequestState]] = {}
        self._numbers = count()
        self._width = max(len(decoder.slots), 1)
        self._stall_for(PATIENT_MS)

    @property
    def has_room(self) -> bool:
        """Return True if one more request is to be decoded now."""
        return len(self._running) < self._width

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def add(self, request: Request) -> int:
        """Start a request and return its number. It waits for room. If `Decoder.prepare` raises, it has no number."""
        state = self._decoder.prepare(request)
        number = next(self._numbers)
        self._decoder.submit(state)
        self._running[number] = request, state
        return number

    def step(self) -> list[Finished]:
        """Do one forward pass for all that run, and return the requests that have ended, by number."""
        self._decoder.step()
        ended = [
            Finished(number, request, state.result, state.error)
            for number, (request, state) in self._running.items()
            if state.done
        ]
        for each in ended:
            del self._running[each.number]
        if ended:
            context, slots = self._decoder.context, len(self._decoder.slots)
            queue = context.scheduler.queue
            cells = queue.cells_in_use() / max(len(queue.admitted), 1)
            self._width = best_width(context.tuning.curve, cells, [*(n for n in WIDTHS if n < slots), slots])
        return ended

    def cancel(self, numbers: Iterable[int] | None = None) -> None:
        """End the requests of these numbers that still run, or all of them. They do not count as ended."""
        for number in list(self._running if numbers is None else numbers):
            if number in self._running:
                self._decoder.cancel(self._running.pop(number)[1])

    def close(self) -> None:
        """End what still runs, and let the engine serve readers again."""
        self.cancel()
        self._stall_for(STALL_MS)

    def _stall_for(self, ms: float) -> None:
        if self._decoder.generates:
            self._decoder.context.scheduler.prefill.stall_ms = ms


def best_width(curve: CostCurve, cells: float, widths: Sequence[int]) -> int:
    """Return the largest of `widths` (ascending) that gives close to the most tokens per second without drafts.

    Each request has `cells` cells. Weights are read once for all requests, but the attention of each passes over the
    cells of all, so with long texts fewer can be faster.
    """
    rates = [n / float(curve.expected(round(n * cells))[n - 1]) for n in widths]
    return max(n for n, rate in zip(widths, rates, strict=True) if rate >= CLOSE * max(rates))


def answers(decoder: Decoder, requests: Iterable[Request]) -> Iterator[Finished]:
    """Yield each request as it ends. What still runs is cancelled if the iterator is closed, or a pass fails."""
    batch = RunningBatch(decoder)
    waiting: Iterator[tuple[int, Request]] = enumerate(requests)
    if isinstance(requests, Sequence):  # Prompts that share a beginning become neighbours.
        waiting = iter(sorted(waiting, key=lambda each: list(each[1].prompt)))
    numbers: dict[int, int] = {}  # The number in the batch -> the number as given.
    try:
        while True:
            while batch.has_room and (taken := next(waiting, None)):
                number, request = taken
                try:
                    numbers[batch.add(request)] = number
                except RestLocalError as error:
                    yield Finished(number, request, Result(finish_reason="error"), error)
            if not batch.busy:
                break
            for done in batch.step():
                yield Finished(numbers.pop(done.number), done.request, done.result, done.error)
    finally:
        batch.close()
