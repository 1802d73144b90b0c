"""Write the files of a build, durable and private. Tests replace the operations to inject failures.

Nothing else in the retrieval room writes to disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import lock_descriptor

from rest_local.errors import DatastoreLocked, DatastoreUnwritable

LOCK = "lock"
FOLDER = re.compile(r"vocabulary-[0-9a-f]{16}\Z")  # directory of a vocabulary in a datastore (`home.folder`)
STAGING = re.compile(r"staging-[0-9a-f]{16}\Z")  # directory of a long write in that of an index (`staging`)
AS_IT_IS = os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (
    "what this command wrote is deleted again; make room: `rest-local index list` shows the sizes of datastores, and "
    "`rest-local index remove NAME` deletes one"
)
_OWNER_AT = 1  # docs/FORMAT.md
_OWNER_LIMIT = 200
# A short commit waits so long for another process's commit: milliseconds as a rule, a second in a large history.
WAIT_S = 2.0
_CHUNK = 3 << 20  # bytes to read at a time; tokens of 2 and of 3 bytes stay whole
_POLL_S = 0.01  # seconds before the next attempt to take a lock


class Files:
    """The file operations of a datastore. Files are 0600 and directories 0700, because ids decode to text."""

    def make_directory(self, path: Path) -> None:
        """Create the directory and its missing parents, durably."""
        missing = [path] if not path.exists() else []
        while missing and not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(0o700)
            self.sync_directory(directory.parent)

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | AS_IT_IS, 0o600)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(descriptor, view[: 1 << 30]) :]

    def sync(self, descriptor: int) -> None:
        """Call fsync, without a second try after a failure, because the kernel may have dropped the pages."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename `old` to `new` atomically, replacing an existing `new`."""
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and deletions in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        """Remove a name. Readers that have mapped the file keep it."""
        path.unlink(missing_ok=True)


def digest_of(path: Path, look_at: Callable[[bytes, int], None] | None = None) -> tuple[str, int]:
    """Return the sha256 in hex and the size of a file. `look_at` gets each chunk and its offset. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if look_at:
                look_at(chunk, size)
            size += len(chunk)
    return digest.hexdigest(), size


@contextlib.contextmanager
def locked(directory: Path, wait_s: float = 0.0, make: Files | None = None) -> Iterator[None]:
    """Hold the writers' lock of a datastore. Readers need no lock.

    The lock (`flock`) belongs to the open file, so it ends with its process, even after a kill. (`lockf` would be
    released as soon as any descriptor of the file is closed.) `make` creates the directory if it is missing. Raises
    DatastoreUnwritable, and DatastoreLocked with the owner if the lock is still held after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            if make:  # Repeated, because another process may have removed the directory since the last attempt.
                with mapping_os_errors(directory):
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
    """Take the lock and return its descriptor. Raises DatastoreLocked at once if another process holds it."""
    path = directory / LOCK
    with mapping_os_errors(directory):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | AS_IT_IS, 0o600)
        except FileNotFoundError as error:
            raise DatastoreLocked(directory, "a process that removes it") from error
    try:
        with mapping_os_errors(directory):
            taken = lock_descriptor(descriptor, blocking=False)
        os.lseek(descriptor, _OWNER_AT, os.SEEK_SET)
        if not taken:
            owner = os.read(descriptor, _OWNER_LIMIT).decode("utf-8", "replace").strip()
            raise DatastoreLocked(directory, owner or "another process")
        # A remove may have unlinked the lock file between our open and our lock: then this lock protects nothing.
        try:
            current = os.stat(path)
        except FileNotFoundError as error:
            raise DatastoreLocked(directory, "a process that removes it") from error
        if not os.path.samestat(current, os.fstat(descriptor)):
            raise DatastoreLocked(directory, "a process that replaced it")
        # Messages name the owner. On a full disk the lock holds without that.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, _OWNER_AT)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def mapping_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into DatastoreUnwritable(path, cause)."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        where = os.fsdecode(error.filename) if error.filename else ""
        cause = f"{error.strerror or error} {f'({name}) ' if name else ''}{f'at {where}' if where else ''}".strip()
        raise DatastoreUnwritable(path, cause, _FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else "") from error
