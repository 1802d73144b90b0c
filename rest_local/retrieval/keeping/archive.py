"""The file that a datastore is moved in: one stream with a checksum of everything.

The file is a tar archive that any tar reads. Its parts come in this order, and in no other:

    rest-local-export-1.json            the head: sealed JSON with the name, the folders and the manifests' sizes
    datastore/[FOLDER/]manifest.json    of each index, the datastore's own directory first
    datastore/[FOLDER/]<segment>...     the files that this manifest names, in its order
    rest-local-export.sha256            sha256 of every byte before this part
    1024 zero bytes                     and nothing after them

So a reader knows each header before it reads it, and nothing that a foreign archive could hold (a link, a device, a
path, a second file of the name) has a place. Sizes come from sealed manifests, which bounds what is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rest_local.errors import DatastoreCorrupt, DatastoreError
from rest_local.retrieval.files import FOLDER
from rest_local.retrieval.format import FileEntry, sealed
from rest_local.retrieval.home import MAX_MANIFEST

HEAD = "rest-local-export-1.json"
TAIL = "rest-local-export.sha256"
MAGIC = "rest-local export"
ROOT = "datastore"
_BLOCK = 512
_CHUNK = 4 << 20
_MAX_HEAD = 1 << 20
_END = bytes(2 * _BLOCK)
_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}\Z")


class Writer:
    """Writes the parts of an export. written: number of bytes."""

    def __init__(self, output: BinaryIO) -> None:
        self._output, self._digest, self.written = output, hashlib.sha256(), 0

    def add(self, name: str, data: bytes) -> None:
        self._write(_header(name, len(data)))
        self._write(data + _padding(len(data)))

    def copy(self, name: str, file: BinaryIO, wanted: FileEntry, path: Path) -> None:
        """Add an open file. Raises DatastoreCorrupt if it is not what the manifest says."""
        if os.fstat(file.fileno()).st_size != wanted.size:
            raise DatastoreCorrupt(path, "it has another size than the manifest says")
        digest, left = hashlib.sha256(), wanted.size
        self._write(_header(name, wanted.size))
        while chunk := _read(file, min(_CHUNK, left), path):
            digest.update(chunk)
            self._write(chunk)
            left -= len(chunk)
        if digest.hexdigest() != wanted.sha256:
            raise DatastoreCorrupt(path, "it does not match its checksum")
        self._write(_padding(wanted.size))

    def end(self) -> None:
        self.add(TAIL, f"{self._digest.hexdigest()}\n".encode())
        self._write(_END)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._output.write(data)
        self.written += len(data)


class Reader:
    """Reads the parts of an export in their order, and nothing else. read: number of bytes so far."""

    def __init__(self, source: BinaryIO, label: str) -> None:
        self._source, self._label, self._digest, self.read = source, label, hashlib.sha256(), 0

    def damaged(self, what: str) -> DatastoreError:
        return DatastoreError(f"import {self._label}: {what}; nothing was changed; copy it or export it again")

    def head(self) -> tuple[str, list[tuple[str, int]]]:
        """The datastore's old name, and the folder and the size of the manifest of each index."""
        block = self._take(_BLOCK, may_end=True)
        name = block[:100].rstrip(b"\0").decode("ascii", "replace")
        if not name.startswith(HEAD[:18]):
            raise self.damaged("this is no datastore that `rest-local index export` wrote")
        if name != HEAD:
            raise self.damaged(f"the export is of another format ({name[:40]!r}, this version reads {HEAD!r})")
        try:
            size = tarfile.TarInfo.frombuf(block, "utf-8", "strict").size
        except tarfile.TarError as error:
            raise self.damaged("its head is damaged") from error
        if len(block) < _BLOCK or block != _header(HEAD, size) or not 0 < size <= _MAX_HEAD:
            raise self.damaged("its head is damaged")
        data = self._take(size)
        self._skip_padding(size)
        try:
            return _parse_head(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its head is damaged: {error}") from error

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """The content of the next part, which must have this name and size."""
        if self._take(_BLOCK) != _header(name, size):
            raise self.damaged(f"{name} is not where it has to be")
        for start in range(0, size, _CHUNK):
            yield self._take(min(_CHUNK, size - start))
        self._skip_padding(size)

    def end(self) -> None:
        """The checksum of everything, and nothing after it."""
        wanted = f"{self._digest.hexdigest()}\n".encode()
        if b"".join(self.content(TAIL, len(wanted))) != wanted:
            raise self.damaged("it does not match its checksum")
        if self._take(len(_END)) != _END or self._take(1, may_end=True):
            raise self.damaged("it does not end where it has to")

    def _skip_padding(self, size: int) -> None:
        padding = _padding(size)
        if padding and self._take(len(padding)) != padding:
            raise self.damaged("there are bytes between its parts")

    def _take(self, count: int, may_end: bool = False) -> bytes:
        parts, left = [], count
        while left:
            try:
                part = self._source.read(left)
            except OSError as error:
                raise self.damaged(f"it cannot be read: {error.strerror or error}") from error
            if not part:
                break
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
        if left and not may_end:
            raise self.damaged(f"it ends early, after {self.read + len(data)} bytes")
        self._digest.update(data)
        self.read += len(data)
        return data


def _read(file: BinaryIO, count: int, path: Path) -> bytes:
    try:
        return file.read(count)
    except OSError as error:
        raise DatastoreCorrupt(path, f"it cannot be read: {error.strerror or error}") from error


def member(where: str, name: str) -> str:
    return "/".join(part for part in (ROOT, where, name) if part)


def _header(name: str, size: int) -> bytes:
    """The header block of a part. Its fields hold nothing of this machine or user."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def packed_head(name: str, folders: Sequence[str], content: Sequence[bytes]) -> bytes:
    parts = [{"folder": where, "manifest": len(data)} for where, data in zip(folders, content, strict=True)]
    return sealed({"magic": MAGIC, "format": 1, "name": name, "indexes": parts})


def _parse_head(data: bytes) -> tuple[str, list[tuple[str, int]]]:
    fields = json.loads(data.decode("ascii"))
    fields.pop("sha256", None)
    if sealed(fields) != data or fields["magic"] != MAGIC or fields["format"] != 1:
        raise ValueError("it does not match its own checksum")
    parts = [(part["folder"], part["manifest"]) for part in fields["indexes"]]
    right = all(type(size) is int and 0 < size <= MAX_MANIFEST for _, size in parts)
    folders = [where for where, _ in parts]
    orderly = folders[:1] == [""] and len({*folders}) == len(folders)
    if not right or not orderly or not all(FOLDER.match(where) for where in folders[1:]):
        raise ValueError("its list of indexes is none")
    if not isinstance(fields["name"], str) or not _NAME.match(os.fsdecode(os.fsencode(fields["name"]))):
        raise ValueError("its name is none")
    return fields["name"], parts
