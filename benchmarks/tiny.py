"""Tiny random-weight GGUFs of several architectures: fixtures that llama.cpp loads and evaluates in milliseconds.

Their text means nothing, but it depends on the whole context and does not repeat one token. Control tokens and padding
are never generated, because their output rows are zero. Models are 64 wide with heads of 32, so that the cache can be
quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Array, Tensor, Vocabulary

WIDTH, HEADS, KV_HEADS, HEAD, FEED = 64, 2, 1, 32, 128
STATE, CONV, RANK, INNER = 16, 4, 4, 2 * WIDTH  # The sizes of mamba layers.
SLIDING_WINDOW = 32
EXPERTS, EXPERTS_USED = 4, 2
_LOGIT_SPREAD = 4.0  # The standard deviation of the logits in a trained model, with which near-ties are rare.


class Builder:
    """The tensors of one model. All values come from one seeded generator in the order of the calls."""

    def __init__(self, seed: int, quant: str) -> None:
        self._random = np.random.default_rng(seed)
        self._quant = gguf.GGMLQuantizationType[quant]
        self.tensors: list[Tensor] = []

    def matrix(self, name: str, out: int, into: int, gain: float = 1.0) -> None:
        """Add weights that multiply the spread of their input by `gain`."""
        self.quantized(name, self.normal((out, into), gain / np.sqrt(into)))

    def quantized(self, name: str, data: Array) -> None:
        raw = gguf.quants.quantize(data, self._quant)  # The last axis is the row, also for experts.
        self.tensors.append(Tensor(f"{name}.weight", data.shape, self._quant, lambda: raw))

    def plain(self, name: str, data: Array) -> None:
        """Add a float32 tensor with its full name."""
        data = data.astype(np.float32)
        self.tensors.append(Tensor(name, data.shape, gguf.GGMLQuantizationType.F32, lambda: data))

    def ones(self, *names: str, size: int = WIDTH) -> None:
        for name in names:
            self.plain(f"{name}.weight", np.ones(size))

    def normal(self, shape: tuple[int, ...], spread: float) -> Array:
        return (self._random.standard_normal(shape) * spread).astype(np.float32)

    def make_embeddings(self, vocabulary: Vocabulary) -> tuple[Array, Array]:
        """Make the embeddings and the output layer, float32 [n_vocab, WIDTH] each."""
        embeddings = self.normal((vocabulary.size, WIDTH), 1.0)
        output = self.normal((vocabulary.size, WIDTH), _LOGIT_SPREAD / np.sqrt(WIDTH))
        output[list(vocabulary.never)] = 0
        return embeddings, output

    def embeddings(self, vocabulary: Vocabulary, norm: str) -> None:
        embeddings, output = self.make_embeddings(vocabulary)
        self.quantized("token_embd", embeddings)
        self.quantized("output", output)
        self.ones(norm)

    def attention(self, block: str, *, bias: bool = False, norms: bool = False) -> None:
        for name, out in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            self.matrix(f"{block}.attn_{name}", out, WIDTH, 2.0)
            if bias:
                self.plain(f"{block}.attn_{name}.bias", self.normal((out,), 0.1))
        self.matrix(f"{block}.attn_output", WIDTH, HEADS * HEAD, 2.0)
        if norms:
            self.ones(f"{block}.attn_q_norm", f"{block}.attn_k_norm", size=HEAD)

    def feed_forward(self, block: str) -> None:
        self.matrix(f"{block}.ffn_gate", FEED, WIDTH)
        self.matrix(f"{block}.ffn_up", FEED, WIDTH)
        self.matrix(f"{block}.ffn_down", WIDTH, FEED)

    def experts(self, block: str) -> None:
        """Add a mixture of EXPERTS with biases, as in gpt-oss."""
        self.matrix(f"{block}.ffn_gate_inp", EXPERTS, WIDTH, 2.0)
        self.plain(f"{block}.ffn_gate_inp.bias", self.normal((EXPERTS,), 0.1))
        for name, out, into in (("gate", FEED, WIDTH), ("up", FEED, WIDTH), ("down", WIDTH, FEED)):
            self.quantized(f"{block}.ffn_{name}_exps", self.normal((EXPERTS, out, into), into**-0.5))
            self.plain(f"{block}.ffn_{name}_exps.bias", self.normal((EXPERTS, out), 0.1))

    def mamba(self, block: str) -> None:
        self.matrix(f"{block}.ssm_in", 2 * INNER, WIDTH)
        self.plain(f"{block}.ssm_conv1d.weight", self.normal((INNER, CONV), 0.5))
        self.plain(f"{block}.ssm_conv1d.bias", np.zeros(INNER))
        self.matrix(f"{block}.ssm_x", RANK + 2 * STATE, INNER)
        self.plain(f"{block}.ssm_dt.weight", self.normal((INNER, RANK), 0.5))
        self.plain(f"{block}.ssm_dt.bias", np.full(INNER, -2.0))
        self.plain(f"{block}.ssm_a", -np.tile(np.arange(1.0, STATE + 1), (INNER, 1)))
        self.plain(f"{block}.ssm_d", np.ones(INNER))
        self.matrix(f"{block}.ssm_out", WIDTH, INNER, 2.0)

    def short_convolution(self, block: str) -> None:
        self.matrix(f"{block}.shortconv.in_proj", 3 * WIDTH, WIDTH)
        self.plain(f"{block}.shortconv.conv.weight", self.normal((WIDTH, 3), 0.6))
        self.matrix(f"{block}.shortconv.out_proj", WIDTH, WIDTH, 2.0)


def _dense(builder: Builder, vocabulary: Vocabulary, n_layers: int, *, bias: bool = False) -> dict[str, Any]:
    builder.embeddings(vocabulary, "output_norm")
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        builder.attention(block, bias=bias)
        builder.feed_forward(block)
    return {"rope.dimension_count": HEAD, "rope.freq_base": 10000.0}


def _llama(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    return _dense(builder, vocabulary, n_layers)


def _qwen2(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    return _dense(builder, vocabulary, n_layers, bias=True)


def _qwen2vl(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    """Build a model whose positions have several parts (M-RoPE): time, height, width, and one that is not used."""
    keys = _dense(builder, vocabulary, n_layers, bias=True)
    return keys | {"rope.dimension_sections": [HEAD // 8, 3 * HEAD // 16, 3 * HEAD // 16, 0]}


def _gemma3(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    builder.embeddings(vocabulary, "output_norm")
    for block in (f"blk.{i}" for i in range(n_layers)):
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        builder.ones(*(f"{block}.{norm}" for norm in norms))
        builder.attention(block, norms=True)
        builder.feed_forward(block)
    return {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": SLIDING_WINDOW,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 10000.0,
    }


def _gpt_oss(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    """Build layers with experts and attention sinks, every second one with a sliding window."""
    builder.embeddings(vocabulary, "output_norm")
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_norm", f"{block}.post_attention_norm")
        builder.attention(block, bias=True)
        builder.plain(f"{block}.attn_output.bias", builder.normal((WIDTH,), 0.1))
        builder.plain(f"{block}.attn_sinks.weight", builder.normal((HEADS,), 1.0))
        builder.experts(block)
    return {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": SLIDING_WINDOW,
        "expert_count": EXPERTS,
        "expert_used_count": EXPERTS_USED,
        "expert_feed_forward_length": FEED,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
    }


def _mamba(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    builder.embeddings(vocabulary, "output_norm")
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_norm")
        builder.mamba(block)
    keys = {"conv_kernel": CONV, "inner_size": INNER, "state_size": STATE, "time_step_rank": RANK}
    heads = {"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}
    return {f"ssm.{key}": value for key, value in keys.items()} | heads


def _lfm2(builder: Builder, vocabulary: Vocabulary, n_layers: int) -> dict[str, Any]:
    """Build layers of which every second one has attention. The others are short convolutions without KV heads."""
    kv_heads = [KV_HEADS if i % 2 else 0 for i in range(n_layers)]
    builder.embeddings(vocabulary, "token_embd_norm")
    for i in range(n_layers):
        block = f"blk.{i}"
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        if kv_heads[i]:
            builder.attention(block, norms=True)
        else:
            builder.short_convolution(block)
        builder.feed_forward(block)
    return {"attention.head_count_kv": kv_heads, "shortconv.l_cache": 3, "rope.freq_base": 10000.0}


_ARCHITECTURES: dict[str, Callable[[Builder, Vocabulary, int], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "llama": _llama,
    "mamba": _mamba,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2vl,
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def tiny(
    arch: str,
    path: Path,
    *,
    n_layers: int = 4,
    n_ctx: int = 2048,
    seed: int = 1,
    quant: str = "F32",
    vocab: int | Path = 384,
    tensors_per_file: int = 0,
) -> Path:
    """Write a tiny model of `arch` (one of ARCHITECTURES) and return the path. It has about 1 MB and takes 20 ms.

    llama, qwen2 and qwen2vl (for images) are dense, gemma3 and gpt-oss (with experts) have a sliding window of 32 in
    every second layer, mamba is recurrent, lfm2 is hybrid. `quant`: F32, F16 or Q8_0 for the matrices. `vocab`: number
    of tokens with padding, or a GGUF whose vocabulary and chat template are copied. `seed`: of the weights.
    `tensors_per_file`: write several files and return the first.
    """
    builder = Builder(seed, quant)
    if isinstance(vocab, Path):
        vocabulary = gguf_file.copied_vocabulary(vocab)
    else:
        vocabulary = gguf_file.byte_vocabulary(vocab)
    keys = {
        "general.name": f"tiny {arch}",
        "block_count": n_layers,
        "context_length": n_ctx,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocabulary.size,
    }
    keys |= _ARCHITECTURES[arch](builder, vocabulary, n_layers)
    return gguf_file.write(path, arch, keys, vocabulary, builder.tensors, tensors_per_file)


def tiny_adapter(
    arch: str, path: Path, *, n_layers: int = 4, rank: int = 4, seed: int = 1, strength: float = 1.0, width: int = WIDTH
) -> Path:
    """Write a LoRA adapter for the attention of a `tiny` model and return the path. `strength`: size of its change.
    `width`: a width other than the model's gives an adapter that does not fit.
    """
    builder = Builder(seed, "F32")
    for block in (f"blk.{i}" for i in range(n_layers)):
        for name, out in (("attn_q", HEADS * HEAD), ("attn_v", KV_HEADS * HEAD)):
            builder.plain(f"{block}.{name}.weight.lora_a", builder.normal((rank, width), width**-0.5))
            builder.plain(f"{block}.{name}.weight.lora_b", builder.normal((out, rank), strength))
    keys = {
        "general.type": "adapter",
        "general.name": f"tiny {arch} adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    return gguf_file.write(path, arch, keys, None, builder.tensors)
