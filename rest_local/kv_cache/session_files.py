"""KV cells on disk: parts of texts in files that processes share, bounded in size and age. Knows no model and no slot.

- A part is the cells of PART tokens. The name of its file is a digest of all tokens up to its end, of what the cells
  were computed with, and of the owner. So a text is found by its tokens, and what two texts begin with is stored once.
- What follows the last whole part is a file as well, its tokens before its cells: one for each beginning, the newest.
- A file is `MAGIC`, SHA-256, payload. The digest covers the name as well: a file that was cut, changed, renamed or
  moved here is not used, and deleted. The bytes that are handed out are those that the digest was computed of.
- A file is written under another name and renamed, so it is whole or not there. Servers share the folder without
  locks: they write the same content under the same name, and a file that another one has deleted is a part that has to
  be evaluated.
- Writing and reading take place in threads of their own. What waits to be written is in memory, `MOST_WAITING` bytes
  at most, and can be read from there.
- The folder holds `limit` bytes at most, those of all models and servers together. The least recently used files go
  first, of one text its end; so do files that were not used for `MOST_DAYS`. `LEAST_FREE` bytes of the disk stay free.

SHA-256 because processors have instructions for it: 0.9 GB/s here, BLAKE2b 0.3 GB/s.
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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from rest_local.paths import delete_unfinished, replacing

log = logging.getLogger("rest_local.sessions")

PART = 128
"""Tokens. 16 MB for a model of 8B, which are copied in some 5 ms, and read in 20."""

SESSIONS = "sessions"  # the folder of all, in the cache
MAGIC = b"RLCELLS1"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
SUFFIX = ".cells"
MOST_WAITING = 256 << 20
LEAST_FREE = 1 << 30
MOST_DAYS = 30.0
PAUSE_S = 60.0  # after a write that failed
SCANNED = 16  # the folder is looked through again when a share of 1/16 of the limit was written


T = TypeVar("T")


class Unusable(Exception):
    """A file is not what its name says, with what is wrong with it."""


class Names(NamedTuple):
    """parts: of PART tokens each; ends: by the number of parts before it, of what follows them."""

    parts: list[str]
    ends: list[str]


def fingerprint(made: Mapping[str, str]) -> str:
    """One digest of what the cells were computed with (`saved.made_with`)."""
    return hashlib.sha256("\0".join(f"{what}={made[what]}" for what in sorted(made)).encode()).hexdigest()


def packed(identity: str, payload: bytes) -> tuple[bytes, bytes]:
    """The two parts of a file. `identity`: what the payload is of; it is not stored."""
    return MAGIC + _digest(identity, payload), payload


def unpacked(identity: str, content: bytes) -> memoryview:
    """The payload of a file. Raises Unusable."""
    if len(content) < HEAD or not content.startswith(MAGIC):
        raise Unusable("it is no file of cells")
    payload = memoryview(content)[HEAD:]
    if content[len(MAGIC) : HEAD] != _digest(identity, payload):
        raise Unusable("it is damaged, or of another text")
    return payload


def _digest(identity: str, payload: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(f"{identity}\n".encode())
    digest.update(payload)
    return digest.digest()


class SessionFiles:
    """The files of one context. `home`: the folder of all; `made`: what the cells are computed with; `limit`: bytes;
    `part`: tokens of a part.

    Any thread, except `put`: one thread. Makes the folder, 0700. Raises OSError where that fails.
    """

    def __init__(self, home: Path, made: Mapping[str, str], limit: int, *, part: int = PART) -> None:
        self.home, self.limit, self.part = home, limit, part
        self.fingerprint = fingerprint(made)
        self.folder = home / self.fingerprint[:32]
        self._make_folder()
        self.written = self.read = 0  # files
        self._lock = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._bytes = 0  # that wait
        self._queue: deque[tuple[str, float]] = deque()
        self._closing = False
        self._paused_until = 0.0
        self._trimming = threading.Lock()
        self._size, self._since = 0, 0  # of the folder when it was looked through, and what was written since
        self._writer: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="rest-local-sessions")
        self._readers.submit(self._trim_at_start)

    def _make_folder(self) -> None:
        for folder in (self.home, self.folder):  # `parents` would be made with another mode
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Names

    def names(self, tokens: Sequence[int], owner: str) -> Names:
        """The names of the parts of a text. 1 ms for 30 000 tokens."""
        ids = np.asarray(tokens, np.int64)
        part, links = self.part, [hashlib.sha256(f"{self.fingerprint}\n{owner}\n{self.part}".encode()).digest()]
        for begin in range(0, len(ids) // part * part, part):
            links.append(hashlib.sha256(links[-1] + ids[begin : begin + part].tobytes()).digest())
        ends = [hashlib.sha256(link + b"end").hexdigest()[:40] for link in links]
        return Names([link.hex()[:40] for link in links[1:]], ends)

    def name_of(self, tokens: Sequence[int], owner: str) -> str:
        """The name of a text as a whole, however long."""
        ids = np.asarray(tokens, np.int64).tobytes()
        return hashlib.sha256(f"{self.fingerprint}\n{owner}\nwhole\n".encode() + ids).hexdigest()[:40]

    def path(self, name: str) -> Path:
        """Where the part of that name is, if it is there."""
        return self.folder / (name + SUFFIX)

    def has(self, name: str) -> bool:
        """Whether the part is there, or waits to be written."""
        return name in self._waiting or self.path(name).exists()

    def present(self) -> list[str]:
        """The names of all that are there."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        kept = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        return list(dict.fromkeys([*kept, *list(self._waiting)]))

    # Writing

    @property
    def writes(self) -> bool:
        """Whether parts are taken now: not while the last one could not be written."""
        return not self._closing and time.monotonic() >= self._paused_until

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until another part may be put; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: self._bytes < MOST_WAITING or not self.writes, max(seconds, 0.0))

    def put(self, name: str, payload: bytes, place: int = 0) -> None:
        """Write a part soon. `place`: its number in its text; of a text, the last goes first."""
        with self._lock:
            if not self.writes:
                return
            if (before := self._waiting.get(name)) is not None:  # of an end: what is written next is the newest
                self._waiting[name] = payload
                self._bytes += len(payload) - len(before)
                return
            self._waiting[name] = payload
            self._bytes += len(payload)
            self._queue.append((name, time.time() - 1e-3 * place))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="rest-local-sessions-writer", daemon=True)
                self._writer.start()
            self._lock.notify_all()

    def touch(self, names: Sequence[str]) -> None:
        """These were used now. Soon, in another thread."""
        now = time.time()

        def work() -> None:
            for place, name in enumerate(names):
                with contextlib.suppress(OSError):
                    os.utime(self.path(name), (now, now - 1e-3 * place))

        with contextlib.suppress(RuntimeError):  # closed
            self._readers.submit(work)

    def _write(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                name, used = self._queue.popleft()
                payload = self._waiting[name]
            try:
                if self.writes or self._closing:
                    self._write_one(name, payload, used)
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_S
                log.warning("sessions are not kept on disk for now: %s: %s", self.folder, error.strerror or error)
                with self._lock:
                    self._queue.clear()
                    self._waiting.clear()
                    self._bytes = 0
                    self._lock.notify_all()
                continue
            except Exception:
                log.exception("a part of a session is not kept")
            with self._lock:
                if self._waiting.get(name) is payload:
                    del self._waiting[name]
                    self._bytes -= len(payload)
                elif name in self._waiting:  # another end was put meanwhile
                    self._queue.append((name, used))
                self._lock.notify_all()

    def _write_one(self, name: str, payload: bytes, used: float) -> None:
        content = packed(name, payload)
        size = sum(map(len, content))
        self.make_room(size)
        self._make_folder()  # a server may delete the empty folder of another
        with replacing(self.path(name)) as file:
            file.writelines(content)
        os.utime(self.path(name), (used, used))
        self.written += 1

    def flush(self, seconds: float) -> bool:
        """Wait until all is written; whether it is."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._bytes, seconds)

    def close(self, seconds: float) -> None:
        """Write what waits, for so long at most; a second call does nothing."""
        self.flush(seconds)
        with self._lock:
            if self._bytes:
                log.warning("sessions: %d MB could not be written in time", self._bytes >> 20)
            self._closing = True
            self._queue.clear()
            self._waiting.clear()
            self._bytes = 0
            writer = self._writer
            self._lock.notify_all()
        if writer is not None:
            writer.join()
        self._readers.shutdown(wait=True, cancel_futures=True)

    # Reading

    def get(self, name: str) -> Future[memoryview | None]:
        """Read a part; None where there is none, or it cannot be used."""
        return self._readers.submit(self._read, name)

    def _read(self, name: str) -> memoryview | None:
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None:
            return memoryview(waiting)
        path = self.path(name)
        try:
            payload = unpacked(name, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as error:
            log.warning("sessions: %s is not used, its text is evaluated again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.read += 1
        return payload

    def read_head(self, name: str, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the first 64 KB of a payload, or of nothing. The digest is not compared: what depends on
        it has to `get` the whole.
        """
        waiting = self._waiting.get(name)
        try:
            with contextlib.ExitStack() as stack:
                if waiting is None:
                    file = stack.enter_context(self.path(name).open("rb"))
                    file.seek(HEAD)
                    waiting = file.read(1 << 16)
                return read(waiting[: 1 << 16])
        except OSError:
            return read(b"")

    # The bound

    def make_room(self, size: int) -> None:
        """Delete what is used least recently until so many bytes may be added. Raises OSError where they do not fit the
        limit or the disk.
        """
        with self._trimming:
            if self._size + self._since + size > self.limit or self._since > self.limit // SCANNED:
                self._trim(size)
            self._since += size
        if shutil.disk_usage(self.folder).free < size + LEAST_FREE:
            raise OSError(errno.ENOSPC, f"less than {LEAST_FREE >> 20} MB of the disk would stay free")

    def _trim_at_start(self) -> None:
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
            if folder != str(self.folder):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)  # only where it is empty
        self._size, self._since = total, 0


def scan(home: Path) -> list[tuple[float, int, str]]:
    """(last use, bytes, path) of each file of cells. What killed processes left unfinished is deleted."""
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
