"""A bound on the processor time of a child process, for work that hostile input can make endless.

The clock is no measure of it: on a busy machine a child waits for a processor most of the time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

IS_MEASURED = hasattr(signal, "setitimer")
"""False on Windows, where only the clock bounds a child."""

WAIT = 12 if IS_MEASURED else 1
"""By how much the clock's bound is larger."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """End this process where the block takes more processor time."""
    if not IS_MEASURED:
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def was_exceeded(exit_status: int | None) -> bool:
    """Whether a child has ended for that. `exit_status`: as `Popen.returncode`."""
    return IS_MEASURED and exit_status == -signal.SIGPROF
