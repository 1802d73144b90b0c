"""Aborts a running `llama_decode` from another thread.

llama.cpp calls its abort callback between the operations of a graph, a thousand times a step, and a Python callback
would have to wait for the GIL each time. So the callback is the C library's `strlen` on two bytes of memory that belong
to the `Breaker`: an empty string has length 0, which is false (continue); one character has length 1, which is true
(abort). It needs no lock and takes nanoseconds. Only the CPU backend calls it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import llama_cpp
from llama_cpp import llama_cpp as bindings

from rest_local import stop
from rest_local.llama import library

_is_set = ctypes.cast(library.c_library.strlen, bindings.ggml_abort_callback)

_open: weakref.WeakSet[Breaker] = weakref.WeakSet()
_open_lock = threading.Lock()


def abort_all() -> bool:
    """Abort every running decode of this process. Returns False if there was none."""
    with _open_lock:
        breakers = list(_open)
    aborted = [breaker.abort() for breaker in breakers]  # a list, so that `any` does not end at the first one
    return any(aborted)


class Breaker:
    """The abort flag of one context. A `with` block is one decode. The decoding thread sets `number` before a decode to
    identify its purpose, so that a late abort does not hit another decode; 0 means no number.

    Entering the block raises ServiceClosed in a thread that was stopped (`rest_local.stop`).
    """

    def __init__(self, context: int) -> None:
        self.number = 0
        self._aborted_number = 0
        self._flag = (ctypes.c_char * 2)()
        self._lock = threading.Lock()
        self._running = False
        llama_cpp.llama_set_abort_callback(context, _is_set, ctypes.addressof(self._flag))
        with _open_lock:
            _open.add(self)

    def abort(self, number: int | None = None) -> bool:
        """Abort the running decode, from any thread. With `number`, abort only decodes of that number, the running one
        and future ones. Returns False if no such decode is running.
        """
        with self._lock:
            if number is not None:
                self._aborted_number = number
            matches = self._running and number in (None, self.number)
            if matches:
                self._set_flag()
            return matches

    def close(self) -> None:
        """Call it before the context is freed."""
        with _open_lock:
            _open.discard(self)

    def __enter__(self) -> None:
        stop.enter(self)
        with self._lock:
            self._clear_flag()
            self._running = True
            if self.number and self.number == self._aborted_number:
                self._set_flag()

    def __exit__(self, *_: object) -> None:
        self._running = False  # without the lock, because an interrupt while waiting for it would leave this True
        self._clear_flag()

    def _set_flag(self) -> None:
        library.mute()
        self._flag[0] = b"\1"

    def _clear_flag(self) -> None:
        if self._flag[0] != b"\0":
            library.unmute()
            self._flag[0] = b"\0"
