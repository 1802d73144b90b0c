"""Files of clients on the disk: what was uploaded for batches, and what batches gave.

Contract:

- A file belongs to the owner who made it (`owner_of` a key); for every other owner there is no such file.
- A file is there once `add` has returned, whatever happens then. An upload that is cut short, also by `kill -9`, leaves
  nothing after the next `load`.
- `Limits` bound the bytes, the number and the age of the files.

How: `ID.data` has the content and `ID.json`, which is written last, what is known of it. Both have mode 0600. Content
without `ID.json` is an upload that was cut short, or the output of a batch that is not done. An id is random, and a
client's name of a file is never part of a path.

Not thread safe: all calls come from the event loop. What waits for the disk does so in a thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal

import anyio
from pydantic_core import from_json, to_json

from rest_local.paths import write_atomically
from rest_local.server.errors import ApiError

log = logging.getLogger("rest_local.server")

DAY = 86400
_ID = re.compile(r"file-[0-9a-f]{32}")
Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class Limits:
    """What files and batches may take.

    file_bytes    of one uploaded file
    total_bytes   of all files, outputs of batches too
    files         number of all files
    lines         requests of a batch
    batches       that are not done, of all owners
    records       batches that are done and still listed, of an owner
    keep_seconds  a file without another limit is deleted so long after it was made
    """

    file_bytes: int = 200 << 20
    total_bytes: int = 10 << 30
    files: int = 10_000
    lines: int = 50_000
    batches: int = 100
    records: int = 1_000
    keep_seconds: int = 30 * DAY


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file. `created`, `expires`: seconds since 1970."""

    id: str
    owner: str
    filename: str
    bytes: int
    created: float
    purpose: Purpose
    expires: float

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def owner_of(key: bytes | None) -> str:
    """The owner that a key stands for, from which the key cannot be read; empty where the server asks for no keys."""
    return "" if key is None else hashlib.blake2b(key, digest_size=16, person=b"rest-local owner").hexdigest()


