"""Cells in a file: a later engine goes on as if it had evaluated the text, and damage costs only that."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine
from rest_local.kv_cache.cell_format import Reader
from rest_local.llama import library
from rest_local.llama.options import ModelOptions

TEXT = "def first(values):\n    return values[0]\n\n" * 4
NEXT = TEXT + "x = first([1, 2])\n"
TinyModel = Callable[..., Path]


def open_engine(model: Path, **options: Any) -> Engine:
    return Engine.load(model, n_ctx=512, threads=1, policy="off", **options)


def answer(engine: Engine, prompt: str | list[int], n: int = 12) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were in the cells."""
    result = engine.generate(prompt, max_tokens=n).wait()
    return list(result.tokens), result.timings.cached_tokens


def saved_tokens(path: Path) -> int:
    with Reader(path) as reader:
        return len(reader.head.tokens)


@pytest.fixture
def saved(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Save the cells of TEXT."""
    path = tmp_path / "x.cells"
    with open_engine(tiny_model("llama")) as engine:
        answer(engine, TEXT, 1)
        assert engine.decoder.context.cells.save(path)
    return path


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt-oss", "mamba", "lfm2"])
def test_a_text_that_ends_earlier_is_answered_as_without_the_file(
    tiny_model: TinyModel, tmp_path: Path, arch: str
) -> None:
    """A file has only the cells of the sliding window before its last token: the end cannot be taken back."""
    path = tmp_path / "cells"
    with open_engine(tiny_model(arch)) as engine:
        answer(engine, TEXT)
        assert engine.decoder.context.cells.save(path)
        texts, fresh = [engine.tokenize(TEXT)[: -n or None] for n in (0, 1, 3, 40)], []
        for text in texts:
            engine.decoder.forget()
            fresh.append(answer(engine, text)[0])
        for text, expected in zip(texts, fresh, strict=True):
            engine.decoder.forget()
            assert engine.decoder.context.cells.load(path)
            assert answer(engine, text)[0] == expected


def test_the_files_are_private(saved: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in saved.parent.iterdir()} == {0o600}
    assert {path.name for path in saved.parent.iterdir()} == {"x.cells"}


def refused(model: Path, path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """Return why the cells are not used, after a check that the answer is that of a fresh engine all the same."""
    with open_engine(model, **options) as engine:
        expected = answer(engine, NEXT)
    with open_engine(model, **options) as engine, caplog.at_level(logging.WARNING, "rest_local.engine"):
        assert engine.decoder.context.cells.load(path) == 0
        assert answer(engine, NEXT) == expected
    return caplog.records[-1].getMessage().rpartition(": ")[2]


@pytest.mark.parametrize("cut", [True, False])
def test_damage_costs_a_warning(
    tiny_model: TinyModel, saved: Path, caplog: pytest.LogCaptureFixture, cut: bool
) -> None:
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= not cut
    saved.write_bytes(content[:-100] if cut else content)
    assert refused(tiny_model("llama"), saved, caplog) == "it is damaged"


def test_cells_of_another_model_are_not_used(
    tiny_model: TinyModel, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of other settings or of another build are not used either."""
    assert refused(tiny_model("llama", seed=2), saved, caplog) == "it is of another model"
    other = ModelOptions(cache_type_k="q8_0", cache_type_v="q8_0", flash_attention="on")
    told = refused(tiny_model("llama"), saved, caplog, options=other)
    assert told in ("it is of another model", "it is of other settings")
    known = library.fingerprint()
    monkeypatch.setattr(library, "fingerprint", lambda: known + " newer")
    assert refused(tiny_model("llama"), saved, caplog) == "it is of another build of llama.cpp"


def test_cells_that_do_not_fit_are_not_used(
    tiny_model: TinyModel, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cells that fill the context leave no place for the token that an answer begins with."""
    held = saved_tokens(saved)
    for n_ctx, loaded in ((64, 0), (held, 0), (held + 1, held)):
        caplog.clear()
        with (
            Engine.load(tiny_model("llama"), n_ctx=n_ctx, threads=1, policy="off") as engine,
            caplog.at_level(logging.WARNING, "rest_local.engine"),
        ):
            assert engine.decoder.context.backend.n_ctx == n_ctx
            assert engine.decoder.context.cells.load(saved) == loaded
            assert answer(engine, "x = 1\n")[1] == 0
        assert ("do not fit" in caplog.text) == (loaded == 0)


def test_missing_files_are_no_fault(tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_engine(tiny_model("llama")) as engine:
        assert engine.decoder.context.cells.load(tmp_path / "none") == 0
        assert not engine.decoder.context.cells.save(tmp_path / "empty"), "nothing was evaluated"
        answer(engine, TEXT, 1)
        assert not engine.decoder.context.cells.save(tmp_path / "no" / "folder")
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "there are none", "No such file or directory",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
