"""Reliability case 27: a truncated, foreign, hostile or unsupported GGUF gives one line, and the next load works."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rest_local.errors import ModelInvalid, ModelNotFound
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
