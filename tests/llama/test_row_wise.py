"""Steps are computed row by row and long prompts in tiles, where the CPU code of llama.cpp can switch between them."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rest_local.llama import row_wise
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.row_wise import TILE, UNTILED

TEXT = np.random.default_rng(0).integers(40, 200, 700)
PROMPT = 600  # A single row would be split over the threads from 512 cells on.

pytestmark = pytest.mark.skipif(not row_wise.available(), reason="this build of llama.cpp cannot switch the shortcuts")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Model:
    return Model.open(tiny_model("llama", quant="Q8_0"))


def open_context(model: Model, k: str, v: str) -> Context:
    settings = ContextSettings(
        n_ctx=1024, n_batch=1024, n_branches=1, threads=2, flash_attention=True, cache_type_k=k, cache_type_v=v
    )
    return Context(model, settings)


def evaluate(context: Context, begin: int, end: int, n: int, output: int) -> list[np.ndarray]:
    """Evaluate a part of TEXT in passes of `n` tokens. Return the rows of logits."""
    rows: list[np.ndarray] = []
    for first in range(begin, end, n):
        last = min(first + n, end)
        context.batch.fill(TEXT[first:last], np.arange(first, last), 0, 1, output)
        assert context.decode() == 0
        if output:
            rows += list(context.logits(last - first).copy())
    return rows


@pytest.mark.parametrize(("k", "v"), [("f16", "f16"), ("f32", "f32"), ("bf16", "f16")])
@pytest.mark.parametrize("part", [100, PROMPT])
def test_a_row_of_a_draft_has_the_bits_of_a_plain_step(model: Model, k: str, v: str, part: int) -> None:
    with open_context(model, k, v) as context:
        evaluate(context, 0, PROMPT, part, 0)
        plain = evaluate(context, PROMPT, PROMPT + 64, 1, 1)
        for n in (2, 15, 64):
            assert context.remove(0, PROMPT)
            for one, other in zip(plain, evaluate(context, PROMPT, PROMPT + n, n, 1), strict=False):
                assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize(("k", "v", "tiles"), [("f16", "f16", True), ("bf16", "f16", False)])
def test_a_part_of_a_long_prompt_is_computed_in_tiles(model: Model, k: str, v: str, tiles: bool) -> None:
    def after(part: int, later_part: int) -> np.ndarray:
        with open_context(model, k, v) as context:
            evaluate(context, 0, UNTILED, part, 0)
            evaluate(context, UNTILED, PROMPT, later_part, 0)
            return evaluate(context, PROMPT, PROMPT + 1, 1, 1)[0]

    row_by_row = after(TILE - 1, TILE - 1)
    assert np.array_equal(row_by_row, after(UNTILED, 50)), "short texts and parts are independent of their number"
    assert np.array_equal(row_by_row, after(UNTILED, TILE)) != tiles


def test_only_memory_that_may_be_written_is_written() -> None:
    writable, fixed = ctypes.create_string_buffer(1), ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
    assert row_wise.is_writable(ctypes.addressof(writable))
    assert not row_wise.is_writable(fixed or 0), "code"
    assert not row_wise.is_writable(0)
