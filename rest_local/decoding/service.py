"""The engine in a thread of its own: requests go in from any thread, pieces of answers come out.

    with Service(engine) as service:
        ticket = service.submit(Request(engine.tokenize("def main():"), max_tokens=100))
        for piece in ticket:
            print(piece.text, end="")

Contract: the thread steps while there is work and sleeps while there is none. The queue is bounded: who finds it full
is refused at once. Cancelling takes effect before the next forward pass, and breaks off the one under way where nobody
else waits for it. An error of one request (its sampler fails, its owner cannot be told) ends that request or costs it
its news; one that belongs to none of them and that nobody expected ends all, is logged, and leaves a service that
refuses everything.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.sequence import Sequence
from rest_local.decoding.stream import Piece, Result
from rest_local.errors import QueueFull, RestLocalError, ServiceClosed

log = logging.getLogger("rest_local.service")

QUEUE = 64
IDLE_S = 5.0  # without work, after which the engine lets go of memory that it can map again in milliseconds
IDLE_PART_S = 0.05  # that the engine works for itself before orders are looked at again
_numbers = itertools.count(1)  # of steps, of every service: an abort must not outlive the one that it was meant for
T = TypeVar("T")
Wake = Callable[[bool], None]


class Ticket:
    """What its owner knows of a submitted request. Any thread."""

    def __init__(self, number: int, sequence: Sequence, cancel: Callable[[Sequence], None], wake: Wake | None) -> None:
        self.id = number
        self._sequence = sequence
        self._cancel = cancel
        self._wake = wake
        self._news = threading.Condition()
        sequence.wake = self._tell

    @property
    def result(self) -> Result:
        """What has come so far; complete when `done`."""
        return self._sequence.result

    @property
    def done(self) -> bool:
        return self._sequence.done

    @property
    def error(self) -> RestLocalError | None:
        """What it ended with, if it was not what it should."""
        return self._sequence.error

    def poll(self) -> list[Piece]:
        """What has come since the last call, without waiting. Ask `done` first: what comes before it is then here."""
        return self._sequence.read()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises what it ended with, and TimeoutError after `timeout` seconds."""
        with self._news:
            if not self._news.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.id} is not done after {timeout} s")
        if self.error:
            raise self.error
        return self.result

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come; raises at the end what it ended with."""
        while True:
            done = self.done
            yield from self.poll()
            if done:
                break
            with self._news:
                self._news.wait_for(lambda: self.done or self._sequence.has_news)
        if self.error:
            raise self.error

    def cancel(self) -> None:
        """End it before the next forward pass; what was said stays in `result`."""
        self._cancel(self._sequence)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()
        if self._wake:
            try:
                self._wake(self.done)
            except Exception:  # the owner's own code: not a reason to end what others asked for
                log.exception("request %d: its owner cannot be told of news and is not told any more", self.id)
                self._wake = None


class Service:
    """Owns the thread, not the engine: whoever made that closes it, after this. `queue`: requests that may wait."""

    def __init__(self, engine: Engine, *, queue: int = QUEUE) -> None:
        self.engine = engine
        self._most_waiting = queue
        self._lock = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()  # for the thread, before its next pass
        self._alive: dict[int, Sequence] = {}
        self._number = 0
        self._step = 0  # under way or just done; in it are none but those of `_alive`
        self._closing = False
        self._draining = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rest-local-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, wake: Wake | None = None) -> Ticket:
        """Queue a request. `wake` is called in the engine's thread when there are pieces, and at the end (True).

        Raises at once what is wrong with it (as `Engine.prepare`, which may take seconds for the first exact request),
        QueueFull, ServiceClosed.
        """
        sequence = self.engine.prepare(request)
        with self._lock:
            try:
                self._check_room()
            except RestLocalError:
                sequence.chooser.close()
                raise
            self._number += 1
            ticket = Ticket(self._number, sequence, self._cancel, wake)
            self._alive[self._number] = sequence
            self._orders.append(lambda: None if sequence.done else self.engine.submit(sequence))
            self._lock.notify()
        return ticket

    def run(self, call: Callable[[Engine], T], timeout: float | None = None) -> T:
        """Run something on the engine's thread, between two passes. Raises what it raises, ServiceClosed."""
        future: Future[T] = Future()

        def order() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(self.engine))
                except BaseException as error:  # goes to whoever asked
                    future.set_exception(error)

        with self._lock:
            if self._closing or self._failure:
                raise ServiceClosed
            self._orders.append(order)
            self._lock.notify()
        return future.result(timeout)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        with self._lock:
            return self._count_waiting()

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        with self._lock:
            return sum(sequence.is_admitted and not sequence.done for sequence in self._alive.values())

    def slots(self) -> list[dict[str, Any]]:
        """By slot: id, state (idle, prefill, running), n_past, and the request it serves."""
        with self._lock:
            alive = list(self._alive.items())
        rows = []
        for number, slot in enumerate(self.engine.slots):
            request, sequence = next((each for each in alive if each[1].has(slot)), (None, None))
            state = "idle" if sequence is None else "prefill" if sequence.is_prefilling else "running"
            rows.append({"id": number, "state": state, "n_past": slot.n_past, "request": request})
        return rows

    def statistics(self) -> dict[str, Any]:
        """`Engine.statistics`, and how many requests run and wait."""
        return {**self.engine.statistics(), "running": self.running, "waiting": self.waiting}

    def close(self, drain_seconds: float = 0.0) -> None:
        """Take nothing more; give what is under way so many seconds to end, then end it. Again does nothing."""
        with self._lock:
            self._closing, self._draining = True, drain_seconds > 0
            self._lock.notify()
        if drain_seconds > 0:
            self._thread.join(drain_seconds)
        with self._lock:
            self._draining = False
            self._lock.notify()
            step, sequences = self._step, list(self._alive.values())
        for sequence in sequences:
            sequence.leave()
        self.engine.abort(step)
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_room(self) -> None:
        if self._closing or self._failure:
            raise ServiceClosed
        if self._count_waiting() >= self._most_waiting:
            raise QueueFull(self._most_waiting)

    def _count_waiting(self) -> int:
        return sum(not sequence.is_admitted and not sequence.done for sequence in self._alive.values())

    def _cancel(self, sequence: Sequence) -> None:
        sequence.leave()
        with self._lock:
            self._orders.append(lambda: self.engine.cancel(sequence))
            self._lock.notify()
            step = self._step  # by the time of the abort another may be under way, for others
            nobody_waits = all(other.done or other.left for other in self._alive.values())
        if nobody_waits and not sequence.done:
            self.engine.abort(step)

    # The thread

    def _run(self) -> None:
        try:
            while self._obey():
                self.engine.step(self._step)
        except BaseException as error:  # nobody can catch it: the thread ends here
            log.exception("the engine stopped")
            self._failure = error
        self._end_all()

    def _obey(self) -> bool:
        """Carry out what was ordered, and wait for orders where there is nothing to do; False: the end."""
        trimmed = False
        while True:
            with self._lock:
                self._alive = {number: sequence for number, sequence in self._alive.items() if not sequence.done}
                while not self._orders and not self._alive and not self._closing:
                    if self._use_idle_time() or self._orders or self._closing:
                        continue  # what came while the lock was released woke no one
                    if not self._lock.wait(None if trimmed else IDLE_S):
                        self.engine.trim()
                        trimmed = True
                orders, self._orders = self._orders, deque()
                self._step = next(_numbers)
                ending = self._closing and not (self._draining and self._alive)
            for order in orders:
                order()
                trimmed = False  # it may have looked something up
            if ending:
                return False
            if self._alive:
                return True

    def _use_idle_time(self) -> bool:
        """Let the engine work for itself for a moment, without the lock; False where it has nothing to do."""
        self._lock.release()
        try:
            return self.engine.use_idle_time(IDLE_PART_S)
        finally:
            self._lock.acquire()

    def _end_all(self) -> None:
        with self._lock:
            self._closing = True
            orders, self._orders = self._orders, deque()
            sequences, self._alive = list(self._alive.values()), {}
        for sequence in sequences:
            if self._failure:
                sequence.finish("error", ServiceClosed())
            else:
                self.engine.cancel(sequence)
        for order in orders:  # behind the sequences, of which none is to begin now
            order()
