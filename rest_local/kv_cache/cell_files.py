"""The files of texts that a server keeps by itself. They are shared by processes, and bounded in size and age.

- A part is the cells of PART tokens. The name of its file is a digest of all tokens up to its end, of what the cells
  were computed with, and of the owner. So a text is found by its tokens, and what two texts begin with is stored once.
- What follows the last whole part is a file as well: one for each beginning, the newest.
- Servers share the folder without locks: they write the same content under the same name, and a file that another one
  has deleted is a part that has to be evaluated.
- Writing and reading take place in daemon threads, so that a disk that hangs delays neither `close` nor the end of the
  process. What waits to be written is in memory, `MOST_WAITING` bytes at most, and can be read from there.
- The folder holds `limit` bytes at most, those of all models and servers together. The least recently used files go
  first, of one text its end; so do files that were not used for `MOST_DAYS`. `LEAST_FREE` bytes of the disk stay free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rest_local.kv_cache.cell_format import PART, SUFFIX, Head, Unusable, read, size_of, write
from rest_local.paths import delete_unfinished

log = logging.getLogger("rest_local.sessions")

SESSIONS = "sessions"  # The folder in the cache directory that holds the folders of all models.
MOST_WAITING = 256 << 20
LEAST_FREE = 1 << 30
MOST_DAYS = 30.0
PAUSE_S = 60.0  # Nothing is written for so long after a write that failed.
SCANNED = 16  # The folder is scanned again when 1/16 of the limit was written.
N_READERS = 2
MOST_MARKS = 4096  # files whose marks are remembered

T = TypeVar("T")


class Names(NamedTuple):
    """The names of the files of a text: those of whole parts, and of what follows each number of whole parts."""

    parts: list[str]
    ends: list[str]


class Cells(NamedTuple):
    """The content of a file."""

    head: Head
    records: Sequence[bytes]

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return size_of(self.head, self.records)


class CellFolder:
    """The bounded folder: `home` is that of all models, `path` that of one. Makes both, 0700. Raises OSError."""

    def __init__(self, home: Path, name: str, limit: int) -> None:
        self.home, self.path, self.limit = home, home / name, limit
        self.make()
        self._trimming = threading.Lock()
        self._size, self._written = 0, 0  # Bytes at the last scan, and bytes written since then.

    def make(self) -> None:
        """Make the folders that are missing: a server may delete the empty folder of another one."""
        for folder in (self.home, self.path):  # `parents` would be made with another mode
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_room(self, size: int) -> None:
        """Delete the least recently used files until `size` bytes may be added. Raises OSError if that fails."""
        with self._trimming:
            if self._size + self._written + size > self.limit or self._written > self.limit // SCANNED:
                self._trim(size)
            self._written += size
        if shutil.disk_usage(self.path).free < size + LEAST_FREE:
            raise OSError(errno.ENOSPC, f"less than {LEAST_FREE >> 20} MB of the disk would stay free")

    def trim_at_start(self) -> None:
        """Delete files that are too old, and the least recently used ones if there are too many bytes."""
        with self._trimming, contextlib.suppress(OSError):
            self._trim(0)

    def _trim(self, size: int) -> None:
        if size > self.limit:
            raise OSError(errno.EFBIG, f"{size >> 20} MB are more than the {self.limit >> 20} MB for all sessions")
        files = sorted(scan(self.home))
        total, oldest = sum(n for _, n, _ in files), time.time() - 86400 * MOST_DAYS
        for used, n, path in files:
            if total + size <= self.limit and used > oldest:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= n
        for folder in _folders(self.home):
            if Path(folder) != self.path:  # something is about to be written there
                with contextlib.suppress(OSError):
                    os.rmdir(folder)  # fails unless the folder is empty
        self._size, self._written = total, 0


def scan(home: Path) -> list[tuple[float, int, str]]:
    """List (last use, bytes, path) of each file of cells, and delete what killed processes left unfinished."""
    found = []
    for folder in _folders(home):
        delete_unfinished(Path(folder))
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
            except OSError:  # another process has deleted it
                continue
    return found


def _folders(home: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(home) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


class Workers:
    """Daemon threads that make calls in their order.

    A ThreadPoolExecutor would not do: Python waits for its threads at the end of the process.
    """

    def __init__(self, n: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="rest-local-sessions", daemon=True) for _ in range(n)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return the future of a call. After `close` it is not made."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            future, call = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    def close(self, seconds: float) -> None:
        """Wait for the calls that were submitted, for so many seconds at most."""
        over = time.monotonic() + seconds
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(over - time.monotonic(), 0.0))


class WriteQueue:
    """Writes cells in a thread of its own, and keeps them in memory until they are on disk."""

    def __init__(self, folder: CellFolder, path: Callable[[str], Path]) -> None:
        self._folder, self._path = folder, path
        self._writer = Workers(1)
        self._changed = threading.Condition()
        self.waiting: dict[str, Cells] = {}  # any thread may look a name up
        self._bytes = 0
        self._closed = False
        self._paused_until = 0.0

    @property
    def is_open(self) -> bool:
        """Return True if cells are taken now: not after `close`, nor for a while after a write that failed."""
        return not self._closed and time.monotonic() >= self._paused_until

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until more cells may be put. Return False if there is no room in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes < MOST_WAITING or not self.is_open, max(seconds, 0.0))

    def put(self, name: str, cells: Cells, used: float) -> None:
        """Have cells written soon, with `used` as the time of their last use."""
        with self._changed:
            if not self.is_open:
                return
            before = self.waiting.get(name)
            self.waiting[name] = cells  # The newest of two ends with one name is written.
            self._bytes += cells.size - (before.size if before else 0)
        if before is None:
            self._writer.submit(partial(self._write, name, used))

    def _write(self, name: str, used: float) -> None:
        while (cells := self.waiting.get(name)) is not None:
            try:
                self._folder.make_room(cells.size)
                self._folder.make()
                write(self._path(name), name, cells.head, cells.records)
                os.utime(self._path(name), (used, used))
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_S
                log.warning("sessions are not kept on disk for now: %s: %s", self._folder.path, error.strerror or error)
                self._drop_waiting()
            except Exception:
                log.exception("a part of a session is not kept")
            with self._changed:
                if self.waiting.get(name) is cells:  # else another end was put meanwhile
                    del self.waiting[name]
                    self._bytes -= cells.size
                    self._changed.notify_all()

    def _drop_waiting(self) -> None:
        with self._changed:
            self.waiting.clear()
            self._bytes = 0
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written. Return False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def close(self, seconds: float) -> None:
        """Write the cells that wait, for so many seconds at most.

        A file that a disk hangs on has a temporary name, and a later start deletes it.
        """
        over = time.monotonic() + seconds
        if not self.flush(seconds):
            log.warning("sessions: %d MB could not be written in time", self._bytes >> 20)
        self._closed = True
        self._drop_waiting()
        self._writer.close(max(over - time.monotonic(), 0.0))


class CellFiles:
    """Saves and restores the cells of one context in a bounded folder on disk.

    `home`: the folder of all; `fingerprint`: of what the cells are computed with; `limit`: bytes; `part`: tokens of a
    part. Any thread, except `put`: one thread. Raises OSError if the folder cannot be made.
    """

    def __init__(self, home: Path, fingerprint: str, limit: int, *, part: int = PART) -> None:
        self.part_tokens, self._fingerprint = part, fingerprint
        self.folder = CellFolder(home, fingerprint[:32], limit)
        self.writes = WriteQueue(self.folder, self.path)
        self._marks: dict[str, list[tuple[int, str]]] = {}
        self._readers = Workers(N_READERS)
        self._readers.submit(self.folder.trim_at_start)

    def names(self, tokens: Sequence[int], owner: str) -> Names:
        """Return the names of the parts of a text. 1 ms for 30 000 tokens."""
        ids = np.asarray(tokens, np.int64)
        part = self.part_tokens
        links = [hashlib.sha256(f"{self._fingerprint}\n{owner}\n{part}".encode()).digest()]
        for begin in range(0, len(ids) // part * part, part):
            links.append(hashlib.sha256(links[-1] + ids[begin : begin + part].tobytes()).digest())
        ends = [hashlib.sha256(link + b"end").hexdigest()[:40] for link in links]
        return Names([link.hex()[:40] for link in links[1:]], ends)

    def name_of(self, tokens: Sequence[int], owner: str) -> str:
        """Return the name of a text as a whole, however long."""
        ids = np.asarray(tokens, np.int64).tobytes()
        return hashlib.sha256(f"{self._fingerprint}\n{owner}\nwhole\n".encode() + ids).hexdigest()[:40]

    def path(self, name: str) -> Path:
        """Return where the file of that name is, if it is there."""
        return self.folder.path / (name + SUFFIX)

    def has(self, name: str) -> bool:
        """Return True if the file is there, or waits to be written."""
        return name in self.writes.waiting or self.path(name).exists()

    def present(self) -> list[str]:
        """List the names of all that are there."""
        try:
            names = os.listdir(self.folder.path)
        except OSError:
            return []
        kept = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        return list(dict.fromkeys([*kept, *list(self.writes.waiting)]))

    def put(self, name: str, head: Head, records: Sequence[bytes], place: int = 0) -> None:
        """Write a file soon. `place`: its number in its text. The last file of a text is the first to be deleted."""
        self.writes.put(name, Cells(head, records), time.time() - 1e-3 * place)

    def touch(self, names: Sequence[str]) -> None:
        """Note soon, in another thread, that these files are used now."""
        now = time.time()

        def work() -> None:
            for place, name in enumerate(names):
                with contextlib.suppress(OSError):
                    os.utime(self.path(name), (now, now - 1e-3 * place))

        self._readers.submit(work)

    def get(self, name: str) -> Future[Cells | None]:
        """Read a file. Return None if there is none, or it cannot be used."""
        return self._readers.submit(lambda: self._read(name))

    def _read(self, name: str) -> Cells | None:
        return self.writes.waiting.get(name) or self._checked(name)

    def marks(self, name: str) -> list[tuple[int, str]]:
        """Return the lengths at which a text can be continued, and the names of the texts up to there.

        Reads the first record of the file in the calling thread, once.
        """
        marks = self._marks.get(name)
        if marks is None:
            cells = self.writes.waiting.get(name) or self._checked(name, only_head=True)
            if cells is None:
                return []
            if len(self._marks) > MOST_MARKS:
                self._marks.clear()
            marks = self._marks[name] = list(zip(cells.head.marks, cells.head.names, strict=False))
        return marks

    def _checked(self, name: str, only_head: bool = False) -> Cells | None:
        path = self.path(name)
        try:
            return Cells(*read(path, name, only_head))
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as error:
            log.warning("sessions: %s is not used, its text is evaluated again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def close(self, seconds: float) -> None:
        """Write the files that wait, for so many seconds at most, and end all reads. A second call does nothing."""
        over = time.monotonic() + seconds
        self.writes.close(seconds)
        self._readers.close(max(over - time.monotonic(), 0.0))
