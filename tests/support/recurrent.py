"""Tiny random models with recurrent state, one for each kind of layer that llama.cpp has for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gguf_file
from benchmarks.tiny import CONV, FEED, HEAD, HEADS, INNER, KV_HEADS, RANK, STATE, WIDTH, Builder, tiny
from benchmarks.tiny_heads import tiny_mtp

N_LAYERS, SSM_HEADS = 4, 4
MIXED = [0, KV_HEADS] * 2  # key heads of each layer: every second one has attention


def _mamba2(builder: Builder, block: str) -> None:
    width = INNER + 2 * STATE
    builder.matrix(f"{block}.ssm_in", INNER + width + SSM_HEADS, WIDTH)
    builder.plain(f"{block}.ssm_conv1d.weight", builder.normal((width, CONV), 0.5))
    builder.plain(f"{block}.ssm_conv1d.bias", np.zeros(width))
    builder.plain(f"{block}.ssm_dt.bias", np.full(SSM_HEADS, -2.0))
    builder.plain(f"{block}.ssm_a", -np.arange(1.0, SSM_HEADS + 1)[:, None])
    builder.plain(f"{block}.ssm_d", np.ones((SSM_HEADS, 1)))
    builder.plain(f"{block}.ssm_norm.weight", np.ones((1, INNER)))
    builder.matrix(f"{block}.ssm_out", WIDTH, INNER, 2.0)


def _of_mamba2(builder: Builder) -> dict[str, Any]:
    for i in range(N_LAYERS):
        _mamba2(builder, f"blk.{i}")
    return {"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}


def _of_granite(builder: Builder) -> dict[str, Any]:
    for i, kv_heads in enumerate(MIXED):
        block = f"blk.{i}"
        (builder.attention if kv_heads else lambda name: _mamba2(builder, name))(block)
        builder.ones(f"{block}.ffn_norm")
        builder.feed_forward(block)
    return {"attention.head_count_kv": MIXED, "rope.dimension_count": HEAD}


def _of_falcon(builder: Builder) -> dict[str, Any]:
    """Attention and recurrent state in every layer."""
    for i in range(N_LAYERS):
        block = f"blk.{i}"
        _mamba2(builder, block)
        builder.attention(block)
        builder.plain(f"{block}.ffn_norm", np.ones(WIDTH))
        builder.feed_forward(block)
    return {"rope.dimension_count": HEAD, "attention.key_length": HEAD, "attention.value_length": HEAD}


def _of_jamba(builder: Builder) -> dict[str, Any]:
    for i, kv_heads in enumerate(MIXED):
        block = f"blk.{i}"
        if kv_heads:
            builder.attention(block)
        else:
            builder.mamba(block)
            builder.ones(f"{block}.ssm_dt_norm", size=RANK)
            builder.ones(f"{block}.ssm_b_norm", f"{block}.ssm_c_norm", size=STATE)
        builder.ones(f"{block}.ffn_norm")
        builder.feed_forward(block)
    return {"attention.head_count_kv": MIXED, "ssm.time_step_rank": RANK}


def _of_nemotron(builder: Builder) -> dict[str, Any]:
    """Each layer has one of recurrent state, attention, and a feed-forward part."""
    heads, feeds = [0, KV_HEADS, 0, 0], [0, 0, 0, FEED]
    for i, (kv_heads, feed) in enumerate(zip(heads, feeds, strict=True)):
        block = f"blk.{i}"
        if kv_heads:
            builder.attention(block)
        elif feed:
            builder.matrix(f"{block}.ffn_up", FEED, WIDTH)
            builder.matrix(f"{block}.ffn_down", WIDTH, FEED)
        else:
            _mamba2(builder, block)
    more = {"attention.layer_norm_epsilon": 1e-5, "attention.key_length": HEAD, "attention.value_length": HEAD}
    return {"attention.head_count_kv": heads, "feed_forward_length": feeds, "rope.dimension_count": HEAD, **more}


_OF = {
    "mamba2": _of_mamba2, "granitehybrid": _of_granite, "falcon-h1": _of_falcon, "jamba": _of_jamba,
    "nemotron_h": _of_nemotron,
}  # fmt: skip
RECURRENT: dict[str, Callable[[Path], Path]] = {
    "mamba": lambda path: tiny("mamba", path, quant="Q8_0"),
    "lfm2": lambda path: tiny("lfm2", path, quant="Q8_0"),
    "qwen35": lambda path: tiny_mtp("qwen35", path, part="trunk", n_layers=N_LAYERS, quant="Q8_0"),
    **{arch: lambda path, arch=arch: _write(arch, path) for arch in _OF},  # type: ignore[misc]
}
"""By architecture, what writes such a model."""


def _write(arch: str, path: Path) -> Path:
    builder, vocabulary = Builder(1, "Q8_0"), gguf_file.byte_vocabulary()
    builder.embeddings(vocabulary, "output_norm")
    builder.ones(*(f"blk.{i}.attn_norm" for i in range(N_LAYERS)))
    ssm = {"conv_kernel": CONV, "inner_size": INNER, "state_size": STATE, "time_step_rank": SSM_HEADS, "group_count": 1}
    keys = {
        "general.name": f"tiny {arch}",
        "block_count": N_LAYERS,
        "context_length": 2048,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocabulary.size,
        "rope.freq_base": 10000.0,
        **{f"ssm.{key}": value for key, value in ssm.items()},
    }
    keys |= _OF[arch](builder)
    if arch == "jamba":
        del keys["ssm.group_count"]
    return gguf_file.write(path, arch, keys, vocabulary, builder.tensors)
