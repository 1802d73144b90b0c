"""Builds the shards of a plan in several processes.

A process opens the vocabulary for itself and gets the numbers of shards one after another. It ends when the build ends,
however that happens: it exits when the other end of its pipe is closed. `SIGINT` is left to the process that builds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from rest_local.errors import DatastoreError, RestLocalError, printable
from rest_local.retrieval.building.shards import Plan
from rest_local.retrieval.building.staging import build_shard
from rest_local.retrieval.building.tokenizing import Opener
from rest_local.retrieval.building.writing import Progress
from rest_local.retrieval.files import Files


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, context: SpawnContext, plan: Plan, directory: Path, opener: Opener, files: Files) -> None:
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, plan, directory, opener, files)
        self.process: SpawnProcess = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process now. What it was writing is cleared by the next build."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def build_shards(
    plan: Plan,
    numbers: Sequence[int],
    directory: Path,
    opener: Opener,
    jobs: int,
    progress: Progress | None = None,
    files: Files | None = None,
) -> None:
    """Build the shards with these numbers in up to `jobs` processes. What they gave is in `staging.finished`.

    progress: as for `build_shard`, called in this process. Raises what `build_shard` raises, in its own words, OSError
    as it is, and DatastoreError if a process dies.
    """
    report, left = progress or (lambda what, amount: None), deque(numbers)
    context = multiprocessing.get_context("spawn")
    made = [_Worker(context, plan, directory, opener, files or Files()) for _ in range(min(jobs, len(numbers)))]
    workers = {worker.pipe: worker for worker in made}
    try:
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                if _answer(pipe, workers[pipe], report):
                    if left:
                        pipe.send(left.popleft())
                    else:
                        workers.pop(pipe).stop()
    finally:
        for worker in workers.values():
            worker.stop()


def _answer(pipe: Connection, worker: _Worker, report: Progress) -> bool:
    """Take one message. Returns whether the process waits for a shard."""
    try:
        kind, *content = pipe.recv()
    except (EOFError, ConnectionError) as error:
        worker.process.join()
        raise DatastoreError(
            f"a process of the build ended with code {worker.process.exitcode}; less `memory` or fewer `jobs` may help"
        ) from error
    if kind == "failed":
        raise content[0]
    if kind == "progress":
        report(*content)
    return bool(kind == "ready")


def _work(pipe: Connection, plan: Plan, directory: Path, opener: Opener, files: Files) -> None:
    """The main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    numbers: deque[int] = deque()
    arrived = threading.Semaphore(0)
    threading.Thread(target=_listen, args=(pipe, numbers, arrived), daemon=True).start()
    try:
        with opener() as tokenizer:
            while True:
                pipe.send(("ready",))
                arrived.acquire()
                build_shard(
                    plan,
                    numbers.popleft(),
                    directory,
                    tokenizer,
                    lambda what, amount: pipe.send(("progress", what, amount)),
                    files,
                    workers=1,
                )
    except Exception as error:
        pipe.send(("failed", _portable(error)))


def _listen(pipe: Connection, numbers: deque[int], arrived: threading.Semaphore) -> None:
    """Receive numbers until the other end is closed; then end the process, in the middle of whatever it does."""
    while True:
        try:
            numbers.append(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
        arrived.release()


def _portable(error: Exception) -> Exception:
    """An error as another process can raise it: errors of this package take other arguments than their message."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, RestLocalError):
        return DatastoreError(str(error))
    return DatastoreError(f"a process of the build failed: {printable(repr(error))}")
