"""Opening, describing and closing models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny import ARCHITECTURES
from rest_local import sandbox
from rest_local.errors import ModelError, ModelInvalid
from rest_local.llama import loading
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
        lambda: vocabulary.text(1),
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
    return next(i for i in range(model.n_vocab) if model.vocabulary.text(i) == text)
