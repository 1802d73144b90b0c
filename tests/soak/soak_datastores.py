"""Readers of a datastore while a writer works. Kills of writers are in soak_kills.py.

Not collected by `make test`, whose tests kill at every step of one small build; `make soak` runs it.
REST_LOCAL_SOAK_SECONDS is the time of each test, 60 without it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "retrieval"))

from stores import make

from rest_local.retrieval import Datastore

SECONDS = float(os.environ.get("REST_LOCAL_SOAK_SECONDS", "60"))
READERS = 8
CONTEXT = multiprocessing.get_context("spawn")


def commit_of(number: int) -> dict[str, list[int]]:
    """Return what commit `number` holds. Everything in it tells the number, so that a mix of two is seen."""
    mark = number % 997
    return {f"{mark}-{name}.py": [mark, name, *([mark] * (50 + 40 * name))] for name in range(6)}


def number_in(content: dict[str, list[int]]) -> int:
    """Return the number of the one commit that this is."""
    mark = int(next(iter(content)).partition("-")[0])
    assert content == commit_of(mark), f"a mix of commits: {list(content)}"
    return mark


def opened(path: Path) -> dict[str, list[int]]:
    """Return what a reader sees: an open datastore stays whole although its files are deleted."""
    with Datastore.open(path) as store:
        found: dict[str, list[int]] = {}
        for index in range(len(store.segments)):
            found |= {name: tokens.tolist() for name, tokens, _ in store.documents(index)}
        return found


def read_until(path: Path, begins: Barrier, ends: Event, seen: multiprocessing.Queue[tuple[int, int]]) -> None:
    numbers = set()
    reads = 0
    begins.wait()
    while not ends.is_set():
        numbers.add(number_in(opened(path)))
        reads += 1
    seen.put((reads, len(numbers)))


def test_readers_beside_a_writer(tmp_path: Path) -> None:
    """Eight processes that open and read while one commits: each sees whole commits, and many of them."""
    path = tmp_path / "store"
    make(path, commit_of(0))
    begins, ends, seen = CONTEXT.Barrier(READERS + 1), CONTEXT.Event(), CONTEXT.Queue()
    readers = [CONTEXT.Process(target=read_until, args=(path, begins, ends, seen)) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    begins.wait(300)
    deadline, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline:
        number += 1
        make(path, commit_of(number), segment_tokens=150)
    ends.set()
    for reader in readers:
        reader.join(120)
        assert reader.exitcode == 0
    found = [seen.get(timeout=10) for _ in readers]
    print(f"{number} commits, {sum(reads for reads, _ in found)} reads")
    assert all(reads > 1 and different > 1 for reads, different in found)
