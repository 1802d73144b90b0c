"""A draft model, MTP layers or an EAGLE-3 head that cannot be used costs one clear line, and nothing else."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.fake_sources import always_draft
from support.heads import draft_whatever_it_costs, model_and_drafter

from benchmarks.gguf_file import byte_vocabulary, write
from benchmarks.tiny import tiny
from benchmarks.tiny_heads import (
    tiny_assistant,
    tiny_dflash,
    tiny_eagle3,
    tiny_gemma4,
    tiny_mtp,
    tiny_predictable,
)
from rest_local import Engine
from rest_local.decoding.decode_context import DecodeContext
from rest_local.drafting.models import head_kinds, heads
from rest_local.drafting.models.blocks import DFlash
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.heads import Head
from rest_local.drafting.models.opening import NO_DRAFTER, Opener, open_drafter
from rest_local.errors import ModelError
from rest_local.llama import features
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]
PROMPT = "for number in range(10): print(number)\n" * 3


def answer(engine: Engine, n: int = 12, policy: str = "auto") -> list[int]:
    return engine.generate(PROMPT, max_tokens=n, policy=policy).wait().tokens


def renamed(path: Path) -> Path:
    """Write the same file with another token in its vocabulary."""
    path.write_bytes(path.read_bytes().replace(b"return", b"retorn"))
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-4096])
    return path


def with_nan(path: Path, name: str = "norm") -> Path:
    """Write the same file with NaN in all tensors of such a name."""
    found = [tensor for tensor in gguf.GGUFReader(path).tensors if name in tensor.name]
    assert found
    data = bytearray(path.read_bytes())
    for tensor in found:
        values = np.full(tensor.n_elements, np.nan, np.float32).tobytes()
        data[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = values
    path.write_bytes(data)
    return path


def refusal(engine: Engine, path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return the one line of an engine about the file at `path`, without which it drafts."""
    (line,) = engine.warnings
    assert line.startswith("going on without ")
    assert "\n" not in line
    assert line.count(str(path)) == 1
    assert engine.decoder.context.drafter is None
    assert engine.settings["draft_model"] is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # or the command line would show two lines
    assert not [record for record in warnings if not record.name.startswith("rest_local.llama")]
    return line


@contextmanager
def opened(target: Path, drafter: Path | None, caplog: pytest.LogCaptureFixture, n_ctx: int = 256) -> Iterator[Engine]:
    """Open an engine that drafts with a file, or with what is in the target's own, and note its warnings."""
    given = {} if drafter is None else {"draft_model": drafter}
    with (
        caplog.at_level(logging.WARNING, "rest_local"),
        Engine.load(target, n_ctx=n_ctx, threads=1, **given) as engine,  # type: ignore[arg-type]
    ):
        yield engine


@contextmanager
def little_memory(n_bytes: int) -> Iterator[None]:
    """Give this process at most `n_bytes` more of address space."""
    import resource

    status = Path("/proc/self/status").read_text()
    used = 1024 * int(re.search(r"VmSize:\s+(\d+)", status)[1])  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def web_page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><title>not found</title>")


