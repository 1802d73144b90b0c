"""The engine in a thread of its own: requests go in from any thread, pieces of answers come out.

    with Service(engine) as service:
        stream = service.submit(Request(engine.tokenize("def main():"), max_tokens=100))
        for piece in stream:
            print(piece.text, end="")

Contract:

- The thread steps while there is work and sleeps while there is none.
- The queue is bounded: a request that finds it full is refused at once, unless its client has fewer requests in it than
  its share. Requests that belong together are queued or refused together.
- Cancelling takes effect before the next forward pass. It also breaks off the current pass, if no other request is in
  it.
- An error of one request (its sampler or its `wake` fails) ends that request, or its notifications. An unexpected error
  that belongs to no request ends all of them, is logged, and leaves a service that refuses everything.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.sequence import Sequence
from rest_local.decoding.streaming import Stream
from rest_local.errors import QueueFull, ServiceClosed

log = logging.getLogger("rest_local.service")

QUEUE = 64
IDLE_S = 5.0  # without work, after which the engine lets go of memory that it can map again in milliseconds
IDLE_PART_S = 0.05  # of idle work, before commands are looked at again
_numbers = itertools.count(1)  # of steps, of every service: an abort must not outlive the step that it is meant for
T = TypeVar("T")
Wake = Callable[[bool], None]


class _News:
    """Lets threads wait for news of one request. `wake` is the owner's own notification, called after that."""

    def __init__(self, number: int, wake: Wake | None) -> None:
        self._number, self._wake = number, wake
        self._changed = threading.Condition()

    def wait_for(self, until: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(until, timeout)

    def tell(self, done: bool) -> None:
        """In the engine's thread."""
        with self._changed:
            self._changed.notify_all()
        if self._wake:
            try:
                self._wake(done)
            except Exception:  # the owner's own code: not a reason to end other requests
                log.exception("request %d: `wake` failed and is not called any more", self._number)
                self._wake = None


class Service:
    """Owns the thread, not the engine: close the engine after the service. `queue`: requests that may wait before
    another one is refused.
    """

    def __init__(self, engine: Engine, *, queue: int = QUEUE) -> None:
        self.engine = engine
        self._core = engine._core
        self._most_waiting = queue
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # for the thread, before its next pass
        self._alive: dict[int, Sequence] = {}
        self._number = 0
        self._step = 0  # the current or the last one; all sequences in it are in `_alive`
        self._closing = False
        self._draining = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rest-local-engine", daemon=True)
        self._thread.start()
        self._core.offers.told = self._catch_up

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        """Queue a request. `wake` is called in the engine's thread when there are pieces, and at the end (True).

        Raises what `EngineCore.prepare` raises (which may take seconds for the first exact request), QueueFull,
        ServiceClosed.
        """
        return self.submit_all([request], wake)[0]

    def submit_all(self, requests: Iterable[Request], wake: Wake | None = None) -> list[Stream]:
        """Queue all of these requests of one client, or none. Otherwise as `submit`."""
        sequences: list[Sequence] = []
        try:
            for request in requests:
                sequences.append(self._core.prepare(request))
            with self._lock:
                self._check_room(sequences[0].request.client if sequences else "")
                return [self._queue(sequence, wake) for sequence in sequences]
        except BaseException:
            for sequence in sequences:
                sequence.chooser.close()
            raise

    def _queue(self, sequence: Sequence, wake: Wake | None) -> Stream:
        self._number += 1
        news = _News(self._number, wake)
        sequence.wake = lambda: news.tell(sequence.done)
        self._alive[self._number] = sequence
        self._commands.append(lambda: None if sequence.done else self._core.submit(sequence))
        self._lock.notify()
        return Stream(sequence, news.wait_for, self._cancel)

    def run(self, call: Callable[[Engine], T], timeout: float | None = None) -> T:
        """Call something in the engine's thread, between two passes. Raises what it raises, ServiceClosed."""
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(self.engine))
                except BaseException as error:  # raised by `future.result`, in the thread that called
                    future.set_exception(error)

        with self._lock:
            if self._closing or self._failure:
                raise ServiceClosed
            self._commands.append(command)
            self._lock.notify()
        return future.result(timeout)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        with self._lock:
            return len(self._waiting())

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
        for number, slot in enumerate(self._core.slots):
            request, sequence = next((each for each in alive if each[1].is_in(slot)), (None, None))
            state = "idle" if sequence is None else "prefill" if sequence.is_prefilling else "running"
            rows.append({"id": number, "state": state, "n_past": slot.n_past, "request": request})
        return rows

    def statistics(self) -> dict[str, Any]:
        """`Engine.statistics`, and how many requests run and wait."""
        return {**self.engine.statistics(), "running": self.running, "waiting": self.waiting}

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests; give the current ones so many seconds to end, then end them. A second call does
        nothing.
        """
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
        self._core.abort(step)
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_room(self, client: str) -> None:
        """Where the queue is full, a client that has less than its share of it has room all the same."""
        if self._closing or self._failure:
            raise ServiceClosed
        clients = [sequence.request.client for sequence in self._waiting()]
        if len(clients) >= self._most_waiting <= clients.count(client) * len({client, *clients}):
            raise QueueFull(self._most_waiting)

    def _waiting(self) -> list[Sequence]:
        return [sequence for sequence in self._alive.values() if not sequence.is_admitted and not sequence.done]

    def _cancel(self, sequence: Sequence) -> None:
        sequence.leave()
        with self._lock:
            self._commands.append(lambda: self._core.cancel(sequence))
            self._lock.notify()
            step = self._step  # by the time of the abort another step may run, for other requests
            all_left = all(other.done or other.left for other in self._alive.values())
        if all_left and not sequence.done:
            self._core.abort(step)

    def _catch_up(self) -> None:
        """Use datastores that were offered, also while nothing is stepped: the old ones may hold much of the disk."""
        with self._lock:
            if not self._closing:
                self._commands.append(self._core.catch_up)
                self._lock.notify()

    # The thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._core.step(self._step)
        except BaseException as error:  # nothing above can catch it: the thread ends here
            log.exception("the engine stopped")
            self._core.save_no_sessions()
            self._failure = error
        self._end_all()

    def _run_commands(self) -> bool:
        """Run the commands so far, and wait for some where there is no work; False: the end."""
        trimmed = False
        while True:
            with self._lock:
                self._alive = {number: sequence for number, sequence in self._alive.items() if not sequence.done}
                while not self._commands and not self._alive and not self._closing:
                    if self._use_idle_time() or self._commands or self._closing:
                        continue  # a command that came while the lock was released woke no thread
                    waits = self._core.idle_work_in
                    idle = IDLE_S if not trimmed else None
                    if not self._lock.wait(idle if waits is None else min(waits, idle or waits)) and not trimmed:
                        self._core.trim()
                        trimmed = True
                commands, self._commands = self._commands, deque()
                self._step = next(_numbers)
                ending = self._closing and not (self._draining and self._alive)
            for command in commands:
                command()
                trimmed = False  # it may have looked something up
            if ending:
                return False
            if self._alive:
                return True

    def _use_idle_time(self) -> bool:
        """Let the engine do idle work for a moment, without the lock; False where it has none."""
        self._lock.release()
        try:
            return self._core.use_idle_time(IDLE_PART_S)
        finally:
            self._lock.acquire()

    def _end_all(self) -> None:
        with self._lock:
            self._closing = True
            commands, self._commands = self._commands, deque()
            sequences, self._alive = list(self._alive.values()), {}
        for sequence in sequences:
            if self._failure:
                sequence.finish("error", ServiceClosed())
            else:
                self._core.cancel(sequence)
        for command in commands:  # after the sequences have ended, so that none begins now
            command()
