"""`rest-local index build` in a process of its own, with a vocabulary that does what files in a folder say.

    python ray_build.py CONTROL ARGUMENTS...

A task has some 16 KB of text. Files in the folder CONTROL:

    hold    while it is there, a text with its content is not tokenized; `held-NODE-PID` says which task waits
    die-*   a text with its content removes it, and ends the process of the task

The vocabulary's classes are part of the main module, so Ray sends them to nodes that do not have this file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Bytes:
    """Every byte is a token."""

    name, size, hash = "bytes", 256, "b0" * 32

    def __init__(self, control: Path) -> None:
        self.control = control

    def tokenize(self, text: str) -> np.ndarray[Any, Any]:
        self._hold(text)
        for order in self.control.glob("die-*"):
            with contextlib.suppress(FileNotFoundError):
                if order.read_text() in text:
                    order.unlink()
                    os._exit(7)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def ship(self) -> Opened:
        return Opened(self.control)

    def _hold(self, text: str) -> None:
        hold = self.control / "hold"
        try:
            wanted = hold.read_text() in text
        except FileNotFoundError:
            return
        if wanted:
            import ray

            (self.control / f"held-{ray.get_runtime_context().get_node_id()}-{os.getpid()}").touch()
            while hold.exists():
                time.sleep(0.01)


class Opened:
    def __init__(self, control: Path) -> None:
        self.control = control

    def __call__(self) -> contextlib.AbstractContextManager[Bytes]:
        return contextlib.nullcontext(Bytes(self.control))


def _main(control: Path, arguments: list[str]) -> None:
    from rest_local.cli.index import group
    from rest_local.cli.main import main
    from rest_local.retrieval.building import cluster

    @contextlib.contextmanager
    def vocabulary(path: Path) -> Iterator[Bytes]:
        yield Bytes(control)

    cluster.GROUP = 1 << 14
    group.open_vocabulary, group.model_path = vocabulary, lambda model: Path("bytes")  # type: ignore[assignment]
    sys.argv[1:] = ["index", "build", *arguments]
    main()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
