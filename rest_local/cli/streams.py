"""The standard streams while Ray runs in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_messages_of_ray() -> Iterator[None]:
    """The standard streams for this program alone. Ray writes to both, from C++ and from threads of its own; its log
    files have the same."""
    ours, stderr = [os.dup(1), os.dup(2)], sys.stderr
    with open(os.devnull, "wb") as nowhere, open(ours[1], "w", encoding="utf-8", buffering=1, closefd=False) as shown:
        sys.stdout.flush()
        stderr.flush()
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.stderr = shown
        try:
            yield
        finally:
            shown.flush()
            sys.stderr = stderr
            sys.stdout.flush()  # what was printed there goes nowhere, too
            for descriptor, own in zip((1, 2), ours, strict=True):
                os.dup2(own, descriptor)
                os.close(own)