def new_file_id() -> str:
    """The id of a file to be made. It cannot be guessed."""
    return f"file-{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    """Whether a text is an id of `new_file_id`."""
    return _ID.fullmatch(text) is not None


class Upload:
    """A file that is being written, in a context manager; removed at its end unless it was added.

    `write` and `complete` may be called in a thread. Raises ApiError 413 above a limit and 507 where the disk is full.
    """

    def __init__(self, store: Files) -> None:
        self.id, self.bytes = new_file_id(), 0
        self._store, self._reserved = store, 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Upload:
        self._store.check_number()
        try:
            self._file = self._store.create(self.id)
        except OSError as error:
            raise disk_error(error) from error
        self._store.uploads += 1
        return self

    def reserve(self, more: int) -> None:
        """Have room for so many bytes."""
        self._store.check_room(more)
        self._reserved += more
        self._store.used += more

    def write(self, data: bytes) -> None:
        """Add bytes, for which there is room."""
        assert self._file is not None
        limits = self._store.limits
        if self.bytes + len(data) > limits.file_bytes:
            message = f"the file is larger than {limits.file_bytes} bytes"
            raise ApiError(413, message, code="file_too_large", param="file", headers={"connection": "close"})
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_error(error) from error
        self.bytes += len(data)

    def complete(self) -> None:
        """All bytes are on the disk."""
        assert self._file is not None
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise disk_error(error) from error

    def __exit__(self, *_: object) -> None:
        self._store.uploads -= 1
        self._store.used -= self._reserved
        assert self._file is not None
        with suppress(OSError):  # what could not be written is not to stay
            self._file.close()
        if not self._store.has(self.id):
            with suppress(OSError):
                self._store.content(self.id).unlink(missing_ok=True)


class Files:
    """The files in a folder, which exists. `clock`: seconds since 1970; tests replace it."""

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.limits = folder, limits
        self._clock = clock
        self._files: dict[str, StoredFile] = {}  # in the order in which they were made
        self.uploads = 0  # that are being written
        self.used = 0  # bytes of all content; outputs of batches count as they grow

    def load(self, wanted: Collection[str]) -> None:
        """Read the folder. Content that belongs to no file is removed, unless its id is `wanted`. Raises OSError."""
        found = []
        for path in self.folder.glob("*.json"):
            if (file := _read(path)) is None:
                log.warning("a damaged record of a file is removed: %s", path.name)
                path.unlink(missing_ok=True)
            elif not self.content(file.id).is_file():
                path.unlink(missing_ok=True)
            else:
                found.append(file)
        self._files = {file.id: file for file in sorted(found, key=lambda file: file.created)}
        self.used = sum(file.bytes for file in found)
        for path in self.folder.iterdir():
            if path.suffix != ".json" and path.stem not in self._files.keys() | set(wanted):
                path.unlink(missing_ok=True)

    def has(self, file_id: str) -> bool:
        """Whether there is such a file, of any owner."""
        return file_id in self._files

    def get(self, owner: str, file_id: str) -> StoredFile:
        """A file of an owner. Raises ApiError 404."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner or file.expires <= self._clock():
            raise ApiError(404, "no such file; GET /v1/files lists them", code="file_not_found", param="file_id")
        return file

    def of(self, owner: str) -> list[StoredFile]:
        """The files of an owner, the oldest first."""
        now = self._clock()
        return [file for file in self._files.values() if file.owner == owner and file.expires > now]

    def upload(self) -> Upload:
        """A new file, to be written."""
        return Upload(self)

    def content(self, file_id: str) -> Path:
        """The path of the content. Only for ids of this server."""
        assert is_file_id(file_id), "an id comes from `new_file_id`"
        return self.folder / f"{file_id}.data"

    def create(self, file_id: str) -> BinaryIO:
        """An empty file for content, to be written. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        return os.fdopen(os.open(self.content(file_id), flags, 0o600), "wb")

    def check_room(self, more: int) -> None:
        """Raises ApiError 413 where `more` bytes are too many."""
        if self.used + more > self.limits.total_bytes:
            message = f"all files together are larger than {self.limits.total_bytes} bytes; delete some"
            raise ApiError(413, message, code="storage_full", param="file", headers={"connection": "close"})

    def check_number(self) -> None:
        """Raises ApiError 413 where there are too many files."""
        if len(self._files) + self.uploads >= self.limits.files:
            message = f"there are {self.limits.files} files; delete some"
            raise ApiError(413, message, code="storage_full", param="file", headers={"connection": "close"})

    async def add(
        self, file_id: str, owner: str, filename: str, size: int, purpose: Purpose, seconds: float | None = None
    ) -> StoredFile:
        """Make a file of content that is on the disk and counts in `used` from now on. Raises OSError."""
        now = self._clock()
        expires = now + (self.limits.keep_seconds if seconds is None else seconds)
        file = StoredFile(file_id, owner, filename, size, now, purpose, expires)
        path = self.folder / f"{file_id}.json"
        await anyio.to_thread.run_sync(lambda: write_atomically(path, to_json(asdict(file)), durable=True))
        self.used += size - (self._files[file_id].bytes if file_id in self._files else 0)
        self._files[file_id] = file
        return file

    async def delete(self, file: StoredFile) -> None:
        """Remove a file. Raises OSError; then it is still there."""
        paths = (self.folder / f"{file.id}.json", self.content(file.id))

        def remove() -> None:
            for path in paths:  # content without a record is removed by the next `load`
                path.unlink(missing_ok=True)

        await anyio.to_thread.run_sync(remove)
        if self._files.pop(file.id, None) is not None:
            self.used -= file.bytes

    async def expire(self, kept: Collection[str]) -> None:
        """Remove the files whose time is over, apart from those with these ids."""
        now = self._clock()
        for file in [each for each in self._files.values() if each.expires <= now and each.id not in kept]:
            with suppress(OSError):  # the next time
                await self.delete(file)


def disk_error(error: OSError) -> ApiError:
    """The response where the disk cannot be written."""
    log.warning("files of clients cannot be written: %s", error.strerror or error)
    cause = error.strerror or "it cannot be written"
    return ApiError(507, f"the server's disk: {cause}", code="disk_full", headers={"connection": "close"})


def _read(path: Path) -> StoredFile | None:
    """The file that a record describes; None for a damaged one."""
    try:
        found = from_json(path.read_bytes())
        file = StoredFile(**{each.name: found[each.name] for each in fields(StoredFile)})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    texts = (file.id, file.owner, file.filename, file.purpose)
    numbers = (file.bytes, file.created, file.expires)
    right = all(isinstance(text, str) for text in texts) and all(isinstance(number, (int, float)) for number in numbers)
    return file if right and file.id == path.stem and is_file_id(file.id) else None
