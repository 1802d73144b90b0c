"""Handle Ctrl-C: the first one raises KeyboardInterrupt within milliseconds, and a second one ends the process with
130.

Python runs signal handlers between bytecodes only, so while llama.cpp evaluates a long prompt a handler would wait for
it. The byte that the C-level handler writes to the wake-up descriptor arrives at once, and ctypes gives up the
interpreter lock during the call. So a thread that reads the descriptor can break off the evaluation, and can end the
process in the middle of it.

A handler may also run inside a callback of llama.cpp or in a finalizer, where Python can only drop what it raises. Then
the next decode raises it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rest_local import stop

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_CODE, TERMINATED = 130, 143
_RESET = b"\0"  # No signal has number 0.

_wakeup: int | None = None
# Called before a second Ctrl-C ends the process, to put the settings of the terminal back.
at_end: list[Callable[[], None]] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM inside of `terminable`."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated for SIGTERM while the block runs in the main thread, so that the block can say what it kept."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def watch() -> None:
    """Start watching. Call it once, from the main thread."""
    global _wakeup
    reading, _wakeup = os.pipe()
    os.set_blocking(_wakeup, False)
    signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    threading.Thread(target=_count, args=(reading,), name="second-interrupt", daemon=True).start()
    sys.unraisablehook = _take


def watch_again() -> None:
    """Go on watching after a library watched signals in its own way. The next interrupt counts as a first one."""
    if _wakeup is not None:
        signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
        reset()


def reset() -> None:
    """Treat the next Ctrl-C as a first one again, for example after an answer was stopped.

    The byte goes through the same pipe as the signals, so it cannot overtake the interrupt that it forgives.
    """
    if _wakeup is not None:
        os.write(_wakeup, _RESET)


def _take(unraisable: UnraisableHookArgs) -> None:
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        stop.raise_dropped(unraisable.exc_value)
    else:
        sys.__unraisablehook__(unraisable)


def _count(reading: int) -> None:
    interrupts = 0
    while byte := os.read(reading, 1):
        if byte == _RESET:
            interrupts = 0
        elif byte[0] in (signal.SIGINT, signal.SIGTERM):
            interrupts += byte[0] == signal.SIGINT
            if interrupts > 1:
                for terminal in filter(os.isatty, (1, 2)):  # Progress bars and live displays have hidden the cursor.
                    with contextlib.suppress(OSError):
                        os.write(terminal, b"\x1b[?25h")
                        break
                for put_back in at_end:
                    put_back()
                os._exit(EXIT_CODE)
            # End the running `llama_decode`, so that the handler's turn comes. Do not import the module for that.
            if abort_all := getattr(sys.modules.get("rest_local.llama.context"), "abort_all", None):
                abort_all()
