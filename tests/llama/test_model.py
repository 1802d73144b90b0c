"""Opening, describing and closing models."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.spelling import text_of

from benchmarks.tiny import ARCHITECTURES, tiny
from rest_local import sandbox
from rest_local.errors import ModelError, ModelInvalid, ModelNotFound
from rest_local.llama import loading
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import shards_of
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tiny_architecture_opens_and_describes_itself(tiny_model: TinyModel, arch: str) -> None:
    with Model.open(tiny_model(arch)) as model:
        assert model.name == f"tiny {arch}"
        assert model.metadata["general.architecture"] == arch
        assert (model.n_vocab, model.n_ctx_train, model.n_embd, model.n_layer) == (384, 2048, 64, 4)
        assert model.is_recurrent == (arch == "mamba")
        assert model.is_hybrid == (arch == "lfm2")
        assert model.n_swa == (32 if arch in ("gemma3", "gpt-oss") else 0)
        assert not model.has_encoder
        assert model.chat_template is not None
        assert "<|im_start|>" in model.chat_template
        assert 0 < model.n_params * 4 <= model.size_bytes + 4096
        assert arch in model.description


def test_close_is_idempotent_and_use_after_it_raises(tiny_model: TinyModel) -> None:
    model = Model.open(tiny_model("llama"))
    vocabulary = model.vocabulary
    model.close()
    model.close()
    assert model.closed
    assert model.name == "tiny llama"  # metadata stays available
    for use in (
        lambda: model.pointer,
        lambda: vocabulary.pointer,
        lambda: vocabulary.tokenize("x"),
        lambda: vocabulary.piece(1),
        lambda: vocabulary.is_end(1),
    ):
        with pytest.raises(ModelError, match="closed"):
            use()


def test_vocabulary_only_needs_no_weights(tiny_model: TinyModel) -> None:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        assert model.vocab_only
        assert model.vocabulary.tokenize("def").tolist() == [_id(model, "def")]


def test_a_file_is_probed_once_until_it_changes(tiny_model: TinyModel, tmp_path: Path, children: list[Any]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    for _ in range(2):
        Model.open(path, vocab_only=True).close()
    assert len(children) == 1
    os.utime(path, ns=(1, 1))
    Model.open(path, vocab_only=True).close()
    assert len(children) == 2


def _child_that(monkeypatch: pytest.MonkeyPatch, folder: Path, does: str) -> None:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sandbox.sys, "executable", str(script))


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("kill -ABRT $$", "crashed .SIGABRT."),
        ("kill -SEGV $$", "crashed .SIGSEGV."),
        ("exit 3", "exit code 3"),
        ("echo nonsense", "exit code 0"),
        ("echo '[]'", "exit code 0"),
        ("""echo '{"error": "llama.cpp cannot load it: x"}'""", "cannot load it: x"),
    ],
)
def test_a_model_that_kills_the_probe_is_refused_in_one_line(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    with monkeypatch.context() as patched:
        _child_that(patched, tmp_path, does)
        with pytest.raises(ModelInvalid, match=said) as caught:
            Model.open(path)
    assert "\n" not in str(caught.value)
    Model.open(path, vocab_only=True).close()  # the next load works


def test_a_probe_that_does_not_end_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "endless.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    _child_that(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 0.05)
    with pytest.raises(ModelInvalid, match="did not finish"):
        Model.open(path)


def _id(model: Model, text: str) -> int:
    return next(i for i in range(model.n_vocab) if text_of(model.vocabulary, i) == text)


# ---- Files in several parts ----------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Return the first of three files."""
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
