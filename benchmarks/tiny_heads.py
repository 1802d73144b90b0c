"""Tiny random models with MTP layers, MTP layers alone, EAGLE-3 heads, DFlash drafters, and Gemma assistants: fixtures
that draft something that is right.

The text of these models depends on the last token more than on the others, and the heads know it: they pass the
embedding of the last token on to the output layer of the model. So a head drafts a part of the tokens rightly and the
rest wrongly, in milliseconds and without any training. All weights are those of `benchmarks.tiny` in size and kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Tensor, Vocabulary
from benchmarks.tiny import CONV, FEED, HEAD, HEADS, KV_HEADS, SLIDING_WINDOW, WIDTH, Builder

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
    marked: bool = False,
) -> Path:
    """Write a tiny model of `arch` with MTP layers and return the path: mimo2 has attention only, qwen35 is hybrid
    (every second layer is a gated delta net).

    `part`: the whole, the model without the MTP layers ("trunk"), or a file that holds these alone ("layer"). Parts of
    one seed fit each other. `n_mtp`: MTP layers; llama.cpp takes several of mimo2 only. `marked`: for `tiny_dflash`.
    """
    builder = Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(vocab)
    (_marked_embeddings if marked else Builder.embeddings)(builder, vocabulary, "output_norm")
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


Block = Literal["plain", "selector", "markov"]
_MARK = 2.0
_CANDIDATES, _KERNEL, _GROUP = 7, 2, 16  # Of a selector, and of the convolutions that come with it.


def _marked_embeddings(builder: Builder, vocabulary: Vocabulary, norm: str) -> None:
    """Add embeddings of which the first number marks every token but the mask, and the second one the mask. So the
    masks of a block find its first token. The output layer does not read the marks.
    """
    embeddings, output = builder.make_embeddings(vocabulary)
    embeddings[:, :2] = _MARK, 0.0
    embeddings[_mask(vocabulary)] = 0.0
    embeddings[_mask(vocabulary), 1] = _MARK
    output[:, :2] = 0.0
    builder.quantized("token_embd", embeddings)
    builder.quantized("output", output)
    builder.ones(norm)


def _mask(vocabulary: Vocabulary) -> int:
    """Return the mask token: the last one, which no text has."""
    return vocabulary.size - 1


def tiny_dflash(
    path: Path,
    kind: Block = "plain",
    *,
    layers: tuple[int, ...] = (1, 2, 3),
    width: int = WIDTH,
    size: int = 9,
    n_ctx: int = 2048,
    seed: int = 1,
    quant: str = "F32",
    vocab: int = 384,
    without: str = "",
    keys: Mapping[str, Any] | None = None,
    mask: int | None = None,
    drafts: Sequence[int] = (),
) -> Path:
    """Write a DFlash drafter for a tiny model of the same seed that is `marked`, and return the path. It uses the
    model's embeddings and output layer.

    `kind`: DFlash, DFlash 2 with its selector, or DSpark with its Markov head; these two know what follows a token as
    the model does. `layers`: of the model, whose inputs it reads. `width`: of the model. `size`: tokens of a block.
    `keys`: more of the header. `without`: a tensor that is left out. `mask`: its mask token, -1 for none. `drafts`: the
    only tokens that it drafts, with an output layer of its own.
    """
    builder, model = Builder(seed + _SEED_OF_HEAD, quant), Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(vocab)
    embeddings, output = model.make_embeddings(vocabulary)
    mask = _mask(vocabulary) if mask is None else mask
    features = builder.normal((width, len(layers) * width), 1.0 / np.sqrt(len(layers) * width))
    features[:2] = 0.0
    builder.quantized("fc", features)
    builder.ones("enc.output_norm", "output_norm", size=width)
    n_heads = width // HEAD
    for block in ("blk.0", "blk.1"):
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm", size=width)
        builder.ones(f"{block}.attn_k_norm", size=HEAD)
        builder.plain(f"{block}.attn_q_norm.weight", np.full(HEAD, 1.7))
        for name, marks in (("q", 1), ("k", [0, 1])):  # The masks look at the marks of a block.
            looks = builder.normal((width, width), 0.5 / np.sqrt(width))
            looks[HEAD - 1 :: HEAD, marks] = 4.0
            builder.quantized(f"{block}.attn_{name}", looks)
        passes_on = np.eye(width, dtype=np.float32)
        passes_on[:, 1] = builder.normal((width,), 0.005)  # So it matters how many masks are seen.
        passes_on[:, 1] = builder.normal((width,), 0.005)  # So it matters how many masks are seen.
        passes_on[:, 1] = builder.normal((width,), 0.005)  # So it matters how many masks are seen.
        passes_on[:, 1] = builder.normal((width,), 0.005)  # So it matters how many masks are seen.
        passes_on[:2] = 0.0
        builder.quantized(f"{block}.attn_v", passes_on)
        builder.quantized(f"{block}.attn_output", 2.0 * np.eye(width, dtype=np.float32))
        for name, out, into in (("gate", FEED, width), ("up", FEED, width), ("down", width, FEED)):
            builder.matrix(f"{block}.ffn_{name}", out, into, _DEPENDS)
        if kind == "selector":
            for part in ("attn", "ffn"):
                base = builder.normal((2, _KERNEL, width), 0.1)
                base[:, 0] += 1.0
                builder.plain(f"{block}.{part}_conv_base", base)
                builder.matrix(f"{block}.{part}_conv_proj", 2 * _KERNEL * width // _GROUP, width, 0.1)
    rows = np.array(drafts or range(vocabulary.size)) % vocabulary.size
    more: dict[str, Any] = {}
    if kind == "selector":
        builder.quantized("selector_predecessor", embeddings)
        builder.quantized("selector_successor", output)
        gate = builder.normal((width, width), 0.1 / np.sqrt(width))
        gate[:, 1] = 1.0  # The mark of a mask opens it.
        builder.quantized("selector_hidden", gate)
        more = {
            "conv_kernel_size": _KERNEL,
            "conv_group_size": _GROUP,
            "selector_rank": width,
            "selector_top_k": _CANDIDATES,
        }
    elif kind == "markov":
        builder.quantized("markov_w1", embeddings)
        builder.quantized("markov_w2", output[rows])
        builder.matrix("conf_proj", 1, 2 * width)
        builder.plain("conf_proj.bias", np.zeros(1))
    if drafts:
        builder.quantized("output", output[rows])
        tokens = np.array(drafts, np.int64)
        builder.tensors.append(Tensor("d2t", tokens.shape, gguf.GGMLQuantizationType.I64, lambda: tokens))
    header = _common(f"tiny dflash {kind}", 2, n_ctx, vocabulary) | {
        "embedding_length": width,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "target_layers": list(layers),
        "block_size": size,
    }
    if mask >= 0:
        vocabulary.keys["tokenizer.ggml.mask_token_id"] = mask
    tensors = [tensor for tensor in builder.tensors if tensor.name != without]
    return gguf_file.write(path, "dflash", header | more | dict(keys or {}), vocabulary, tensors)


def _gemma4(builder: Builder, n_layers: int, width: int) -> dict[str, Any]:
    """Add what layers of Gemma 4 and of its assistants have in common. The last layer attends to everything, and the
    others within a window.
    """
    builder.plain("rope_freqs.weight", np.ones(HEAD // 2))
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_norm", f"{block}.ffn_norm", size=width)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            builder.plain(f"{block}.{norm}.weight", np.full(width, _DEPENDS / 2))
        builder.ones(f"{block}.attn_q_norm", size=HEAD)
        builder.plain(f"{block}.layer_output_scale.weight", np.ones(1))
        builder.matrix(f"{block}.attn_q", HEADS * HEAD, width, 2.0)
        builder.matrix(f"{block}.attn_output", width, HEADS * HEAD)
        for name, out, into in (("gate", FEED, width), ("up", FEED, width), ("down", width, FEED)):
            builder.matrix(f"{block}.ffn_{name}", out, into)
    keys = {f"attention.{name}_length{swa}": HEAD for name in ("key", "value") for swa in ("", "_swa")}
    return keys | {
        "attention.sliding_window": SLIDING_WINDOW,
        "attention.sliding_window_pattern": [True] * (n_layers - 1) + [False],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": HEAD,
        "rope.dimension_count_swa": HEAD,
        "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 10000.0,
    }


def tiny_gemma4(
    path: Path,
    *,
    n_layers: int = 4,
    n_ctx: int = 2048,
    seed: int = 1,
    quant: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny Gemma 4 and return the path. `keys` replaces some of its header."""
    builder = Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(384)
    embeddings, output = builder.make_embeddings(vocabulary)
    builder.quantized("token_embd", embeddings / np.float32(np.sqrt(WIDTH)))  # llama.cpp multiplies them again.
    builder.quantized("output", output)
    builder.ones("output_norm")
    header = _common("tiny gemma4", n_layers, n_ctx, vocabulary) | _gemma4(builder, n_layers, WIDTH)
    for block in (f"blk.{i}" for i in range(n_layers)):
        builder.ones(f"{block}.attn_k_norm", size=HEAD)
        for name in ("k", "v"):
            builder.matrix(f"{block}.attn_{name}", KV_HEADS * HEAD, WIDTH, 2.0)
    return gguf_file.write(path, "gemma4", header | dict(keys or {}), vocabulary, builder.tensors)


