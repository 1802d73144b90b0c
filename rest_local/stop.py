"""Stops a thread that loads a model or measures with llama.cpp, when its work is not needed any more.

Contract: the thread works inside `with stop.here():`. `set`, called from another thread, aborts its decode (on the CPU)
and lets its next decode raise ServiceClosed. Other threads are not affected, nor is this thread after the block.
This module knows nothing about llama.cpp: `rest_local.llama.context` calls `enter` before every decode.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from rest_local.errors import ServiceClosed

_here = threading.local()


class Abortable(Protocol):
    """A decode that can be aborted."""

    def abort(self) -> bool: ...


class Stop:
    """The stop of one thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._running: Abortable | None = None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs in this thread, `set` stops it."""
        _here.stop = self
        try:
            yield
        finally:
            _here.stop = self._running = None

    def set(self) -> None:
        """Stop the thread. May be called from any thread, and cannot be undone."""
        self._is_set = True
        running = self._running
        if running is not None:
            running.abort()

    def check(self) -> None:
        """Raise ServiceClosed if `set` was called."""
        if self._is_set:
            raise ServiceClosed

    def enter(self, running: Abortable) -> None:
        """Call it before a decode. Raises ServiceClosed if `set` was called."""
        self.check()
        self._running = running


def enter(running: Abortable) -> None:
    """Call it before a decode in this thread. Raises ServiceClosed if the thread was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.enter(running)


def check() -> None:
    """Call it between two parts of other long work in this thread. Raises ServiceClosed if the thread was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.check()
