"""Blocks of synthetic models have the requested spread; their files load and give finite logits."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.synthetic import QUANTS, Shape, _Blocks, synthetic
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

SMALL = Shape(layers=2, width=256, heads=4, kv_heads=2, feed=512, vocab=512, tied=True)
MIXTURE = Shape(2, 256, 4, 2, 256, 512, tied=False, experts=8, used=2, head_width=128)
_Type = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [_Type.Q8_0, _Type.Q4_0, _Type.Q5_0, _Type.Q4_K, _Type.Q6_K])
def test_random_blocks_dequantize_to_the_requested_spread(kind: gguf.GGMLQuantizationType) -> None:
    """The oracle is the dequantization of the gguf package."""
    weights = gguf.quants.dequantize(_Blocks(1).make(kind, (64, 1024), 0.05), kind)
    assert weights.shape == (64, 1024)
    assert abs(weights.std() - 0.05) < 0.001
    assert abs(weights.mean()) < 0.006  # half a step of Q4_0, whose codes go from -8 to 7


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "shape", [SMALL, Shape(2, 64 * 6, 6, 2, 512, 512, tied=False), MIXTURE], ids=["tied", "untied", "mixture"]
)
def test_a_synthetic_model_loads_and_its_logits_are_finite(tmp_path: Path, quant: str, shape: Shape) -> None:
    with (
        Model.open(synthetic(shape, quant, tmp_path / "m.gguf", n_ctx=128)) as model,
        Context(model, ContextSettings(n_ctx=64, threads=1, n_branches=1)) as context,
    ):
        tokens = model.vocabulary.tokenize("def f(self): return self")
        context.batch.fill(tokens, np.arange(len(tokens)), 0, 1, np.ones(len(tokens)))
        assert context.decode() == 0
        logits = context.logits(len(tokens))
        assert np.isfinite(logits).all()
        assert 1 < logits.std() < 10
        assert "synthetic" in model.name
        assert model.n_vocab == shape.vocab