# What cannot draft for a model of four layers of 64 numbers, and what the line says of it.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another vocabulary": (
        lambda path: renamed(tiny_predictable(path)),
        "its vocabulary .* is not that of the model .*choose a smaller model of the same family",
    ),
    "without weights": (
        lambda path: write(path, "llama", {}, byte_vocabulary(384), []),
        "holds a vocabulary and no weights; give the file with the weights",
    ),
    "larger": (
        lambda path: tiny_predictable(path, n_layers=6),
        r"is larger \(\d.\d MB\) than the model that it would draft for \(\d.\d MB\); choose a smaller model",
    ),
    "truncated": (lambda path: cut(tiny_predictable(path)), "corrupted or incomplete; get the file again"),
    "foreign": (web_page, "is a web page, not a GGUF file; get the file again"),
    "recurrent": (
        lambda path: tiny("mamba", path, quant="Q8_0", n_layers=1),
        "cannot roll back tokens; draft with one that has attention only",
    ),
    "not numbers": (
        lambda path: with_nan(tiny_predictable(path)),
        "returns values that are not numbers; get the file again",
    ),
    "a head of another vocabulary": (
        lambda path: renamed(tiny_eagle3(path)),
        "its vocabulary is not the model's; it is of another",
    ),
    "a head of another width": (
        lambda path: tiny_eagle3(path, width=128),
        r"it reads layers \[1, 2, 3\] of 128 numbers, and the model has 4 layers of 64; it belongs",
    ),
    "a head for more layers": (
        lambda path: tiny_eagle3(path, layers=(1, 4, 9)),
        r"it reads layers \[1, 4, 9\] of 64 numbers, and the model has 4 layers of 64; it belongs",
    ),
    "a head without a tensor": (
        lambda path: tiny_eagle3(path, without="blk.0.attn_k.weight"),
        "tensor 'blk.0.attn_k.weight' not found",
    ),
    "a truncated head": (lambda path: cut(tiny_eagle3(path)), "corrupted or incomplete"),
    "a head of no numbers": (
        lambda path: with_nan(tiny_eagle3(path)),
        "returns values that are not numbers; get a head that was made for this model",
    ),
    "a head of another kind": (
        lambda path: write(path, "medusa", {"block_count": 1}, byte_vocabulary(384), []),
        "Medusa heads are not supported; give an EAGLE-3 head, MTP layers, a DFlash drafter, a Gemma assistant or a m",
    ),
    "a block drafter of another vocabulary": (
        lambda path: renamed(tiny_dflash(path)),
        "its vocabulary is not the model's; it is of another",
    ),
    "a block drafter of another width": (
        lambda path: tiny_dflash(path, width=128),
        r"it reads layers \[1, 2, 3\] of 128 numbers, and the model has 4 layers of 64; it belongs",
    ),
    "a block drafter for more layers": (
        lambda path: tiny_dflash(path, layers=(1, 4)),
        r"it reads layers \[1, 4\] of 64 numbers, and the model has 4 layers of 64; it belongs",
    ),
    "a block drafter without a mask token": (
        lambda path: tiny_dflash(path, mask=-1),
        "its mask token -1 is not one of the model's 384; it belongs to another model",
    ),
    "a block drafter with a mask token of another model": (
        lambda path: tiny_dflash(path, mask=151669),
        "its mask token 151669 is not one of the model's 384; it belongs to another model",
    ),
    "a block drafter without its selector": (
        lambda path: tiny_dflash(path, keys={"selector_top_k": 4}),
        "it lacks its selector; get the file again",
    ),
    "a block drafter without a codebook": (
        lambda path: tiny_dflash(path, "selector", without="selector_successor.weight"),
        "tensor 'selector_successor.weight' not found",
    ),
    "a block that is too long": (
        lambda path: tiny_dflash(path, size=65),
        "its block has 65 tokens, and the context has room for 2 to 64; give a larger `n_ctx` or another drafter",
    ),
    "a block of one token": (
        lambda path: tiny_dflash(path, size=1),
        "its block has 1 tokens, and the context has room for 2 to 64",
    ),
    "a block drafter of tokens that the model lacks": (
        lambda path: tiny_dflash(path, drafts=[*range(64), 5000]),
        r"llama.cpp crashed \(SIGABRT\) while .*; get a head that was made for this model",
    ),
    "an assistant of another model": (
        tiny_assistant,
        "it reads the cells of a gemma4, and the model is a llama; it belongs to another model",
    ),
    "a truncated block drafter": (lambda path: cut(tiny_dflash(path)), "corrupted or incomplete"),
    "a block drafter of no numbers": (
        lambda path: with_nan(tiny_dflash(path)),
        "returns values that are not numbers; get a head that was made for this model",
    ),
    "a selector of no numbers": (
        lambda path: with_nan(tiny_dflash(path, "selector"), "selector_hidden"),
        "returns values that are not numbers; get a head that was made for this model",
    ),
    "MTP layers for a model without hidden states": (
        lambda path: tiny_mtp("mimo2", path, part="layer"),
        "the model gives no hidden states",
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a model, and what it answers without a drafter."""
    target = tiny_predictable(tmp_path_factory.mktemp("alone") / "target.gguf")
    with Engine.load(target, n_ctx=256, threads=1) as engine:
        return target, answer(engine)


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_one_warning_with_cause_and_remedy_and_the_engine_answers(
    kind: str, alone: tuple[Path, list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, expected = alone
    path, (make, cause) = tmp_path / "drafter.gguf", REFUSED[kind]
    make(path)
    with opened(target, path, caplog) as engine:
        assert re.match(f"going on without the draft model: .*{cause}", refusal(engine, path, caplog))
        assert answer(engine) == expected


@pytest.mark.parametrize(
    ("odd", "windows", "cause"),
    [
        ({"width": 32}, [1, 1, 1, 0], "it reads 32 numbers"),
        ({"vocab": 400}, [1, 1, 1, 0], "its vocabulary is not the model's"),
        ({}, [1, 1, 0, 1], "the last two of the model are others"),
    ],
)
def test_an_assistant_of_another_gemma_is_refused(
    odd: dict[str, int], windows: list[int], cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_assistant(tmp_path / "assistant.gguf", **odd)
    keys = {"attention.sliding_window_pattern": [each == 1 for each in windows]}
    with opened(tiny_gemma4(tmp_path / "gemma4.gguf", keys=keys), path, caplog) as engine:
        assert cause in refusal(engine, path, caplog)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_lack_of_memory_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ctx = 1 << 22  # cells of 2 GB
    path = tiny("llama", tmp_path / "long.gguf", quant="Q8_0", n_ctx=n_ctx)
    with Model.open(path) as model:
        with little_memory(1 << 28), pytest.raises(ModelError, match="if memory is short, give a smaller `n_ctx`"):
            open_drafter(path, model, n_ctx, 2, 1, None)
        open_drafter(path, model, 256, 2, 1, None).close()  # nothing is left of the first try


def test_no_memory_for_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was tried in a smaller context."""
    target, path = model_and_drafter("eagle3", tmp_path)
    real = head_kinds.settings_for
    monkeypatch.setattr(heads, "settings_for", lambda target, n: replace(real(target, n), n_cells=1 << 26))
    with little_memory(400 << 20), Engine.load(target, n_ctx=256, threads=1, draft_model=path) as engine:
        (line,) = engine.warnings
        assert line.startswith("going on without ")
        assert "if memory is short" in line
        assert engine.decoder.context.drafter is None
        assert answer(engine)


def test_a_draft_model_that_takes_the_memory_of_the_model_is_closed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tiny_model("llama", quant="Q8_0"), DecodeContext.open
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


def test_a_model_that_reports_no_layer_inputs(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp aborts; only the child process that tries it ends."""
    path = tiny_eagle3(tmp_path / "head.gguf")
    with opened(tiny_model("qwen2"), path, caplog) as engine:
        line = refusal(engine, path, caplog)
        assert "llama.cpp crashed (SIGABRT) while evaluating the model" in line
        assert answer(engine)


def test_layers_inside_that_are_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model itself is used without them."""
    path = tiny_mtp("mimo2", tmp_path / "model.gguf")
    with Engine.load(path, n_ctx=256, threads=1, draft_model="none") as alone:
        expected = answer(alone)
        assert alone.warnings == []
    with_nan(path, "blk.2.nextn.hnorm.weight")
    with opened(path, None, caplog) as engine:
        assert "going on without the model's MTP layers" in refusal(engine, path, caplog)
        assert answer(engine) == expected


@pytest.mark.parametrize(("kind", "name"), [("mtp inside", features.NEXTN[0]), ("eagle3", features.LAYERS[0])])
def test_a_llama_cpp_without_the_functions(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, path = model_and_drafter(kind, tmp_path)
    monkeypatch.setitem(features._functions, name, None)
    with opened(target, path, caplog) as engine:
        line = refusal(engine, path or target, caplog)
        assert f" {name}, which this llama.cpp lacks; install a newer one" in line
        assert answer(engine)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("mtp inside", "nan"), ("mtp inside hybrid", "code"), ("eagle3", "exception"), ("model", "nan"),
        ("dflash", "nan"), ("dspark", "code"), ("dflash2 hybrid", "exception"),
    ],
)  # fmt: skip
def test_a_head_that_fails_later(
    kind: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft_whatever_it_costs(monkeypatch)
    target, path = model_and_drafter(kind, tmp_path)
    with opened(target, path, caplog) as engine:
        drafter = engine.decoder.context.drafter
        assert isinstance(drafter, Head | DraftModel)
        expected = answer(engine, 40, "off")
        assert answer(engine, 40) == expected
        if fault == "nan":
            n_vocab = drafter.model.n_vocab
            monkeypatch.setattr(drafter.context, "logits", lambda n: np.full((n, n_vocab), np.nan, np.float32))
            said = "returned values that are not numbers"
        elif fault == "code":
            monkeypatch.setattr(drafter.context, "decode", lambda: -3)
            said = "cannot be evaluated (llama_decode: -3)"
        else:
            monkeypatch.setattr(drafter, "features", lambda n: 1 // 0)
            said = "failed"
        for _ in range(2):
            assert answer(engine, 40) == expected
        assert drafter.failed
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rest_local.drafting"]
    assert line == f"{drafter.name} {path or target} {said}; going on without it"


def test_a_full_context_is_told_once_and_generation_goes_on(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always_draft(monkeypatch, most=4)
    target = tiny_model("llama", quant="Q8_0")
    short = tiny("llama", tmp_path / "short.gguf", quant="Q8_0", n_ctx=160)
    with Engine.load(target, n_ctx=256, threads=1) as alone:
        expected = answer(alone, 100)
    with opened(target, short, caplog) as engine:
        small = engine.decoder.context.drafter
        assert isinstance(small, DraftModel)
        for _ in range(2):
            assert answer(engine, 100) == expected
        assert engine.decoder.totals.by_source["model"]["drafted"] > 0
        assert not small.failed
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rest_local.drafting"]
    assert f"draft model {short}: its context of 160 tokens is full" in line


@pytest.mark.parametrize("kind", ["mtp inside hybrid", "eagle3", "dflash"])
def test_a_full_context_of_a_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and drafting goes on with the newest tokens."""
    draft_whatever_it_costs(monkeypatch)
    target, path = model_and_drafter(kind, tmp_path)
    real = head_kinds.settings_for

    def short(target: Any, n: int) -> ContextSettings:
        return replace(real(target, n), n_ctx=256, n_cells=256)

    for module in (heads, head_kinds):
        monkeypatch.setattr(module, "settings_for", short)
    with opened(target, path, caplog, 400) as engine:
        drafter = engine.decoder.context.drafter
        assert isinstance(drafter, Head)
        drafter.context.n_ctx = 400
        expected = answer(engine, 200, "off")
        for _ in range(2):
            assert answer(engine, 200) == expected
        assert not drafter.failed
        assert engine.decoder.totals.by_source["model"]["drafted"] > 100
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rest_local.drafting"]
    assert "its context is full; it begins anew with the newest tokens" in line


@pytest.mark.parametrize("flaw", ["", "another mask token", "no proposals"])
def test_a_block_drafter_of_no_use_changes_no_token_up_to_the_end_of_the_context(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last block does not fit."""
    draft_whatever_it_costs(monkeypatch)
    if flaw == "no proposals":
        monkeypatch.setattr(DFlash, "_read", lambda *_: [])
    target = tiny_predictable(tmp_path / "target.gguf", marked=True)
    path = tiny_dflash(tmp_path / "drafter.gguf", "selector", mask=5 if flaw == "another mask token" else None)
    with opened(target, path, caplog, 160) as engine:
        assert isinstance(engine.decoder.context.drafter, DFlash)
        whole = engine.generate(PROMPT, policy="off").wait()
        assert whole.finish_reason == "length"
        assert answer(engine, len(whole.tokens)) == whole.tokens
        assert ("model" in engine.decoder.totals.by_source) == (flaw != "no proposals")
    assert not caplog.records