def tiny_assistant(
    path: Path, *, width: int = WIDTH, vocab: int = 384, n_ctx: int = 2048, seed: int = 1, quant: str = "F32"
) -> Path:
    """Write an assistant for the tiny Gemma 4 of the same seed and return the path. `width`: of the model."""
    builder, model = Builder(seed + _SEED_OF_HEAD, quant), Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(vocab)
    _, output = model.make_embeddings(vocabulary)
    own, n_layers, one = 2 * width, 2, np.eye(width, dtype=np.float32)
    builder.quantized("token_embd", np.pad(output, ((0, 0), (0, own - output.shape[1]))))
    builder.ones("output_norm", size=own)
    builder.quantized("nextn.pre_projection", np.kron(np.diag([1.0, 0.3]).astype(np.float32), one))
    builder.quantized("nextn.post_projection", np.concatenate([one, 0.0 * one], axis=1))
    keys = _common("tiny assistant", n_layers, n_ctx, vocabulary) | _gemma4(builder, n_layers, own)
    keys |= {"embedding_length": own, "embedding_length_out": width, "nextn_predict_layers": n_layers}
    return gguf_file.write(path, "gemma4-assistant", keys, vocabulary, builder.tensors)


def tiny_predictable(path: Path, **options: Any) -> Path:
    """Write a llama whose text depends on the last token as much as in the models above, for an EAGLE-3 head."""
    seed, quant = options.get("seed", 1), options.get("quant", "F32")
    n_layers, n_ctx = options.get("n_layers", 4), options.get("n_ctx", 2048)
    builder = Builder(seed, quant)
    vocabulary = gguf_file.byte_vocabulary(options.get("vocab", 384))
    (_marked_embeddings if options.get("marked") else Builder.embeddings)(builder, vocabulary, "output_norm")
    _mimo2(builder, n_layers)
    keys = _common("tiny llama", n_layers, n_ctx, vocabulary)
    keys |= {"rope.dimension_count": HEAD, "rope.freq_base": 10000.0}
    return gguf_file.write(path, "llama", keys, vocabulary, builder.tensors)
