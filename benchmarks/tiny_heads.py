"""Tiny random models with MTP layers, MTP layers alone, and EAGLE-3 heads: fixtures that draft something that is right.

The text of these models depends on the last token more than on the others, and the heads know it: they pass the
embedding of the last token on to the output layer of the model. So a head drafts a part of the tokens rightly and the
rest wrongly, in milliseconds and without any training. All weights are those of `benchmarks.tiny` in size and kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Vocabulary
from benchmarks.tiny import CONV, FEED, HEAD, HEADS, KV_HEADS, WIDTH, Builder

Part = Literal["whole", "trunk", "layer"]
DELTA_HEADS = 2  # Each head of the gated delta net has HEAD numbers.
_DEPENDS = 0.35  # A layer adds so much to the embedding of the last token.
_SEED_OF_HEAD = 1000  # It is added to the seed of the model.


def _attention(builder: Builder, block: str, *, joined: bool = False, gated: bool = False) -> None:
    """Add attention, `joined` in one matrix, or `gated` by twice the queries and with norms."""
    sizes = {"q": (1 + gated) * HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    if joined:
        builder.matrix(f"{block}.attn_qkv", sum(sizes.values()), WIDTH, 2.0)
    else:
        for name, size in sizes.items():
            builder.matrix(f"{block}.attn_{name}", size, WIDTH, 2.0)
    builder.matrix(f"{block}.attn_output", WIDTH, HEADS * HEAD, _DEPENDS)
    if gated:
        builder.ones(f"{block}.attn_q_norm", f"{block}.attn_k_norm", size=HEAD)


def _feed_forward(builder: Builder, block: str) -> None:
    builder.matrix(f"{block}.ffn_gate", FEED, WIDTH)
    builder.matrix(f"{block}.ffn_up", FEED, WIDTH)
    builder.matrix(f"{block}.ffn_down", WIDTH, FEED, _DEPENDS)


def _delta_net(builder: Builder, block: str) -> None:
    size = DELTA_HEADS * HEAD
    builder.matrix(f"{block}.attn_qkv", 3 * size, WIDTH, 2.0)
    builder.matrix(f"{block}.attn_gate", size, WIDTH, 2.0)
    builder.plain(f"{block}.ssm_conv1d.weight", builder.normal((3 * size, CONV), 0.6))
    builder.plain(f"{block}.ssm_dt.bias", np.full(DELTA_HEADS, -2.0))
    builder.plain(f"{block}.ssm_a", -np.ones(DELTA_HEADS))
    builder.matrix(f"{block}.ssm_beta", DELTA_HEADS, WIDTH, 2.0)
    builder.matrix(f"{block}.ssm_alpha", DELTA_HEADS, WIDTH)
    builder.ones(f"{block}.ssm_norm", size=HEAD)
    builder.matrix(f"{block}.ssm_out", WIDTH, size, _DEPENDS)


def _mtp_layer(builder: Builder, arch: str, block: str) -> None:
    """Add a layer whose input is the embedding of the token, and a little of the hidden state."""
    knows = np.concatenate([np.eye(WIDTH), builder.normal((WIDTH, WIDTH), 0.1 / np.sqrt(WIDTH))], axis=1)
    builder.quantized(f"{block}.nextn.eh_proj", knows.astype(np.float32))
    builder.ones(f"{block}.nextn.enorm", f"{block}.nextn.hnorm", f"{block}.attn_norm")
    _attention(builder, block, joined=True, gated=arch == "qwen35")
    builder.ones(f"{block}.post_attention_norm" if arch == "qwen35" else f"{block}.ffn_norm")
    _feed_forward(builder, block)


def _mimo2(builder: Builder, n_layers: int) -> None:
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm")
        _attention(builder, block)
        _feed_forward(builder, block)


def _qwen35(builder: Builder, n_layers: int) -> None:
    for i in range(n_layers):
        block = f"blk.{i}"
        builder.ones(f"{block}.attn_norm", f"{block}.post_attention_norm")
        if i % 2:
            _attention(builder, block, gated=True)
        else:
            _delta_net(builder, block)
        _feed_forward(builder, block)


def _keys(arch: str, n_layers: int) -> dict[str, Any]:
    if arch == "mimo2":
        return {
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.sliding_window": 1 << 20,
            "attention.sliding_window_pattern": [True] * n_layers,
            "expert_feed_forward_length": FEED,
            "rope.dimension_count": HEAD,
            "rope.freq_base": 10000.0,
            "rope.freq_base_swa": 10000.0,
        }
    return {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "full_attention_interval": 2,
        "rope.dimension_count": HEAD,
        "rope.dimension_sections": [HEAD // 4, HEAD // 8, HEAD // 8, 0],
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": CONV,
        "ssm.group_count": DELTA_HEADS,
        "ssm.inner_size": DELTA_HEADS * HEAD,
        "ssm.state_size": HEAD,
        "ssm.time_step_rank": DELTA_HEADS,
    }


def _common(name: str, n_layers: int, n_ctx: int, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "general.name": name,
        "block_count": n_layers,
        "context_length": n_ctx,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocabulary.size,
    }


def tiny_mtp(
    arch: str,
    path: Path,
    *,
    part: Part = "whole",
    n_layers: int = 2,
    n_mtp: int = 1,
    n_ctx: int = 2048,
    seed: int = 1,
    quant: str = "F32",
    vocab: int = 384,
) -> Path:
    """Write a tiny model of `arch` with MTP layers and return the path: mimo2 has attention only, qwen35 is hybrid
    (every second layer is a gated delta net).

    `part`: the whole, the model without the MTP layers ("trunk"), or a file that holds these alone ("layer"). Parts of
    one seed fit each other. `n_mtp`: MTP layers; llama.cpp takes several of mimo2 only.
    """
    builder = Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(vocab)
    builder.embeddings(vocabulary, "output_norm")
    if part != "layer":
        {"mimo2": _mimo2, "qwen35": _qwen35}[arch](builder, n_layers)
    tensors = builder.tensors
    all_layers = n_layers + n_mtp * (part != "trunk")
    if part != "trunk":
        head = Builder(seed + _SEED_OF_HEAD, quant)
        for i in range(n_layers, all_layers):
            _mtp_layer(head, arch, f"blk.{i}")
        tensors += head.tensors
    keys = _common(f"tiny {arch} {part}", all_layers, n_ctx, vocabulary) | _keys(arch, all_layers)
    if part != "trunk":
        keys["nextn_predict_layers"] = n_mtp
    return gguf_file.write(path, arch, keys, vocabulary, tensors)


def tiny_eagle3(
    path: Path,
    *,
    layers: tuple[int, int, int] = (1, 2, 3),
    width: int = WIDTH,
    n_ctx: int = 2048,
    seed: int = 1,
    quant: str = "F32",
    vocab: int = 384,
    without: str = "",
) -> Path:
    """Write an EAGLE-3 head for a tiny model and return the path. It uses the model's embeddings and output layer.

    `layers`: of the model, whose inputs it reads. `width`: of the model. `without`: a tensor that is left out.
    """
    builder = Builder(seed + _SEED_OF_HEAD, quant)
    vocabulary = gguf_file.byte_vocabulary(vocab)
    block, one = "blk.0", np.eye(WIDTH, dtype=np.float32)
    builder.matrix("fc", WIDTH, 3 * width, 0.3)
    builder.ones("output_norm", f"{block}.attn_norm", f"{block}.attn_norm_2", f"{block}.ffn_norm")
    looks = builder.normal((WIDTH, 2 * WIDTH), 2.0 / np.sqrt(2 * WIDTH))  # A token attends to itself.
    builder.quantized(f"{block}.attn_q", looks)
    builder.quantized(f"{block}.attn_k", looks)
    builder.quantized(f"{block}.attn_v", np.concatenate([one, 0.0 * one], axis=1))
    builder.quantized(f"{block}.attn_output", 2.0 * one)
    _feed_forward(builder, block)
    keys = _common("tiny eagle3", 1, n_ctx, vocabulary) | {
        "attention.head_count_kv": HEADS,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "target_layers": list(layers),
        "target_hidden_size": width,
    }
    tensors = [tensor for tensor in builder.tensors if tensor.name != without]
    return gguf_file.write(path, "eagle3", keys, vocabulary, tensors)


def tiny_predictable(path: Path, **options: Any) -> Path:
    """Write a llama whose text depends on the last token as much as in the models above, for an EAGLE-3 head."""
    seed, quant = options.get("seed", 1), options.get("quant", "F32")
    n_layers, n_ctx = options.get("n_layers", 4), options.get("n_ctx", 2048)
    builder = Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(options.get("vocab", 384))
    builder.embeddings(vocabulary, "output_norm")
    _mimo2(builder, n_layers)
    keys = _common("tiny llama", n_layers, n_ctx, vocabulary)
    keys |= {"rope.dimension_count": HEAD, "rope.freq_base": 10000.0}
    return gguf_file.write(path, "llama", keys, vocabulary, builder.tensors)
