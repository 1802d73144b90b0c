"""End work: `Closing` is the base of what closes at the end of a block, and `Stop` stops a thread that loads a model or
measures with llama.cpp when nobody needs its work any more.

Contract of `Stop`: the thread works inside `with stop.here():`, and such blocks may be nested. `set`, called from
another thread, aborts its decode (on the CPU) and lets its next decode raise ServiceClosed. Other threads are not
affected, nor is this one afterwards.
`raise_dropped` gives an interrupt that Python dropped to the main thread's next decode or check.
This module knows nothing about llama.cpp: `rest_local.llama.context` calls `enter` before every decode.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rest_local.errors import ServiceClosed

if TYPE_CHECKING:
    from typing_extensions import Self

_here = threading.local()
_dropped: BaseException | None = None


class Closing:
    """A context manager that calls `close` at the end of its block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stop:
    """A switch that stops the work of one thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._abort: Callable[[], object] | None = None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Let `set` stop the work of this thread while the block runs."""
        outer = _stops()
        _here.stops = (*outer, self)
        try:
            yield
        finally:
            _here.stops, self._abort = outer, None

    def set(self) -> None:
        """Stop the thread. Any thread may call it, and it cannot be undone."""
        self._is_set = True
        if (abort := self._abort) is not None:
            abort()

    def check(self) -> None:
        """Raise ServiceClosed if `set` was called."""
        if self._is_set:
            raise ServiceClosed

    def enter(self, abort: Callable[[], object]) -> None:
        """Prepare for a decode, which `abort` ends. Raises ServiceClosed if `set` was called."""
        self.check()
        self._abort = abort


def enter(abort: Callable[[], object]) -> None:
    """Prepare for a decode in this thread, which `abort` ends. Raises ServiceClosed if the thread was stopped."""
    _raise()
    for stop in _stops():
        stop.enter(abort)


def check() -> None:
    """Raise ServiceClosed if this thread was stopped. Long work calls it between its parts."""
    _raise()
    for stop in _stops():
        stop.check()


def raise_dropped(error: BaseException) -> None:
    """Let the next decode or check of the main thread raise an exception that Python could only drop."""
    global _dropped
    _dropped = error


def _raise() -> None:
    global _dropped
    if _dropped is not None and threading.current_thread() is threading.main_thread():
        error, _dropped = _dropped, None
        raise error


def _stops() -> tuple[Stop, ...]:
    stops: tuple[Stop, ...] = getattr(_here, "stops", ())
    return stops
