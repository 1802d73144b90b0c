"""Tiny random BERTs for embeddings, and the same forward pass in numpy, to compare with.

The vocabulary is WordPiece's: letters, digits, a few words and the marks [CLS] and [SEP].
"""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks import gguf_file
from benchmarks.gguf_file import Tensor, Vocabulary

Array = NDArray[np.float32]
WIDTH, HEADS, FEED, LAYERS, EPSILON = 32, 2, 64, 2, 1e-12
CLS_POOLING, MEAN_POOLING = 2, 1
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
WORDS = ("the", "cat", "dog", "sat", "on", "mat", "is", "a", "of", "and", "what")


def words() -> Vocabulary:
    """Return lower-case words. A piece inside a word has no mark in front, as llama.cpp stores them."""
    letters = string.ascii_lowercase + string.digits
    tokens = [*MARKS, *(f"\u2581{word}" for word in WORDS), *(f"\u2581{each}" for each in letters if each != "a")]
    tokens += [*letters, *(f"\u2581{each}" for each in ".,?!")]
    kinds = [gguf.TokenType.CONTROL] * len(MARKS) + [gguf.TokenType.NORMAL] * (len(tokens) - len(MARKS))
    keys = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.bos_token_id": CLS,
        "tokenizer.ggml.cls_token_id": CLS,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    return Vocabulary(len(tokens), keys)


@dataclass
class Encoder:
    """A model on the disk and its weights. `pooling`: enum llama_pooling_type."""

    path: Path
    weights: dict[str, Array]
    pooling: int

    def hidden(self, tokens: list[int]) -> Array:
        """Return the vectors of all tokens, [n, WIDTH]."""
        w = self.weights
        x = w["token_embd.weight"][tokens] + w["token_types.weight"][0] + w["position_embd.weight"][: len(tokens)]
        x = self._norm(x, "token_embd_norm")
        for block in (f"blk.{i}" for i in range(LAYERS)):
            q, k, v = (self._split(self._linear(x, f"{block}.attn_{name}")) for name in "qkv")
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (shares / shares.sum(-1, keepdims=True)) @ v
            joined = mixed.transpose(1, 0, 2).reshape(len(tokens), WIDTH)
            x = self._norm(x + self._linear(joined, f"{block}.attn_output"), f"{block}.attn_output_norm")
            inner = self._linear(x, f"{block}.ffn_up")
            gelu = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
            x = self._norm(x + self._linear(gelu, f"{block}.ffn_down"), f"{block}.layer_output_norm")
        return x

    def pooled(self, tokens: list[int]) -> Array:
        """Return the vector of a text, of length 1."""
        hidden = self.hidden(tokens)
        found = hidden.mean(0) if self.pooling == MEAN_POOLING else hidden[0]
        return np.asarray(found / np.linalg.norm(found), np.float32)

    def _linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"], np.float32)

    def _norm(self, x: Array, name: str) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
        return np.asarray(scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"], np.float32)

    @staticmethod
    def _split(x: Array) -> Array:
        return x.reshape(len(x), HEADS, WIDTH // HEADS).transpose(1, 0, 2)


def encoder(path: Path, pooling: int, *, n_ctx: int = 64, seed: int = 1) -> Encoder:
    """Write a tiny BERT whose vectors become one as `pooling` says."""
    random = np.random.default_rng(seed)
    vocabulary = words()
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary.size, WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (n_ctx, WIDTH),
    }
    norms = ["token_embd_norm"]
    linear = {}
    for block in (f"blk.{i}" for i in range(LAYERS)):
        linear |= {f"{block}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        linear |= {f"{block}.ffn_up": (FEED, WIDTH), f"{block}.ffn_down": (WIDTH, FEED)}
        norms += [f"{block}.attn_output_norm", f"{block}.layer_output_norm"]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights = {name: (random.standard_normal(shape) * 0.6).astype(np.float32) for name, shape in shapes.items()}
    for name in norms:
        weights[f"{name}.weight"] = (1 + 0.1 * random.standard_normal(WIDTH)).astype(np.float32)
        weights[f"{name}.bias"] = (0.1 * random.standard_normal(WIDTH)).astype(np.float32)
    keys: dict[str, Any] = {
        "general.name": "tiny bert", "block_count": LAYERS, "context_length": n_ctx, "embedding_length": WIDTH,
        "feed_forward_length": FEED, "attention.head_count": HEADS, "attention.layer_norm_epsilon": EPSILON,
        "attention.causal": False, "pooling_type": pooling,
    }  # fmt: skip
    f32 = gguf.GGMLQuantizationType.F32
    tensors = [Tensor(name, data.shape, f32, lambda data=data: data) for name, data in weights.items()]
    return Encoder(gguf_file.write(path, "bert", keys, vocabulary, tensors), weights, pooling)
