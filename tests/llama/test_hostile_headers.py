"""What reads GGUF headers in this process: no header ends it, fills its memory or raises what is not in `errors`."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local.errors import ModelInvalid
from rest_local.llama.gguf import check_header, read_gguf, vocabulary_file

READERS: list[Callable[[Path], Any]] = [
    check_header,
    read_gguf,
    vocabulary_file,
    lambda path: read_gguf(path, tensors=True),
]
EXTREMES = [2**32 - 1, 2**62, 2**64 - 1]
LARGE = 1 << 32  # bytes of a sparse file
MEMORY = 64 << 20
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def whole() -> bytes:
    """A header with keys of every kind, and two tensors."""
    keys = [
        key("general.architecture", 8, text("llama")),
        key("llama.nextn_predict_layers", 4, struct.pack("<I", 1)),
        key("clip.projector_type", 8, text("mlp")),
        key("tokenizer.ggml.tokens", 9, array(8, [text(f"piece {number}") for number in range(4)])),
        *(key(f"n.{kind}", kind, struct.pack(f"<{code}", 1)) for kind, code in NUMBERS.items()),
        *(key(f"a.{kind}", 9, array(kind, [struct.pack(f"<{code}", 1)] * 3)) for kind, code in NUMBERS.items()),
        key("split.count", 2, struct.pack("<H", 1)),
    ]
    tensors = [text(f"blk.{n}.nextn.w") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0) for n in range(2)]
    return struct.pack("<4sIqq", b"GGUF", 3, len(tensors), len(keys)) + b"".join([*keys, *tensors])


def read_all(path: Path) -> int:
    """How many readers took the file. Any other error than ModelInvalid fails the test."""
    refused = []
    for read in READERS:
        try:
            read(path)
        except ModelInvalid as error:
            refused.append(str(error))
    assert all(str(path) in message for message in refused)
    return len(READERS) - len(refused)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hostile.gguf"


def test_cut_at_every_byte(path: Path) -> None:
    data = whole()
    path.write_bytes(data)
    assert read_all(path) == len(READERS)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert read_all(path) < len(READERS), size


def test_every_place_has_an_extreme(path: Path) -> None:
    data = whole()
    for at in range(len(data) - 8):
        path.write_bytes(data[:at] + struct.pack("<Q", EXTREMES[at % 3]) + data[at + 8 :])
        read_all(path)


def test_random_damage(path: Path) -> None:
    draw, data = random.Random(1), whole()
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(draw.randrange(1, 8)):
            damaged[draw.randrange(24, len(damaged))] = draw.choice((0, 1, 8, 9, 255, draw.randrange(256)))
        path.write_bytes(damaged)
        read_all(path)


def head(n_tensors: int, n_keys: int, *parts: bytes) -> bytes:
    return struct.pack("<4sIqq", b"GGUF", 3, n_tensors, n_keys) + b"".join(parts)


ARCHITECTURE = key("general.architecture", 8, text("llama"))


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("keys", head(0, 1 << 27)),
        ("tensors", head(1 << 27, 0)),
        ("a text", head(0, 2, key("x", 8, struct.pack("<Q", LARGE // 2)))),
        ("an architecture", head(0, 1, text("general.architecture") + struct.pack("<IQ", 8, LARGE // 2))),
        ("a name", head(0, 1, struct.pack("<Q", LARGE // 2))),
        ("texts", head(0, 1, key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1 << 28)))),
        ("numbers", head(0, 1, key("x", 9, struct.pack("<IQ", 10, LARGE // 16)))),
        ("a tensor's name", head(1, 1, ARCHITECTURE, struct.pack("<Q", LARGE // 2))),
        ("dimensions", head(2, 1, ARCHITECTURE, text("w"), struct.pack("<I", 2**32 - 1))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sparse_file_that_names_billions_takes_no_memory(path: Path, what: str, content: bytes) -> None:
    """The file is large enough for what it declares, and takes one block of the disk."""
    path.write_bytes(content)
    with path.open("r+b") as file:
        try:
            file.truncate(LARGE)
        except OSError:
            pytest.skip("no sparse files of this size here")
    tracemalloc.start()
    try:
        read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY, what
