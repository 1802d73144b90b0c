"""`EngineConfig`: what cannot be is refused before anything is opened; names are those of `Engine.load`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine
from rest_local.catalog.describe import header_of
from rest_local.decoding import opening
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.verify import Relaxed
from rest_local.errors import OptionError
from rest_local.llama.gguf import read_gguf
from rest_local.llama.options import LARGEST_DEFAULT, ModelOptions


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"},
        {"n_ctx": 0},
        {"n_ctx": 7},
        {"n_ctx": "all"},
        {"threads": 0},
        {"n_gpu_layers": -2},
        {"draft_gpu_layers": -2},
        {"slots": 0},
        {"slots": 1.5},
        {"cells": 0},
        {"datastores": "code"},
        {"datastores": Path("code")},
        {"verify": "relaxed:3,0.3"},
        {"verify": Relaxed(), "exact": True},
    ],
)
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EngineConfig(**wrong)
    with pytest.raises(OptionError):
        Engine.load("/nowhere/model.gguf", **wrong)


@pytest.mark.parametrize(
    ("n_ctx", "trained", "expected"),
    [
        (None, 2048, 2048),
        (None, 1 << 17, LARGEST_DEFAULT),
        (None, 0, LARGEST_DEFAULT),
        ("trained", 1 << 17, 1 << 17),
        ("trained", 0, LARGEST_DEFAULT),
        (512, 2048, 512),
        (3000, 2048, 3000),
    ],
)
def test_the_length_of_the_context(n_ctx: Any, trained: int, expected: int) -> None:
    assert EngineConfig(n_ctx=n_ctx).context_length(trained) == expected


@pytest.mark.parametrize(
    ("free", "asked", "kept"), [(1 << 40, None, 16), (1 << 40, 3, 3), (0, 3, 3), (0, 0, 0), (0, None, 0), (9, None, 8)]
)
def test_snapshots_of_a_recurrent_state_are_those_that_fit(
    free: int, asked: int | None, kept: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free`: bytes, or so many states where few fit next to the model."""
    config = EngineConfig(model=tiny_model("lfm2"), slots=2, n_ctx=64, options=ModelOptions(rollback=asked))
    monkeypatch.setattr(opening, "free_memory", lambda config: 1 << 40)
    state = 2 * opening.snapshots_for(config, tiny_model("lfm2")).size
    header = header_of(read_gguf(tiny_model("lfm2")), tiny_model("lfm2"))
    rest = tiny_model("lfm2").stat().st_size + 2 * 64 * header.kv_bytes + opening.BUFFERS
    monkeypatch.setattr(opening, "free_memory", lambda config: free * state + rest if free == 9 else free)
    with Engine(config) as engine:
        assert engine.settings["n_rs_seq"] == kept
        assert engine.context.backend.n_rs_seq == kept
        told = [warning for warning in engine.warnings if "snapshots" in warning]
    assert len(told) == (asked is None and kept < 16)
