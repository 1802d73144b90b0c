"""LoRA adapters are applied with their scale and freed with the model. A hostile file gives an error of one line."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tiny import tiny_adapter
from rest_local.errors import AdapterInvalid
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import Adapter, ModelOptions

TinyModel = Callable[..., Path]
SETTINGS = ContextSettings(n_ctx=64, threads=1, n_branches=1)


def _row(model: Model) -> np.ndarray:
    with Context(model, SETTINGS) as context:
        context.batch.fill(np.arange(40, 60), np.arange(20), 0, 1, np.arange(20) == 19)
        assert context.decode() == 0
        return context.logits(1)[0].copy()


def _open(path: Path, *adapters: Adapter) -> Model:
    return Model.open(path, options=ModelOptions(lora=adapters))


def test_an_adapter_changes_logits_by_its_scale(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    one, two = (tiny_adapter("llama", tmp_path / f"{seed}.gguf", seed=seed, strength=0.02) for seed in (1, 2))
    with Model.open(path) as model:
        plain = _row(model)
    moved = one.with_name("moved.gguf")
    moved.write_bytes(one.read_bytes())
    rows, identities = {}, {}
    for name, adapters in {
        "none": [Adapter(one, 0.0)],
        "half": [Adapter(one, 0.5)],
        "whole": [Adapter(one)],
        "moved": [Adapter(moved)],
        "both": [Adapter(one), Adapter(two)],
        "other": [Adapter(two)],
    }.items():
        with _open(path, *adapters) as model:
            identities[name] = str(model.adapters.identity)
            rows[name] = np.abs(_row(model) - plain).max()
            assert np.array_equal(_row(model), _row(model))  # every context of the model applies them
    assert rows["none"] < 1e-4
    assert 0 < rows["half"] < rows["whole"]
    assert rows["both"] not in (0, rows["whole"])
    assert identities.pop("moved") == identities["whole"], "by content, not by path"
    assert len({*identities.values()}) == len(identities)
    with Model.open(path) as model:
        assert np.array_equal(_row(model), plain)


def _refused(model: Path, adapter: Path, cause: str) -> None:
    with pytest.raises(AdapterInvalid, match=cause) as caught:
        _open(model, Adapter(adapter))
    assert str(adapter) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_does_not_fit_gives_one_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    _refused(path, tmp_path / "none.gguf", "no such file")
    _refused(path, tmp_path, "is a directory")
    _refused(path, path, "general.type")
    _refused(path, tiny_adapter("lfm2", tmp_path / "arch.gguf"), "arch mismatch")
    _refused(path, tiny_adapter("llama", tmp_path / "wide.gguf", width=128), "incorrect shape")
    _refused(path, tiny_adapter("llama", tmp_path / "deep.gguf", n_layers=5), "does not exist in base model")
    Model.open(path).close()  # the next load works


def test_a_truncated_or_hostile_adapter_is_one_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    whole = tiny_adapter("llama", tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 10, 30, 300, 1000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        _refused(path, cut, "is empty|truncated|cannot load it")
    name = whole.index(b"blk.0.attn_q.weight.lora_a")
    dimensions = name + len(b"blk.0.attn_q.weight.lora_a") + 4
    for value in (0, 1, 1 << 62, (1 << 64) - 1):
        cut.write_bytes(whole[:dimensions] + struct.pack("<Q", value) + whole[dimensions + 8 :])
        _refused(path, cut, "cannot load it|crashed|exit code")
    cut.write_bytes(whole.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_q.weight.lora_x"))
    _refused(path, cut, "unexpected suffix|cannot load it")
