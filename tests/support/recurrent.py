"""Tiny random models of every architecture that llama.cpp has with recurrent state.

Only the keys are written down here. llama.cpp itself says which tensors a model with such keys has
(`llama_model_init_from_user`, from which its own tests make their models).
"""

import ctypes
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import gguf_file
from benchmarks.gguf_file import Tensor
from benchmarks.tiny import CONV, EXPERTS, EXPERTS_USED, FEED, HEAD, HEADS, INNER, KV_HEADS, STATE, WIDTH
from rest_local.llama.loaded import bindings

N_LAYERS = 2
MIXED = {"attention.head_count_kv": [0, KV_HEADS]}  # the second layer has attention
NONE = {"attention.head_count": 0, "attention.head_count_kv": 0}
HALF = {"full_attention_interval": 2}
MAMBA = {"ssm.conv_kernel": CONV, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": 4}
MAMBA2 = {**MAMBA, "ssm.group_count": 1}
DELTA = {
    **HALF, "ssm.conv_kernel": CONV, "ssm.inner_size": 2 * HEAD, "ssm.state_size": HEAD, "ssm.time_step_rank": 2,
    "ssm.group_count": 2, "rope.dimension_sections": [HEAD // 4, HEAD // 8, HEAD // 8, 0],
}  # fmt: skip
WKV6 = {**NONE, "wkv.head_size": HEAD, "time_mix_extra_dim": HEAD, "time_decay_extra_dim": HEAD}
WKV7_HEAD = 64  # Real models have it. With 32 the logits of a row depend on its batch by up to 3.7 with AVX-512.
RANKS = ("decay", "iclr", "value_residual_mix", "gate")
WKV7 = {**NONE, "wkv.head_size": WKV7_HEAD, **{f"attention.{rank}_lora_rank": HEAD for rank in RANKS}}
ONE_SHIFT = {"token_shift_count": 1}
SHORT = {**MIXED, "shortconv.l_cache": 3}
MOE = {
    "expert_count": EXPERTS, "expert_used_count": EXPERTS_USED, "expert_shared_count": 1, "expert_gating_func": 2,
    "expert_feed_forward_length": WIDTH, "expert_shared_feed_forward_length": WIDTH, "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0, "expert_weights_norm": True,
}  # fmt: skip
NEMOTRON = {
    **MAMBA2, "block_count": 3, "attention.head_count_kv": [0, KV_HEADS, 0], "feed_forward_length": [0, 0, FEED],
}  # fmt: skip
KDA = {
    **MIXED, **MOE, "ssm.conv_kernel": CONV, "kda.head_dim": HEAD, "kda.gate_lower_bound": -5.0,
    "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32, "rope.dimension_count": 16,
}  # fmt: skip
HYPER = {
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2, "hyper_connection.epsilon": 1e-6,
    "attention.indexer.head_count": 2, "attention.indexer.key_length": HEAD, "attention.indexer.top_k": 1 << 17,
}  # fmt: skip
KIMI_K3 = {
    "expert_latent_length": 32, "attn_res.block_size": 12, "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
}  # fmt: skip
GLM5 = {"attention.key_length": 32, "rope.dimension_count": 0, "attention.indexer.kpool": 4}
DEEPSEEK4 = {
    "expert_gating_func": 4, "attention.q_lora_rank": 32, "attention.sliding_window": 32, "swiglu_clamp_exp": 10.0,
    "attention.output_group_count": 2, "attention.output_lora_rank": 32, "attention.compress_ratios": [0, 4, 128],
    "block_count": 3,
    "attention.compress_rope_freq_base": 160000.0, "hash_layer_count": 0, "attention.key_length": 64,
    "attention.value_length": 64, "rope.dimension_count": 32, "attention.indexer.key_length": 64,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {**MAMBA, **NONE},
    "mamba2": {**MAMBA2, **NONE},
    "rwkv6": WKV6,
    "rwkv6qwen2": WKV6 | ONE_SHIFT,
    "rwkv7": WKV7,
    "arwkv7": WKV7 | ONE_SHIFT,
    "jamba": {**MAMBA, **MIXED},
    "falcon-h1": MAMBA2,
    "plamo2": {**MAMBA, **MIXED, "ssm.group_count": 0},
    "granitehybrid": {**MAMBA2, **MIXED},
    "lfm2": SHORT,
    "lfm2moe": {**SHORT, **MOE},
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": {**NEMOTRON, **MOE},
    "qwen35": DELTA,
    "qwen3next": {**DELTA, **MOE},
    "qwen35moe": {**DELTA, **MOE},
    "qwen4exp": {**DELTA, **MOE, **HYPER, "hyper_connection.low_rank": 8, "attention.compress_ratios": [4] * N_LAYERS},
    "kimi-linear": KDA,
    "kimi-k3": KDA | KIMI_K3,
    "bailingmoe3": KDA,
    "glm5-next": KDA | HYPER | GLM5,
    "deepseek4": MOE | HYPER | DEEPSEEK4,
    "minimax-01": {**HALF, **MOE, "residual_scale": 1.5, "attention.key_length": HEAD, "attention.value_length": HEAD},
}
"""By architecture, the keys of such a model, but for those that all have."""
FLOAT = ("norm", "conv", "lerp", "time_mix_first", "ssm_a", "ssm_d", "_inp", "hc_", "res_", "indexer")
"""Parts of the names of tensors that llama.cpp reads as 32-bit numbers, or multiplies without a loss only so."""
LEFT_OUT = {"rwkv6qwen2": "time_mix_first"}  # optional, and another model with it


def recurrent(arch: str, path: Path, without: str = "no tensor") -> Path:
    """Write a tiny model of `arch` (one of RECURRENT) and return the path. `without`: a part of the names of tensors or
    keys that are left out.
    """
    vocabulary = gguf_file.byte_vocabulary()
    keys = {
        "general.name": f"tiny {arch}", "block_count": N_LAYERS, "context_length": 2048, "embedding_length": WIDTH,
        "feed_forward_length": FEED, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "vocab_size": vocabulary.size, **RECURRENT[arch],
    }  # fmt: skip
    shapes = _shapes(gguf_file.write(path, arch, keys, vocabulary, []))
    left_out = LEFT_OUT.get(arch, without)
    tensors = [_tensor(name, shape, vocabulary.never) for name, shape in shapes.items() if left_out not in name]
    keys = {key: value for key, value in keys.items() if without not in key}
    return gguf_file.write(path, arch, keys, vocabulary, tensors)


class _Tensor(ctypes.Structure):
    """The beginning of `ggml_tensor`."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4))


class _Gguf(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return by name the shapes (in numpy's order) of the tensors that llama.cpp makes for a file of keys."""
    library, found = bindings._lib, dict[str, tuple[int, ...]]()
    library.ggml_get_name.restype, library.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    library.gguf_init_from_file.restype = ctypes.c_void_p

    def note(address: int, _: object) -> None:
        shape = np.trim_zeros(np.array(_Tensor.from_address(address).shape[::-1]) - 1, "f") + 1
        found[library.ggml_get_name(address).decode()] = tuple(map(int, shape)) or (1,)

    keys = library.gguf_init_from_file(str(path).encode(), _Gguf(True, None))
    called = bindings.llama_model_set_tensor_data_t(note)
    model = bindings.llama_model_init_from_user(keys, called, None, bindings.llama_model_default_params())
    assert model, f"llama.cpp makes no model of the keys in {path}"
    bindings.llama_model_free(model)
    return found


def _tensor(name: str, shape: tuple[int, ...], never: tuple[int, ...]) -> Tensor:
    """Make random weights that depend on the name alone. Tokens of `never` are not generated."""
    data = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        data[:] = 1
    elif "ssm_a" in name:
        data = -np.abs(data) - 0.1  # a state decays
    elif len(shape) == 1:
        data *= 0.1
    elif name != "token_embd.weight":
        data *= (4 if name == "output.weight" else 2) / np.sqrt(shape[-1])
    if name == "output.weight":
        data[list(never)] = 0
    kind = gguf.GGMLQuantizationType.F32
    if len(shape) > 1 and shape[-1] % 32 == 0 and not any(part in name for part in FLOAT):
        kind, data = gguf.GGMLQuantizationType.Q8_0, gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
    return Tensor(name, shape, kind, lambda: data)
