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
from functools import partial
from typing import Any, Literal, TypeVar

from rest_local.decoding.core import RequestState
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.streaming import Stream
from rest_local.errors import QueueFull, ServiceClosed
from rest_local.stop import Closing

log = logging.getLogger("rest_local.service")

QUEUE = 64
IDLE_S = 5.0  # Without work for so long, the engine lets go of memory that it can map again in milliseconds.
IDLE_PART_S = 0.05  # Idle work is done for so long before commands are looked at again.
# Numbers of the steps of every service: an abort must not outlive the step that it is meant for.
_steps = itertools.count(1)
_requests = itertools.count(1)
T = TypeVar("T")
Wake = Callable[[bool], None]


class _News:
    """Lets threads wait for news of one request. `wake` is the owner's own notification, called after that."""

    def __init__(self, number: int, wake: Wake | None) -> None:
        self.number, self._wake = number, wake
        self._changed = threading.Condition()

    def wait_for(self, until: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(until, timeout)

    def tell(self, done: bool) -> None:
        """Wake the threads that wait. Called in the engine's thread."""
        with self._changed:
            self._changed.notify_all()
        if self._wake:
            try:
                self._wake(done)
            except Exception:  # The owner's own code is no reason to end other requests.
                log.exception("request %d: `wake` failed and is not called any more", self.number)
                self._wake = None


class Service(Closing):
    """Runs an engine in a thread of its own, so that any thread can submit requests.

    Args:
        engine: the engine to run. Close it after the service.
        queue: requests that may wait before one is refused
        idle_s: seconds without work after which mapped datastores are trimmed
    """

    def __init__(self, engine: Engine, *, queue: int = QUEUE, idle_s: float = IDLE_S) -> None:
        self.engine, self._idle_s = engine, idle_s
        self._most_waiting = queue
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # The thread runs them before its next pass.
        self._alive: dict[int, RequestState] = {}
        self._step = 0  # The current one, or the last one. All states in it are in `_alive`.
        self._closing: Literal["", "drain", "now"] = ""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rest-local-engine", daemon=True)
        self._thread.start()

        def use_datastores() -> None:
            """Use datastores that were offered, also while nothing is stepped: the old ones may hold much of a disk."""
            with self._lock:
                if not self._closing:
                    self._command(self.engine.decoder.use_datastores)

        engine.datastores.on_change = use_datastores

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        """Queue a request.

        Args:
            request: of `Engine.request` or `Engine.chat_request`
            wake: called in the engine's thread when there are pieces, and with True at the end

        Returns:
            A stream, which goes on in the engine's thread. Any thread may hold it.

        Raises:
            PromptEmpty, PromptTooLong, OptionError, CannotGenerate: the request cannot be served
            QueueFull: too many requests wait
            ServiceClosed: the service takes no more
        """
        return self.submit_all([request], wake)[0]

    def submit_all(self, requests: Iterable[Request], wake: Wake | None = None) -> list[Stream]:
        """Queue all of these requests of one client, or none.

        Args:
            requests: as of `submit`
            wake: as of `submit`, for any of them

        Returns:
            A stream for each request, in their order.

        Raises:
            RestLocalError: as of `submit`, for the first request that cannot be served
        """
        prepared: list[tuple[_News, RequestState]] = []
        try:
            for request in requests:
                news = _News(next(_requests), wake)
                prepared.append((news, self.engine.decoder.prepare(request, news.tell)))
            with self._lock:
                if self._closing or self._failure:
                    raise ServiceClosed
                clients = [state.request.client for state in self._waiting()]
                client = prepared[0][1].request.client if prepared else ""
                # Where the queue is full, a client that has less than its share of it has room all the same.
                if len(clients) >= self._most_waiting <= clients.count(client) * len({client, *clients}):
                    raise QueueFull(self._most_waiting)
                step, left = self._step, [each for each in self._alive.values() if not each.done]
                for news, state in prepared:
                    self._alive[news.number] = state
                    self._command(partial(self.engine.decoder.submit, state))
        except BaseException:
            for _, state in prepared:
                state.speculation.verifier.sampler.close()
            raise
        goes_on = any(_goes_on(state, each) for _, state in prepared for each in left)
        if left and not goes_on and all(each.left for each in left):
            self.engine.decoder.abort(step)
        return [Stream(state, news.wait_for, self._cancel) for news, state in prepared]

    def run(self, call: Callable[[Engine], T], timeout: float | None = None) -> T:
        """Call something in the engine's thread, between two passes.

        Args:
            call: is given the engine
            timeout: seconds to wait for it; None waits as long as it takes

        Returns:
            What the call returns.

        Raises:
            ServiceClosed: the service takes no more
            TimeoutError: it was not done in time
            Exception: whatever the call raises
        """
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(self.engine))
                except BaseException as error:  # `future.result` raises it, in the thread that called.
                    future.set_exception(error)

        with self._lock:
            if self._closing or self._failure:
                raise ServiceClosed
            self._command(command)
        return future.result(timeout)

    def _command(self, command: Callable[[], None]) -> None:
        """Queue a call for the thread, before its next pass. The caller holds the lock."""
        self._commands.append(command)
        self._lock.notify()

    @property
    def waiting(self) -> int:
        """Return how many requests have no slot yet."""
        with self._lock:
            return len(self._waiting())

    @property
    def running(self) -> int:
        """Return how many requests have a slot."""
        with self._lock:
            return sum(state.text.has_slot and not state.done for state in self._alive.values())

    def slots(self) -> list[dict[str, Any]]:
        """Return for each slot: id, state (idle, prefill, running), n_past, and the request it serves."""
        with self._lock:
            alive = list(self._alive.items())
        rows = []
        for number, slot in enumerate(self.engine.decoder.slots):
            request, state = next((each for each in alive if each[1].text.is_in(slot)), (None, None))
            doing = "idle" if state is None else "prefill" if state.text.is_prefilling else "running"
            rows.append({"id": number, "state": doing, "n_past": slot.n_past, "request": request})
        return rows

    def statistics(self) -> dict[str, Any]:
        """Return `Engine.statistics`, and how many requests run and wait."""
        return {**self.engine.statistics(), "running": self.running, "waiting": self.waiting}

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, and end the current ones. A second call does nothing.

        Args:
            drain_seconds: what the current requests get to end by themselves
        """
        if drain_seconds > 0:
            with self._lock:
                self._closing = "drain"
                self._lock.notify()
            self._thread.join(drain_seconds)
        with self._lock:
            self._closing = "now"
            self._lock.notify()
            for state in self._alive.values():
                state.leave()
            self.engine.decoder.abort(self._step)
        self._thread.join()

    def _waiting(self) -> list[RequestState]:
        return [state for state in self._alive.values() if not state.text.has_slot and not state.done]

    def _cancel(self, state: RequestState) -> None:
        state.leave()
        with self._lock:
            self._command(lambda: self.engine.decoder.cancel(state))
            step = self._step  # By the time of the abort another step may run, for other requests.
            alive = [other for other in self._alive.values() if not other.done]
        # A client that gave up often asks again, so a part of a prompt is finished until another request comes.
        if alive and all(other.left and not _goes_on(other, other) for other in alive):
            self.engine.decoder.abort(step)

    # The thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self.engine.decoder.step(self._step)
        except BaseException as error:  # Nothing above can catch it: the thread ends here.
            log.exception("the engine stopped")
            decoder = self.engine.decoder
            if decoder.generates and (sessions := decoder.context.scheduler.slots.sessions) is not None:
                sessions.stop_saving()  # It is not known what the cells hold.
            self._failure = error
        with self._lock:
            self._closing = "now"
            commands, self._commands = self._commands, deque()
            states, self._alive = list(self._alive.values()), {}
        for state in states:
            if self._failure:
                state.finish("error", ServiceClosed())
            else:
                self.engine.decoder.cancel(state)
        for command in commands:  # After the states have ended, so that none begins now.
            command()

    def _run_commands(self) -> bool:
        """Run the commands so far, and wait for some if there is no work. Return False at the end of the service."""
        trimmed = False
        while True:
            with self._lock:
                self._alive = {number: state for number, state in self._alive.items() if not state.done}
                while not self._commands and not self._alive and not self._closing:
                    if self._use_idle_time() or self._commands or self._closing:
                        continue  # A command that came while the lock was released woke no thread.
                    waits = self.engine.decoder.idle_work_in
                    if waits is not None and (trimmed or waits < self._idle_s):
                        self._lock.wait(waits)
                    elif not self._lock.wait(None if trimmed else self._idle_s):
                        self.engine.datastores.trim()
                        trimmed = True
                commands, self._commands = self._commands, deque()
                self._step = next(_steps)
                ending = self._closing == "now" or (self._closing == "drain" and not self._alive)
            for command in commands:
                command()
                trimmed = False  # It may have looked something up.
            if ending:
                return False
            if self._alive:
                return True

    def _use_idle_time(self) -> bool:
        """Let the engine do idle work for a moment, without the lock. Return False if it has none."""
        self._lock.release()
        try:
            return self.engine.decoder.use_idle_time(IDLE_PART_S)
        finally:
            self._lock.acquire()


def _goes_on(state: RequestState, other: RequestState) -> bool:
    """Return True if a request could go on with the part of a prompt that is evaluated now for another one."""
    request = state.request
    is_shared = request.keep_prefix and other.request.keep_prefix and request.owner == other.request.owner
    return is_shared and other.text.is_evaluated_for(state.text.tokens)
