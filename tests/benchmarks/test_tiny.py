"""The tiny fixtures load, give finite logits that depend on the context, and do not repeat one token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tiny import ARCHITECTURES
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]


def _greedy(model: Model, prompt: str, count: int) -> tuple[list[int], np.ndarray]:
    """Tokens, and the logits after the prompt."""
    tokens, first = model.vocabulary.tokenize(prompt), None
    with Context(model, ContextSettings(n_ctx=256, threads=1, n_branches=1)) as context:
        output: list[int] = []
        position = 0
        while len(output) < count:
            last = np.arange(len(tokens)) == len(tokens) - 1
            context.batch.fill(tokens, np.arange(position, position + len(tokens)), 0, 1, last)
            assert context.decode() == 0
            position += len(tokens)
            row = context.logits(1)[0].copy()
            first = row if first is None else first
            output.append(int(row.argmax()))
            tokens = np.array(output[-1:], np.int32)
    assert first is not None
    return output, first


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_logits_are_finite_peaked_and_depend_on_the_context(tiny_model: TinyModel, arch: str, quant: str) -> None:
    with Model.open(tiny_model(arch, quant=quant)) as model:
        output, logits = _greedy(model, "def f(self):\n    return", 80)  # past the sliding window of 32
        _, others = _greedy(model, "import f(self):\n    return", 1)
        assert np.isfinite(logits).all()
        assert 2 < logits.std() < 6
        assert np.abs(logits - others).max() > 0.01
        assert len(set(output)) >= 10
        assert not any(model.vocabulary.is_control(token) for token in output)
