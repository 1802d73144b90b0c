"""A model in several files is opened by the first; an error names the missing or damaged file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny import tiny
from rest_local.errors import ModelInvalid, ModelNotFound
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import shards_of
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first of three files."""
    return tiny("llama", tmp_path / "model.gguf", tensors_per_file=15)


def _row(path: Path) -> np.ndarray:
    with Model.open(path) as model, Context(model, ContextSettings(n_ctx=64, threads=1, n_branches=1)) as context:
        context.batch.fill(np.arange(40, 60), np.arange(20), 0, 1, np.arange(20) == 19)
        assert context.decode() == 0
        return context.logits(1)[0].copy()


def test_several_files_are_one_model(split: Path, tiny_model: TinyModel) -> None:
    assert split.name == "model-00001-of-00003.gguf"
    assert [path.name[-14:-5] for path in shards_of(split)] == ["-of-00003"] * 3
    assert np.array_equal(_row(split), _row(tiny_model("llama")))


def test_a_missing_part_is_named(split: Path) -> None:
    third = split.with_name("model-00003-of-00003.gguf")
    third.unlink()
    with pytest.raises(ModelInvalid, match=r"model-00003-of-00003.gguf is not there"):
        Model.open(split)
    split.with_name("model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelInvalid, match=r"model-00002-of-00003.gguf, model-00003-of-00003.gguf are not there"):
        Model.open(split)
    split.unlink()
    with pytest.raises(ModelNotFound):
        Model.open(split)


@pytest.mark.parametrize("length", [0, 10, 100, 5000])
def test_a_damaged_part_is_named(split: Path, length: int) -> None:
    second = split.with_name("model-00002-of-00003.gguf")
    second.write_bytes(second.read_bytes()[:length])
    with pytest.raises(ModelInvalid) as caught:
        Model.open(split)
    assert str(second if length < 24 else split.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_change_in_any_part_is_probed_again(split: Path, children: list[Any]) -> None:
    keys = []
    for _ in range(2):
        with Model.open(split) as model:
            keys.append(model.cache_key)
    assert len(children) == 1
    os.utime(split.with_name("model-00003-of-00003.gguf"), ns=(1, 1))
    with Model.open(split) as model:
        keys.append(model.cache_key)
    assert len(children) == 2
    assert keys[0] == keys[1] != keys[2]
