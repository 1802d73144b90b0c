"""Ends what a thread does with llama.cpp while it loads and measures: it is wanted no more.

Contract: the thread works inside `with stop.here():`; `set`, from any other, breaks off its decode (on the CPU) and has
it raise ServiceClosed at the next one. Other threads, and the same thread afterwards, notice nothing.
Knows nothing of llama.cpp: `rest_local.llama.breaker` asks `enter` before every decode.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from rest_local.errors import ServiceClosed

_here = threading.local()


class Running(Protocol):
    """A decode that can be broken off."""

    def abort(self) -> bool: ...


class Stop:
    """One thread's."""

    def __init__(self) -> None:
        self._is_set = False
        self._running: Running | None = None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs in this thread, `set` ends it."""
        _here.stop = self
        try:
            yield
        finally:
            _here.stop = self._running = None

    def set(self) -> None:
        """From any thread; for good."""
        self._is_set = True
        running = self._running
        if running is not None:
            running.abort()

    def check(self) -> None:
        """Raises ServiceClosed once it is set."""
        if self._is_set:
            raise ServiceClosed

    def enter(self, running: Running) -> None:
        self.check()
        self._running = running


def enter(running: Running) -> None:
    """A decode is about to begin in this thread. Raises ServiceClosed where that was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.enter(running)


def check() -> None:
    """Between two parts of long work in this thread that is no decode. Raises ServiceClosed where it was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.check()
