"""Checks the header of a GGUF file, and the files of a model in several files, before llama.cpp sees them.

The checks give a clear cause for common mistakes: magic, version, counts against the file size, and missing files.
llama.cpp checks everything after the header. Layout (`ggml/include/gguf.h`), little-endian: magic "GGUF", uint32
version, int64 tensors, int64 keys. A model in several files is named `NAME-00001-of-00003.gguf`; llama.cpp finds the
others by the name of the first.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rest_local.errors import ModelInvalid, ModelNotFound

_SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_HEADER = struct.Struct("<4sIqq")
_VERSIONS = (2, 3)
MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 1 << 16, 1 << 20, 1 << 24
"""A hundred times what real files have. A hostile header in a sparse file could name billions."""

LONGEST_NAME = 1 << 16
"""Bytes of the name of a key or tensor; GGUF allows 65 535, llama.cpp 63 for a tensor."""

_MIN_KEY_BYTES = 8 + 4 + 1  # length of the name, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of the name, dimensions, type, offset
_FOREIGN = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint?)",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
    b"FUGG": "a GGUF file for big-endian machines",
    b"vers": "a git-lfs pointer, not the file itself",
    b"<!DO": "a web page",
    b"<htm": "a web page",
}

Files = Sequence[tuple[Path, os.stat_result]]
"""All files of a model, each with its stat, the first one first."""


def check_headers(path: Path) -> Files:
    """All files of the model whose first file is `path`, each with its stat. Reads 24 bytes of each file. Raises
    ModelNotFound, or ModelInvalid with the file and the cause."""
    return [(file, check_header(file)) for file in shards_of(path)]


def n_tensors(files: Files) -> int:
    """How many tensors the headers of files declare that `check_headers` has accepted; 0 for a vocabulary alone."""
    count = 0
    for path, _ in files:
        with path.open("rb") as file:
            count += _HEADER.unpack(file.read(_HEADER.size))[2]
    return count


def identity_of(files: Files) -> tuple[tuple[str, int, int], ...]:
    """Real path, size in bytes and modification time in ns of each file: a key for cached results."""
    return tuple((os.path.realpath(path), status.st_size, status.st_mtime_ns) for path, status in files)


def check_header(path: Path) -> os.stat_result:
    """Check one file and return its stat. Reads 24 bytes. Raises ModelNotFound, or ModelInvalid with the cause."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelInvalid(path, "is a directory, not a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise ModelInvalid(path, "is not a regular file")
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFound(path) from error
    except (OSError, ValueError) as error:
        raise ModelInvalid(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    cause = _cause(start, status.st_size)
    if cause:
        raise ModelInvalid(path, cause)
    return status


def _cause(start: bytes, size: int) -> str | None:
    if size == 0:
        return "is empty"
    if start[:4] in _FOREIGN and start[:4] != b"GGUF":
        return f"is {_FOREIGN[start[:4]]}, not a GGUF file"
    if not start.startswith(b"GGUF"[: len(start)]):
        return "is not a GGUF file"
    if len(start) < _HEADER.size:
        return f"is truncated: {size} bytes"
    _, version, n_tensors, n_keys = _HEADER.unpack(start)
    if version not in _VERSIONS:
        return f"has GGUF version {version}, readable are {' and '.join(map(str, _VERSIONS))}"
    if n_tensors < 0 or n_keys < 0 or n_keys * _MIN_KEY_BYTES + n_tensors * _MIN_TENSOR_BYTES > size:
        return f"is damaged or truncated: it declares {n_keys} keys and {n_tensors} tensors in {size} bytes"
    return None


class Part(NamedTuple):
    """What the name of a part says: the name without its number, the number from 1 on, and how many parts there are."""

    name: str
    number: int
    total: int


def part_of(file_name: str) -> Part | None:
    """What `NAME-00001-of-00003.gguf` says; None for a name that is not that of a part."""
    match = _SHARD.fullmatch(file_name)
    return None if match is None else Part(match["name"], int(match["number"]), int(match["count"]))


def shards_of(path: Path) -> list[Path]:
    """All files of a model, `path` first. Only `path` itself if its name is not that of a part.

    Raises ModelInvalid if `path` is not the first of several files, or another file is missing."""
    part = part_of(path.name)
    if part is None or not path.is_file():
        return [path]
    number, count = part.number, part.total
    names = [f"{part.name}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if not 1 <= number <= count:
        return [path]
    if number > 1:
        raise ModelInvalid(path, f"is part {number} of {count} of a model", f"give the first, {names[0]}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        cause = f"is in {count} files, of which {_listed(missing)} not there"
        raise ModelInvalid(path, cause, "put all files in one directory")
    return [path.parent / name for name in names]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " are" if len(names) > 1 else " is"
    return shown + more
