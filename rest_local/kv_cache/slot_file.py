"""The text of one slot in a file of its own, which a client has named. Knows no model and no slot.

A file is MAGIC and records: length (8 bytes, little-endian), SHA-256, content. The first record is JSON: the tokens,
what the cells were computed with (`saved.made_with`), and what records follow. The digest of a record covers its number
and the digest of the first. So each record is checked as it is read, once, before llama.cpp sees it.

- `parts`: the states of PART tokens each (`Slot.part`), and of the rest.
- `states`: the whole state, then checkpoints before it (`Slot.states`), where memory cannot be cut back, and where the
  beginning of the text has left a sliding window. `marks` says how many tokens each has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from rest_local.kv_cache.session_files import SUFFIX, Unusable
from rest_local.paths import replacing

MAGIC = b"RLSLOT01"
FOLDER = "slots"  # in that of all sessions
USER_DIGITS = 32  # of the digest of a key, in the names of its files
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9 ._-]{0,126}[A-Za-z0-9_-])?")
_LENGTH = 8
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Head:
    """The first record."""

    made_with: Mapping[str, str]
    tokens: Sequence[int]
    kind: str
    marks: Sequence[int]

    @property
    def n_records(self) -> int:
        """How many follow."""
        return len(self.marks)


def path_of(home: Path, name: str, user: str = "") -> Path | None:
    """Where the file of that name is, of a user (a digest, or empty); None for no plain name. The folder is made.
    Raises OSError.
    """
    if not NAME.fullmatch(name):
        return None
    folder = home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    of_user = f"+{user[:USER_DIGITS]}" if user else ""  # no name has a +
    return folder / f"slot{of_user}-{name}{SUFFIX}"  # a prefix, because Windows has names like CON


def write(path: Path, head: Head, records: Iterable[bytes]) -> int:
    """Write a file, which appears whole or not at all. Returns its bytes. Raises OSError and what `records` raises; a
    file that was there before is then intact.
    """
    first = json.dumps(asdict(head)).encode()
    root, size = _digest(b"", 0, first), len(MAGIC)
    with replacing(path) as file:
        file.write(MAGIC)
        for number, record in enumerate(itertools.chain((first,), records)):
            digest = root if not number else _digest(root, number, record)
            file.write(len(record).to_bytes(_LENGTH, "little") + digest)
            file.write(record)
            size += _LENGTH + _DIGEST + len(record)
    return size


class Reader:
    """Reads a file of `write`; a context manager. Raises OSError, Unusable."""

    def __init__(self, path: Path, made: Mapping[str, str]) -> None:
        self.size = 0
        self._file: BinaryIO = path.open("rb")
        try:
            self._left = os.fstat(self._file.fileno()).st_size
            if self._exactly(len(MAGIC)) != MAGIC:
                raise Unusable("it is no file of a slot")
            self._root = b""  # until the first record was read
            self.head = _head(self._record(0))
            differs = next((what for what in made if self.head.made_with.get(what) != made[what]), None)
            if differs:
                raise Unusable(f"it is of {differs}")
        except BaseException:
            self._file.close()
            raise

    def records(self) -> Iterator[bytes]:
        """Those after the first, each when it was checked."""
        for number in range(1, 1 + self.head.n_records):
            yield self._record(number)

    def _record(self, number: int) -> bytes:
        head = self._exactly(_LENGTH + _DIGEST)
        record = self._exactly(int.from_bytes(head[:_LENGTH], "little"))
        digest = _digest(self._root, number, record)
        if digest != head[_LENGTH:]:
            raise Unusable("it is damaged")
        if not number:
            self._root = digest
        return record

    def _exactly(self, n: int) -> bytes:
        """The next bytes. No more memory than the file has is taken, whatever it says."""
        if n > self._left:
            raise Unusable("it is damaged")
        data = self._file.read(n)
        if len(data) < n:
            raise Unusable("it is damaged")
        self._left -= n
        self.size += n
        return data

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _head(record: bytes) -> Head:
    try:
        found = json.loads(record)
        return Head(dict(found["made_with"]), list(found["tokens"]), str(found["kind"]), list(found["marks"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("it is damaged") from error


def _digest(root: bytes, number: int, record: bytes) -> bytes:
    digest = hashlib.sha256(root + number.to_bytes(8, "little"))
    digest.update(record)
    return digest.digest()
