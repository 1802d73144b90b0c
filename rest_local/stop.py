"""How work ends: `Closing`, the base of what is closed at the end of a block, and `Stop`, which stops a thread that
loads a model or measures with llama.cpp, when its work is not needed any more.

Contract of `Stop`: the thread works inside `with stop.here():`. `set`, called from another thread, aborts its decode
(on the CPU) and lets its next decode raise ServiceClosed. Other threads are not affected, nor is this one afterwards.
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


class Closing:
    """A context manager whose block ends with `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stop:
    """The stop of one thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._abort: Callable[[], object] | None = None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs in this thread, `set` stops it."""
        _here.stop = self
        try:
            yield
        finally:
            _here.stop = self._abort = None

    def set(self) -> None:
        """Stop the thread. May be called from any thread, and cannot be undone."""
        self._is_set = True
        if (abort := self._abort) is not None:
            abort()

    def check(self) -> None:
        """Raise ServiceClosed if `set` was called."""
        if self._is_set:
            raise ServiceClosed

    def enter(self, abort: Callable[[], object]) -> None:
        """Call it before a decode, with what aborts that. Raises ServiceClosed if `set` was called."""
        self.check()
        self._abort = abort


def enter(abort: Callable[[], object]) -> None:
    """Call it before a decode in this thread. Raises ServiceClosed if the thread was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.enter(abort)


def check() -> None:
    """Call it between two parts of other long work in this thread. Raises ServiceClosed if the thread was stopped."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is not None:
        stop.check()
