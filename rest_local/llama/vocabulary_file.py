"""The vocabulary of a model as a GGUF file of its own: the keys of the model's file without its tensors, some MB.

So a machine that lacks the model can tokenize as it does.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from rest_local.errors import ModelInvalid
from rest_local.llama.gguf_header import MOST_KEYS, MOST_TEXTS, check_header

HEADER = struct.Struct("<4sIqq")
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
TEXT, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_PARTS = b"split."  # keys that name further files of the model
_MOST_BYTES = 1 << 28  # of all keys: ten times the largest vocabularies


def vocabulary_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a GGUF file with the keys of the model's first file. O(keys): 50 ms for 150 000 tokens.

    Raises ModelNotFound, ModelInvalid.
    """
    file = Path(path)
    check_header(file)
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, version, _, n_keys = HEADER.unpack_from(data)
            keys = _keys(data, n_keys)
    except (struct.error, KeyError, ValueError, OverflowError, IndexError) as error:
        raise ModelInvalid(file, "is damaged or truncated in its header") from error
    except OSError as error:
        raise ModelInvalid(file, f"cannot be read: {error.strerror or error}") from error
    return b"".join([HEADER.pack(magic, version, 0, len(keys)), *keys])


def _keys(data: mmap.mmap, count: int) -> list[bytes]:
    """The keys with their values, as they are in the file. Raises ValueError, KeyError, struct.error, OverflowError,
    IndexError.
    """
    if count > MOST_KEYS:
        raise ValueError(f"{count} keys")
    keys, at = [], HEADER.size
    for _ in range(count):
        begin = at
        (length,) = U64.unpack_from(data, at)
        at += 8 + length
        (kind,) = U32.unpack_from(data, at)
        at = after(data, at + 4, kind)
        if at > min(len(data), HEADER.size + _MOST_BYTES):
            raise ValueError("after the end of the file, or of any vocabulary")
        if not data[begin + 8 : begin + 8 + length].startswith(_PARTS):
            keys.append(data[begin:at])
    return keys


def after(data: mmap.mmap, at: int, kind: int) -> int:
    """Where the value that begins at `at` ends."""
    if kind == TEXT:
        return at + 8 + int(U64.unpack_from(data, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    (kind,), (count,) = U32.unpack_from(data, at), U64.unpack_from(data, at + 4)
    at += 12
    if kind != TEXT:
        return at + int(count) * _SIZES[kind]
    if count > MOST_TEXTS:
        raise ValueError(f"{count} texts")
    for _ in range(count):
        at += 8 + U64.unpack_from(data, at)[0]
    return at
