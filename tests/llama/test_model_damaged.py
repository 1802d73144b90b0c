"""Reliability case 27: a truncated, foreign, hostile or unsupported GGUF gives one line, and the next load works."""

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rest_local.errors import ModelInvalid, ModelNotFound
from rest_local.llama.gguf import check_header, read_gguf, vocabulary_file
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]
HUGE = (1 << 62, (1 << 64) - 1, 1 << 31)

# Loads every path on stdin in one process, like the probe. A crash shows as a missing answer.
_MANY = """
import json, sys
from rest_local.llama.loading import load_error
for path in sys.stdin.read().split("\\0"):
    print(json.dumps(load_error(path, False)), flush=True)
"""


def _refused(path: Path, cause: str) -> None:
    with pytest.raises(ModelInvalid, match=cause) as caught:
        Model.open(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 700


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.gguf", tmp_path / "no" / "no.gguf"):
        with pytest.raises(ModelNotFound, match="no such file"):
            Model.open(path)


def test_foreign_files_are_named_by_their_kind(tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", b"x")
    _refused(tmp_path, "is a directory")
    _refused(archive, "zip archive")
    noise = np.random.default_rng(0).bytes(4096)
    for content, kind in (
        (b"", "is empty"),
        (noise, "not a GGUF file"),
        (b"tjgg" + noise, "before GGUF"),
        (b"FUGG" + noise, "big-endian"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"GGUF" + struct.pack("<Iqq", 1, 1, 1), "version 1"),
        (b"GGUF" + struct.pack("<Iqq", 99, 1, 1), "version 99"),
        (b"GGUF" + struct.pack("<Iqq", 3, 1 << 40, 1), "damaged or truncated"),
        (b"GGUF" + struct.pack("<Iqq", 3, -1, 1), "damaged or truncated"),
        (b"GGUF" + struct.pack("<Iqq", 3, 0, 10) + noise, "cannot load"),
    ):
        path = tmp_path / "foreign.gguf"
        path.write_bytes(content)
        _refused(path, kind)


def test_a_fifo_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    _refused(tmp_path / "pipe", "not a regular file")


def test_a_file_cut_at_many_places_is_refused_without_a_crash(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = tiny_model("llama").read_bytes()
    lengths = [*np.linspace(24, len(whole) - 1, 40).astype(int).tolist(), len(whole) - 33]
    paths = [tmp_path / f"{length}.gguf" for length in lengths]
    for path, length in zip(paths, lengths, strict=True):
        path.write_bytes(whole[:length])
    answers = _load_many(paths)
    assert len(answers) == len(paths)
    assert all(answer and answer.startswith("llama.cpp cannot load it") for answer in answers)
    _refused(paths[len(paths) // 2], "cannot load it")
    Model.open(tiny_model("llama")).close()  # next works


def test_declared_lengths_that_are_huge_or_zero_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = tiny_model("llama").read_bytes()
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8  # past two type codes
    tensor = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4  # past the number of dimensions
    places = {"key length": 24, "array length": tokens, "string length": tokens + 8, "dimension": tensor}
    paths = []
    for name, offset in places.items():
        for value in (*HUGE, 0) if name == "dimension" else HUGE:
            path = tmp_path / f"{name} {value}.gguf"
            path.write_bytes(whole[:offset] + struct.pack("<Q", value) + whole[offset + 8 :])
            paths.append(path)
    answers = _load_many(paths)
    assert [path.name for path, answer in zip(paths, answers, strict=True) if not answer] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", 2**32 - 1),
        ("llama.block_count", 2**31),
        ("llama.attention.head_count_kv", 0),
    ],
)
def test_hyperparameters_that_cannot_be_are_refused(
    tiny_model: TinyModel, tmp_path: Path, key: str, value: int
) -> None:
    """Some of these abort or crash llama.cpp. In the child that only gives an error."""
    whole = tiny_model("llama").read_bytes()
    offset = whole.index(key.encode()) + len(key) + 4
    path = tmp_path / "hostile.gguf"
    path.write_bytes(whole[:offset] + struct.pack("<I", value) + whole[offset + 4 :])
    _refused(path, "cannot load it|crashed|exit code")


def test_random_damage_never_crashes_this_process(tiny_model: TinyModel, tmp_path: Path) -> None:
    """llama.cpp can only crash in the child. In this process the file opens or is refused."""
    whole = bytearray(tiny_model("llama").read_bytes())
    random = np.random.default_rng(7)
    for _ in range(6):
        damaged = bytearray(whole)
        for place in random.integers(0, 20_000, 8):
            damaged[place] ^= 1 << int(random.integers(8))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        with contextlib.suppress(ModelInvalid):
            Model.open(path).close()
    Model.open(tiny_model("llama")).close()  # next works


def _load_many(paths: list[Path]) -> list[str | None]:
    names = "\0".join(str(path) for path in paths)
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", _MANY], input=names, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


# ---- Headers -------------------------------------------------------------------------------------------------------


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
    """Return a header with keys of every kind, and two tensors."""
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
    """Return how many readers took the file. Any other error than ModelInvalid fails the test."""
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
