"""Players: GGUF files of real size that write one recorded answer in any runtime, token by token.

    python -m benchmarks player VOCABULARY.gguf OUT.gguf [--width 3072] [--layers 6] [--quant Q4_0]

A player has the gpt2 architecture. Its position embeddings are one-hot, its layers add nothing, and row v of its output
matrix is positive at the positions after which token v follows. So llama-server, llama-cpp-python and rest-local write
the same text, at the price of a model of that size. Layers cost what those of other models cost: their codes are random
and only the scales of their blocks are zero. `play` writes another answer into the file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Array, Tensor

_Type = gguf.GGMLQuantizationType
_BLOCK, _BYTES = 32, 34  # of Q8_0: a float16 scale and 32 codes
STRENGTH = 16.0  # logit of the answer's next token; all others are 0


def write(vocabulary: Path, path: Path, *, width: int = 3072, layers: int = 6, quant: str = "Q4_0") -> Path:
    """Write a player without an answer and return its path. Its context has `width` tokens, a multiple of 256.

    Parameters: layers x 12 x width^2, and the output matrix (vocabulary x width, Q8_0).
    """
    vocab = gguf_file.copied_vocabulary(vocabulary)
    kind, random = _Type[quant], np.random.default_rng(1)
    tensors: list[Tensor] = []

    def codes(rows: int, columns: int) -> Array:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.frombuffer(random.bytes(rows * columns // block * size), np.uint8).reshape(-1, size).copy()
        data[:, : 4 if quant == "Q4_K" else 2] = 0  # the scales
        made: Array = data.reshape(rows, -1)
        return made

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors.append(Tensor(f"{name}.weight", (rows, columns), kind, lambda: codes(rows, columns)))

    def plain(name: str, size: int, value: float = 0.0) -> None:
        tensors.append(Tensor(name, (size,), _Type.F32, lambda: np.full(size, value, np.float32)))

    def zeros(name: str, of: Any) -> None:
        block, size = gguf.GGML_QUANT_SIZES[of]
        make = lambda: np.zeros((vocab.size, width // block * size), np.uint8)  # noqa: E731
        tensors.append(Tensor(name, (vocab.size, width), of, make))

    zeros("token_embd.weight", _Type.Q4_0)
    one_hot = (width, width)
    tensors.append(Tensor("position_embd.weight", one_hot, _Type.F32, lambda: np.eye(width, dtype=np.float32)))
    plain("output_norm.weight", width, 1.0)
    plain("output_norm.bias", width)
    zeros("output.weight", _Type.Q8_0)
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            plain(f"blk.{i}.{norm}.weight", width, 1.0)
            plain(f"blk.{i}.{norm}.bias", width)
        shapes = {"attn_qkv": (3, 1), "attn_output": (1, 1), "ffn_up": (4, 1), "ffn_down": (1, 4)}
        for name, (out, into) in shapes.items():
            matrix(f"blk.{i}.{name}", out * width, into * width)
            plain(f"blk.{i}.{name}.bias", out * width)
    keys = {
        "general.name": f"player {layers}x{width} {quant}",
        "context_length": width,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "block_count": layers,
        "attention.head_count": width // 128,
        "attention.layer_norm_epsilon": 1e-5,
    }
    return gguf_file.write(path, "gpt2", keys, vocab, tensors)


def play(path: Path, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Make the player write `answer` after any prompt of len(prompt) tokens, then its end token. In place; the time of
    modification stays, so that what is known of the file's speed stays valid. Raises ValueError if both do not fit.
    """
    status = path.stat()
    reader = gguf.GGUFReader(path, "r+")
    rows = next(tensor.data for tensor in reader.tensors if tensor.name == "output.weight")
    positions = reader.fields["gpt2.context_length"].contents()
    if len(prompt) + len(answer) > positions:
        raise ValueError(f"{len(prompt)} + {len(answer)} tokens do not fit the player's {positions}")
    rows[np.asarray(rows).any(axis=1)] = 0
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    scale = np.float16(STRENGTH / np.sqrt(positions) / 127).tobytes()  # a one-hot row is sqrt(width) after the norm
    said = [end] * (len(prompt) - 1) + [int(token) for token in answer]
    for position, token in enumerate(said + [end] * (positions - len(said))):
        begin = position // _BLOCK * _BYTES
        rows[token, begin : begin + 2] = np.frombuffer(scale, np.uint8)
        rows[token, begin + 2 + position % _BLOCK] = 127
    rows.flush()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quant", choices=("Q4_0", "Q4_K", "Q8_0"), default="Q4_0")
    args = parser.parse_args()
    write(args.vocabulary, args.path, width=args.width, layers=args.layers, quant=args.quant)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")
