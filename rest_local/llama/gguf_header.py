"""The first bytes of a GGUF file, read in Python: a plain word on what is wrong before llama.cpp sees the file.

Checks the frame only (magic, version, counts against the file size); everything behind it is llama.cpp's to judge.
Layout (llama.cpp, `ggml/include/gguf.h`), little-endian: magic "GGUF", uint32 version, int64 tensors, int64 keys.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

from rest_local.errors import ModelInvalid, ModelNotFound
from rest_local.llama.shards import shards_of

_HEADER = struct.Struct("<4sIqq")
_VERSIONS = (2, 3)
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


def check_headers(path: Path) -> list[tuple[Path, os.stat_result]]:
    """Every file of the model that begins with `path`, and its stat. Raises ModelNotFound, or ModelInvalid with the
    file and the cause. Reads 24 bytes of each."""
    return [(file, check_header(file)) for file in shards_of(path)]


def check_header(path: Path) -> os.stat_result:
    """The file's stat. Raises ModelNotFound, or ModelInvalid with the cause. Reads 24 bytes."""
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
