"""Synthetic models for timing: random weights in the shape of real models. Their text means nothing.

    python -m benchmarks synthetic 0.5B Q4_0 OUT.gguf [--vocab GGUF] [--layers N] [--seed N]

The time of a decode depends only on shapes and quantization, not on the values of the weights, so a synthetic model has
the times of the real one. Blocks are random bits with scales that keep activations finite and at their usual size.
Nothing is quantized, so a file is written at the speed of the random generator (about 1 GB/s), with one tensor in
memory at a time.

In a mixture of experts the router is random too, so that each token chooses its own experts. Real tokens of one text
choose alike more often: the curve of a synthetic mixture is the dearest that its shape can have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Array, Tensor, Vocabulary

Kind = Any  # A gguf.GGMLQuantizationType.
_Type = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """The shape of a qwen2 model, or of a qwen3moe model if it has experts."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed: int
    vocab: int
    tied: bool
    experts: int = 0  # Each token uses `used` of them, and `feed` is the width of one.
    used: int = 0
    head_width: int = 0  # 0 means width / heads.

    @property
    def head(self) -> int:
        """Return the width of a head."""
        return self.head_width or self.width // self.heads


# Qwen2.5 and Qwen3-30B-A3B, from the config.json of each size.
SHAPES = {
    "0.5B": Shape(24, 896, 14, 2, 4864, 151936, tied=True),
    "1.5B": Shape(28, 1536, 12, 2, 8960, 151936, tied=True),
    "7B": Shape(28, 3584, 28, 4, 18944, 152064, tied=False),
    "30B-A3B": Shape(48, 2048, 32, 4, 768, 151936, tied=False, experts=128, used=8, head_width=128),
}
QUANTS = ("Q4_0", "Q8_0", "Q4_K")


