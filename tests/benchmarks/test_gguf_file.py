"""A deepened model generates the tokens of the original, and a thinned model has the chosen layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gguf_file import deepened
from rest_local import Engine
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.paths import demo_model

PROMPT = "import os\n\n\ndef read(path):\n"


def generated(model: Path) -> list[int]:
    fixed = ModelOptions(flash_attention="off")  # timing would choose it otherwise, and with it the last bits
    with Engine.load(model, n_ctx=256, threads=1, policy="off", options=fixed) as engine:
        stream = engine.generate(PROMPT, max_tokens=30)
        for _ in stream:
            pass
        return stream.result.tokens


@pytest.mark.parametrize("quant", [None, "Q4_0"])
def test_added_layers_change_nothing(quant: str | None, tmp_path: Path) -> None:
    deep = deepened(demo_model(), tmp_path / "deep.gguf", 7, quant)
    with Model.open(deep) as model:
        assert model.n_layer == 7
    assert generated(deep) == generated(demo_model())
