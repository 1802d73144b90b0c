"""A draft model that cannot be used costs one clear line, and generation goes on without it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_sources import always_draft
from support.refusals import cut, little_memory, opened, refusal, renamed, with_nan

from benchmarks.gguf_file import byte_vocabulary, write
from benchmarks.tiny import tiny
from rest_local import Engine
from rest_local.decoding.decode_context import DecodeContext
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.opening import NO_DRAFTER, Opener, open_drafter
from rest_local.errors import ModelError
from rest_local.llama.model import Model
from rest_local.paths import demo_model

TinyModel = Callable[..., Path]
PROMPT = "for number in range(10): print(number)\n" * 3


@pytest.fixture
def target(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", quant="Q8_0")


def answer(engine: Engine, n: int = 12) -> list[int]:
    return engine.generate(PROMPT, max_tokens=n).wait().tokens


def refused(kind: str, target: Path, path: Path) -> Path:
    """A file that cannot draft for `target`, for one reason."""
    if kind == "weightless":
        return write(path, "llama", {}, byte_vocabulary(384), [])
    if kind == "larger":
        return tiny("llama", path, quant="Q8_0", n_layers=6)
    if kind == "recurrent":
        return tiny("mamba", path, quant="Q8_0", n_layers=1)
    path.write_bytes(b"<!DOCTYPE html><title>not found</title>" if kind == "foreign" else target.read_bytes())
    change = {"vocabulary": renamed, "truncated": cut, "nan": with_nan}.get(kind)
    return change(path) if change else path


CAUSES = {
    "vocabulary": "its vocabulary .* is not that of the model .*choose a smaller model of the same family",
    "weightless": "holds a vocabulary and no weights; give the file with the weights",
    "larger": r"is larger \(0.3 MB\) than the model that it would draft for \(0.2 MB\); choose a smaller model",
    "truncated": "corrupted or incomplete; get the file again",
    "foreign": "is a web page, not a GGUF file; get the file again",
    "recurrent": "cannot roll back tokens; draft with one that has attention only",
    "nan": "returns values that are not numbers; get the file again",
}


@pytest.mark.parametrize("kind", CAUSES)
def test_it_is_one_warning_with_cause_and_remedy_and_the_engine_answers(
    kind: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = refused(kind, target, tmp_path / "drafter.gguf")
    with Engine.load(target, n_ctx=256, threads=1) as alone:
        expected, warned = answer(alone), alone.warnings
    with opened(target, path, caplog) as engine:
        line = refusal(engine, path, caplog, warned)
        assert re.match(f"going on without the draft model: model {re.escape(str(path))}: .*{CAUSES[kind]}", line)
        assert answer(engine) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_lack_of_memory_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ctx = 1 << 22  # cells of 2 GB
    path = tiny("llama", tmp_path / "long.gguf", quant="Q8_0", n_ctx=n_ctx)
    with Model.open(path) as model:
        with little_memory(1 << 28), pytest.raises(ModelError, match="if memory is short, give a smaller `n_ctx`"):
            open_drafter(path, model, n_ctx, 2, 1, None)
        open_drafter(path, model, 256, 2, 1, None).close()  # nothing is left of the first try


def test_a_draft_model_that_takes_the_memory_of_the_model_is_closed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DecodeContext.open
    closed: list[Opener] = []

    def without_room(*arguments: Any, opener: Opener = NO_DRAFTER, **options: Any) -> DecodeContext:
        if opener is not NO_DRAFTER:
            close = opener.close
            monkeypatch.setattr(opener, "close", lambda: (closed.append(opener), close()))
            raise ModelError("model m.gguf: no context of 256 tokens")
        assert closed
        return real(*arguments, opener=opener, **options)

    monkeypatch.setattr(DecodeContext, "open", without_room)
    with Engine.load(target, n_ctx=256, threads=1, draft_model=target) as engine:
        assert engine.settings["draft_model"] is None
        (line,) = engine.warnings
        assert "next to it the model cannot be evaluated (model m.gguf: no context of 256 tokens)" in line
        assert answer(engine)


def test_a_full_context_is_told_once_and_generation_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always_draft(monkeypatch, most=4)
    short = tiny("llama", tmp_path / "short.gguf", quant="Q8_0", n_ctx=160)
    with Engine.load(target, n_ctx=256, threads=1) as alone:
        expected = answer(alone, 100)
    with opened(target, short, caplog) as engine:
        small = engine.context.drafter
        assert isinstance(small, DraftModel)
        for _ in range(2):
            assert answer(engine, 100) == expected
        assert engine.totals.by_source["model"]["drafted"] > 0
        assert not small.failed
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rest_local.drafting"]
    assert f"draft model {short}: its context of 160 tokens is full" in line


@pytest.mark.parametrize("name", ["demo-eagle3", "demo-mtp"])
def test_a_damaged_head_is_one_warning_and_the_engine_answers(name: str, tmp_path: Path) -> None:
    whole, path = demo_model().with_name(f"{name}.gguf"), tmp_path / "head.gguf"
    for cause in ("returns values that are not numbers; get", "data is not within the file bounds, .*; get"):
        path.write_bytes(whole.read_bytes())
        (with_nan if "numbers" in cause else cut)(path)
        with Engine.load(n_ctx=256, threads=1, draft_model=path) as engine:
            (line,) = engine.warnings
            assert re.match(f"going on without the draft model: model {re.escape(str(path))}: .*{cause}", line)
            assert answer(engine, 4)
