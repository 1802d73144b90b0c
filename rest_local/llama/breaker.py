"""Breaks off a `llama_decode` that is running, from another thread.

llama.cpp asks its abort callback between the operations of a graph, a thousand times a step, and a callback in Python
would have to wait for the interpreter lock each time. So the callback is the C library's `strlen` over two bytes of
memory that belong to the `Breaker`: an empty string is 0, false, go on; one character is 1, true, stop. It asks no
lock and costs nanoseconds. The CPU backend is the one that asks.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from types import TracebackType

import llama_cpp
from llama_cpp import llama_cpp as bindings

from rest_local import stop
from rest_local.llama import library

_is_set = ctypes.cast(library.c_library.strlen, bindings.ggml_abort_callback)

_open: weakref.WeakSet[Breaker] = weakref.WeakSet()
_open_lock = threading.Lock()


def abort_all() -> bool:
    """Break off every decode of this process that is running; False where there was none."""
    with _open_lock:
        breakers = list(_open)
    broken = [breaker.abort() for breaker in breakers]  # every one, also behind the first
    return any(broken)


class Breaker:
    """One context's. A `with` block is a decode. `number`, set by the thread that decodes before it does, says what the
    decode is for, so that an abort that comes late hits nobody else; 0: nothing that could be named.

    Entering raises ServiceClosed in a thread that was stopped (`rest_local.stop`).
    """

    def __init__(self, context: int) -> None:
        self.number = 0
        self._unwanted = 0
        self._flag = (ctypes.c_char * 2)()
        self._lock = threading.Lock()
        self._running = False
        llama_cpp.llama_set_abort_callback(context, _is_set, ctypes.addressof(self._flag))
        with _open_lock:
            _open.add(self)

    def abort(self, number: int | None = None) -> bool:
        """From any thread: the decode that is running, if any; with `number` every decode of that
        number, the one that is running and those to come, and no other. False where none is running that is meant.
        """
        with self._lock:
            if number is not None:
                self._unwanted = number
            meant = self._running and number in (None, self.number)
            if meant:
                self._break_off()
            return meant

    def close(self) -> None:
        """The context is about to be freed."""
        with _open_lock:
            _open.discard(self)

    def __enter__(self) -> None:
        stop.enter(self)
        with self._lock:
            self._proceed()
            self._running = True
            if self.number and self.number == self._unwanted:
                self._break_off()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False  # without the lock: an interrupt while waiting for it would leave this set
        self._proceed()

    def _break_off(self) -> None:
        library.mute()
        self._flag[0] = b"\1"

    def _proceed(self) -> None:
        if self._flag[0] != b"\0":
            library.unmute()
            self._flag[0] = b"\0"
