"""The few file operations a build makes, in one place: durable, private, and replaceable by tests that make them fail.

Nothing else in the retrieval room writes to disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from rest_local.errors import DatastoreLocked, DatastoreUnwritable

LOCK = "lock"
_OWNER_LIMIT = 200
_POLL_S = 0.01  # between two tries of a lock that is waited for


class Files:
    """Operations on the directory of a datastore. Files are 0600, directories 0700: token ids decode to the corpus."""

    def make_directory(self, path: Path) -> None:
        """Makes the directory and its missing parents, and their entries durable."""
        missing = [path] if not path.exists() else []
        while missing and not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(0o700)
            self.sync_directory(directory.parent)

    def create(self, path: Path) -> int:
        """A descriptor of a new file, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Writes all of `data`."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(descriptor, view[: 1 << 30]) :]

    def sync(self, descriptor: int) -> None:
        """fsync. A failure is final: the kernel may have dropped the pages, so it is never tried again."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new` by `old`, atomically."""
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        """Makes created, renamed and deleted names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        """Removes a name; readers that have the file mapped keep it."""
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path, wait_s: float = 0.0, make: Files | None = None) -> Iterator[None]:
    """Holds the writers' lock of a datastore. Readers need none.

    `flock` belongs to the open file, so it ends with its owner, however that ends (`lockf` would be lost as soon as any
    descriptor of the file is closed). `make`: makes the directory where there is none. Raises DatastoreLocked, naming
    the owner, if it is held and still is after `wait_s` seconds; DatastoreUnwritable.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            if make:  # at every try: a remove may have taken the directory away since the last
                with unwritable(directory):
                    make.make_directory(directory)
            descriptor = _take_lock(directory)
            break
        except DatastoreLocked:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _take_lock(directory: Path) -> int:
    """The descriptor that holds the lock. Raises DatastoreLocked at once if another does."""
    path = directory / LOCK
    with unwritable(directory):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise DatastoreLocked(directory, "a process that removes it") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, _OWNER_LIMIT).decode("utf-8", "replace").strip()
            raise DatastoreLocked(directory, owner or "another process") from error
        # A remove may have unlinked the lock between our open and our flock: then this lock guards nothing.
        try:
            current = os.stat(path)
        except FileNotFoundError as error:
            raise DatastoreLocked(directory, "a process that removes it") from error
        if not os.path.samestat(current, os.fstat(descriptor)):
            raise DatastoreLocked(directory, "a process that replaced it")
        # For people only: on a full disk the lock still holds, it just does not say by whom.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Maps an OSError to DatastoreUnwritable(path, cause)."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        where = os.fsdecode(error.filename) if error.filename else ""
        cause = f"{error.strerror or error} {f'({name}) ' if name else ''}{f'at {where}' if where else ''}".strip()
        raise DatastoreUnwritable(path, cause) from error