class _Blocks:
    """A generator of random quantized blocks of a given spread, laid out as in llama.cpp's `ggml/src/ggml-common.h`."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def make(self, kind: Kind, shape: tuple[int, int], spread: float) -> Array:
        """Return weights with mean 0 (within half a step) and deviation `spread`, uint8 [rows, bytes of a row]."""
        rows, columns = shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = rows * columns // block
        data = np.frombuffer(self._random.bytes(count * size), np.uint8).reshape(count, size).copy()
        {_Type.Q8_0: _q8_0, _Type.Q4_0: _q4_0, _Type.Q5_0: _q5_0, _Type.Q4_K: _q4_k, _Type.Q6_K: _q6_k}[kind](
            data, spread
        )
        result: Array = data.reshape(rows, -1)
        return result

    def normal(self, shape: tuple[int, int]) -> Array:
        """Return normally distributed float32 weights of this shape (out, in), with standard deviation in ** -0.5."""
        made: Array = self._random.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        return made


def _half(value: float) -> Array:
    return np.array([value], "<f2").view(np.uint8)


# Each function writes the scales of all blocks, so that uniformly random codes get the wanted spread. The spread of
# uniform codes over n values is n / sqrt(12).


def _q8_0(data: Array, spread: float) -> None:
    data[:, 0:2] = _half(spread / (256 / 12**0.5))


def _q4_0(data: Array, spread: float) -> None:
    data[:, 0:2] = _half(spread / (16 / 12**0.5))


def _q5_0(data: Array, spread: float) -> None:
    data[:, 0:2] = _half(spread / (32 / 12**0.5))


def _q4_k(data: Array, spread: float) -> None:
    """Write the scales: a weight is d * 32 * code - dmin * 32, and dmin = 7.5 d centres it."""
    d = spread / (32 * 16 / 12**0.5)
    data[:, 0:2], data[:, 2:4] = _half(d), _half(7.5 * d)
    data[:, 4:12], data[:, 12:16] = 0xA0, 0x00


def _q6_k(data: Array, spread: float) -> None:
    """Write the scales. A weight is d * 16 * (code - 32) if all sixteen 8-bit scales are 16."""
    data[:, 192:208], data[:, 208:210] = 16, _half(spread / (16 * 64 / 12**0.5))


def kinds(quant: str, shape: Shape) -> dict[str, Kind]:
    """Return the types of the matrices ("matrix"), of those that read a hidden layer ("down") and of the output
    ("output").

    They are those that llama-quantize chooses: if a row is not a multiple of 256, K types fall back to Q5_0 and Q8_0.
    Raises ValueError for an unknown quantization.
    """
    if quant not in QUANTS:
        raise ValueError(f"quantization {quant}: one of {', '.join(QUANTS)}")
    matrix = {"Q4_0": _Type.Q4_0, "Q8_0": _Type.Q8_0, "Q4_K": _Type.Q4_K if shape.width % 256 == 0 else _Type.Q5_0}[
        quant
    ]
    down = {"Q4_0": _Type.Q4_0, "Q8_0": _Type.Q8_0, "Q4_K": _Type.Q4_K}[quant]
    output = _Type.Q8_0 if quant == "Q8_0" or shape.width % 256 else _Type.Q6_K
    return {"matrix": matrix, "down": down, "output": output}


def synthetic(
    shape: str | Shape,
    quant: str,
    path: Path,
    *,
    vocab: Path | None = None,
    n_ctx: int = 32768,
    seed: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a synthetic qwen2 model and return the path.

    `shape`: a key of SHAPES, or a Shape. `quant`: one of QUANTS. `vocab`: a GGUF whose vocabulary is copied and padded
    to the shape's size; by default the padded byte vocabulary of the fixtures. Raises ValueError for unknown names.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"shape {shape}: one of {', '.join(SHAPES)}")
        label, shape = shape, SHAPES[shape]
    else:
        label = f"{shape.layers}x{shape.width}"
    vocabulary = gguf_file.copied_vocabulary(vocab, shape.vocab) if vocab else gguf_file.byte_vocabulary(shape.vocab)
    keys = {
        "general.name": f"synthetic {label} {quant} (random weights)",
        "block_count": shape.layers,
        "context_length": n_ctx,
        "embedding_length": shape.width,
        "feed_forward_length": shape.feed,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
    }
    if shape.experts:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.used,
            "expert_feed_forward_length": shape.feed,
            "attention.key_length": shape.head,
            "attention.value_length": shape.head,
        }
    tensors = _tensors(shape, quant, vocabulary, _Blocks(seed), progress or (lambda name: None))
    gguf_file.write(path, "qwen3moe" if shape.experts else "qwen2", keys, vocabulary, tensors)
    return path


def _tensors(
    shape: Shape, quant: str, vocabulary: Vocabulary, blocks: _Blocks, progress: Callable[[str], None]
) -> list[Tensor]:
    kind, tensors = kinds(quant, shape), list[Tensor]()

    def matrix(
        name: str, out: int, into: int, of: str = "matrix", spread: float | None = None, experts: int = 0
    ) -> None:
        rows = (experts, out) if experts else (out,)

        def make() -> Array:
            progress(name)
            made = blocks.make(kind[of], (out * max(1, experts), into), spread or into**-0.5)
            return made.reshape(*rows, -1)

        tensors.append(Tensor(f"{name}.weight", (*rows, into), kind[of], make))

    def plain(name: str, value: float, size: int) -> None:
        tensors.append(Tensor(name, (size,), _Type.F32, lambda: np.full(size, value, np.float32)))

    # A tied matrix is embedding and output: rows of norm 4 give logits of a usual spread, and the first norm rescales
    # the embedding.
    matrix("token_embd", vocabulary.size, shape.width, "output" if shape.tied else "matrix", 4 * shape.width**-0.5)
    if not shape.tied:
        matrix("output", vocabulary.size, shape.width, "output", 4 * shape.width**-0.5)
    plain("output_norm.weight", 1.0, shape.width)
    for i in range(shape.layers):
        block, q_width, kv_width = f"blk.{i}", shape.heads * shape.head, shape.kv_heads * shape.head
        plain(f"{block}.attn_norm.weight", 1.0, shape.width)
        plain(f"{block}.ffn_norm.weight", 1.0, shape.width)
        for name, out in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            matrix(f"{block}.attn_{name}", out, shape.width)
            if not shape.experts:
                plain(f"{block}.attn_{name}.bias", 0.0, out)
            elif name != "v":
                plain(f"{block}.attn_{name}_norm.weight", 1.0, shape.head)
        matrix(f"{block}.attn_output", shape.width, q_width)
        experts = "_exps" if shape.experts else ""
        if shape.experts:
            router = (shape.experts, shape.width)
            tensors.append(Tensor(f"{block}.ffn_gate_inp.weight", router, _Type.F32, partial(blocks.normal, router)))
        matrix(f"{block}.ffn_gate{experts}", shape.feed, shape.width, experts=shape.experts)
        matrix(f"{block}.ffn_up{experts}", shape.feed, shape.width, experts=shape.experts)
        matrix(f"{block}.ffn_down{experts}", shape.width, shape.feed, "down", experts=shape.experts)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("quant", choices=QUANTS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--vocab", type=Path, help="a GGUF whose vocabulary is copied; default: bytes and padding")
    parser.add_argument("--layers", type=int, help="of the model; default: as many as the real one has")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = replace(SHAPES[args.shape], layers=args.layers) if args.layers else args.shape
    synthetic(shape, args.quant, args.path, vocab=args.vocab, seed=args.seed)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")
