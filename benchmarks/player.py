"""Players: GGUF files of real size that write recorded answers in any runtime, token by token.

A player has the gpt2 architecture. Its position embeddings are one-hot, its layers add nothing, and row v of its output
matrix is positive at the positions after which token v may follow. So llama-server, llama-cpp-python and rest-local
write the same text, at the price of a model of that size. Layers cost what those of other models cost: their codes are
random and only the scales of their blocks are zero. `play` writes other answers into the file.

At each place three other tokens of the text have logits below that of the answer's token, and `gaps` says how far, so
that entropies differ as those of models do.

python -m benchmarks player VOCABULARY.gguf OUT.gguf [--size 0.5B] [--quant Q4_0]
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Array, Tensor, copied_vocabulary
from rest_local.llama.gguf import read_gguf

_Type = gguf.GGMLQuantizationType
_BLOCK, _BYTES = 32, 34  # A block of Q8_0 has a float16 scale and 32 codes.
_CODE = 0.2  # Logits a code of the output matrix. The answer's token has 127 codes, and unnamed tokens have 0.
_EPSILON = 1e-5
SIZES = {"0.5B": (1536, 10), "1B": (2048, 14), "3B": (3072, 22)}  # The width, which is also the context, and layers.
QUANTS = ("Q4_0", "Q4_K", "Q8_0")
PromptAndAnswer = tuple[Sequence[int], Sequence[int]]


def write(vocabulary: Path, path: Path, *, width: int, layers: int, quant: str = "Q4_0") -> Path:
    """Write a player without an answer and return its path. Its context has `width` tokens, a multiple of 256.

    Parameters: layers x 12 x width^2, and the output matrix (vocabulary x width, Q8_0).
    """
    vocab = copied_vocabulary(vocabulary)
    kind, random = _Type[quant], np.random.default_rng(1)
    tensors: list[Tensor] = []

    def codes(rows: int, columns: int) -> Array:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.frombuffer(random.bytes(rows * columns // block * size), np.uint8).reshape(-1, size).copy()
        data[:, : 4 if quant == "Q4_K" else 2] = 0  # These are the scales.
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
    plain("output_norm.bias", width, _normed(width)[1])  # Then the other positions count as 0.
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            plain(f"blk.{i}.{norm}.weight", width, 1.0)
            plain(f"blk.{i}.{norm}.bias", width)
        shapes = {"attn_qkv": (3, 1), "attn_output": (1, 1), "ffn_up": (4, 1), "ffn_down": (1, 4)}
        for name, (out, into) in shapes.items():
            matrix(f"blk.{i}.{name}", out * width, into * width)
            plain(f"blk.{i}.{name}.bias", out * width)
    zeros("output.weight", _Type.Q8_0)  # the last, so that `play` finds it by its size
    keys = {
        "general.name": f"player {layers}x{width} {quant}",
        "context_length": width,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "block_count": layers,
        "attention.head_count": width // 128,
        "attention.layer_norm_epsilon": _EPSILON,
    }
    return gguf_file.write(path, "gpt2", keys, vocab, tensors)


def _normed(width: int) -> tuple[float, float]:
    """Return how far the hot value of a one-hot row exceeds the others after the norm, and their distance from 0."""
    spread = math.sqrt((1 - 1 / width) / width + _EPSILON)
    return 1 / spread, 1 / width / spread


def gaps(prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Return how far the logit of each token of the answer is above the next one, which depends on the text alone.

    It is at least 0.4, and more by an exponential distribution with mean 1.6, or 5 if the same token followed the same
    two tokens before.
    """
    text, seen, found = [*prompt, *answer], set[tuple[int, ...]](), []
    for at in range(2, len(text)):
        three = tuple(text[at - 2 : at + 1])
        if at >= len(prompt):
            chance = (zlib.crc32(repr(three).encode()) + 1) / 2**32
            found.append(0.4 - math.log(chance) * (5.0 if three in seen else 1.6))
        seen.add(three)
    return found


def play(path: Path, *texts: PromptAndAnswer) -> None:
    """Make the player write these answers: each after any prompt of as many tokens as the one it stands with, then its
    end token. A prompt has to be at least as long as the text before it. In place; the time of modification stays, so
    that what is known of the file's speed stays valid. Raises ValueError if the texts do not fit.
    """
    status, header = path.stat(), read_gguf(path)
    positions, vocabulary = header.number("gpt2.context_length"), header.counts["tokenizer.ggml.tokens"]
    end, free = header.number("tokenizer.ggml.eos_token_id"), 2
    shape = (vocabulary, positions // _BLOCK * _BYTES)
    said = [{end: 127} for _ in range(positions)]
    for prompt, answer in texts:
        if not free <= len(prompt) <= positions - len(answer):
            room = f"its context of {positions} tokens" + (f" after the first {free}" if free > 2 else "")
            raise ValueError(f"player: {len(prompt)} + {len(answer)} tokens do not fit {room}")
        free, text = len(prompt) + len(answer), [*prompt, *answer]
        for at, (token, gap) in enumerate(zip(answer, gaps(prompt, answer), strict=True)):
            row = said[len(prompt) + at - 1]
            row.clear()
            for rank in range(3):
                other = text[(at * 7919 + rank * 104_729 + token) % len(text)]
                row[other] = max(127 - round((gap + rank) / _CODE), 1)
            row[token] = 127
    rows = np.memmap(path, np.uint8, "r+", status.st_size + -math.prod(shape) // 32 * 32, shape)
    rows[rows.any(axis=1)] = 0
    scale = np.frombuffer(np.float16(_CODE / _normed(positions)[0]).tobytes(), np.uint8)
    for position, row in enumerate(said):
        begin = position // _BLOCK * _BYTES
        for token, code in row.items():
            rows[token, begin : begin + 2] = scale
            rows[token, begin + 2 + position % _BLOCK] = code
    rows.flush()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--quant", choices=QUANTS, default="Q4_0")
    args = parser.parse_args()
    width, layers = SIZES[args.size]
    write(args.vocabulary, args.path, width=width, layers=layers, quant=args.quant)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")
