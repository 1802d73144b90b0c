"""Converts `ModelOptions` to `llama_model_params`, and keeps the arrays alive that those point to.

Contract: this module makes no decisions; it only translates values for llama.cpp. The result must be kept until the
load has returned.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as bindings

from rest_local.errors import OptionError
from rest_local.llama import library
from rest_local.llama.options import SPLIT_MODES, ModelOptions, Override

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # expert tensors, as in llama.cpp's --cpu-moe
CPU = "CPU"


class _Placed(ctypes.Structure):
    """struct llama_model_tensor_buft_override, which the bindings leave opaque."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@dataclass
class LoadParameters:
    """`struct` for llama_model_load_from_file, and the arrays it points to."""

    struct: Any
    _alive: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, options: ModelOptions, n_gpu_layers: int, *, vocab_only: bool, on_cpu: bool = False) -> LoadParameters:
        """`on_cpu`: for a trial load (`probe`): mapped, not repacked, every tensor in main memory."""
        struct = llama_cpp.llama_model_default_params()
        struct.vocab_only = vocab_only
        struct.n_gpu_layers = 0 if on_cpu else n_gpu_layers
        struct.load_mode = _load_mode(on_cpu or options.mmap, options.mlock and not on_cpu)
        struct.use_extra_bufts = options.repack and not on_cpu  # repacking reads all weights
        struct.check_tensors = options.check_tensors and not on_cpu
        made = cls(struct)
        if options.override_kv:
            struct.kv_overrides = made._keep(_overrides(options.override_kv))
        placed = _placements(options)
        if placed:
            struct.tensor_buft_overrides = ctypes.addressof(made._keep(_placed(placed, on_cpu)))
        if not on_cpu:
            struct.split_mode = SPLIT_MODES.index(options.split_mode)
            struct.main_gpu = options.main_gpu
            if options.devices:
                struct.devices = ctypes.addressof(made._keep(_devices(options.devices)))
            if options.tensor_split:
                struct.tensor_split = made._keep(_shares(options.tensor_split))
        return made

    def _keep(self, array: Any) -> Any:
        self._alive.append(array)
        return array


def _load_mode(use_mmap: bool, use_mlock: bool) -> int:
    modes = {
        (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
        (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
        (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
        (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }
    return int(modes[use_mmap, use_mlock])


def _overrides(overrides: tuple[Override, ...]) -> Any:
    """An array of llama_model_kv_override, which ends with an empty key."""
    array = (bindings.llama_model_kv_override * (len(overrides) + 1))()
    for entry, override in zip(array, overrides, strict=False):
        entry.key = override.key.encode()
        tag, member = {
            "int": (bindings.LLAMA_KV_OVERRIDE_TYPE_INT, "val_i64"),
            "float": (bindings.LLAMA_KV_OVERRIDE_TYPE_FLOAT, "val_f64"),
            "bool": (bindings.LLAMA_KV_OVERRIDE_TYPE_BOOL, "val_bool"),
            "str": (bindings.LLAMA_KV_OVERRIDE_TYPE_STR, "val_str"),
        }[override.kind]
        entry.tag = tag
        value = override.value
        setattr(entry.value, member, value.encode() if isinstance(value, str) else value)
    return array


def _placements(options: ModelOptions) -> list[tuple[str, str]]:
    """Patterns with buffer names. llama.cpp takes the first match, so explicit placements come first."""
    placed = [(placement.pattern, placement.buffer) for placement in options.override_tensor]
    if options.cpu_moe:
        return [*placed, (EXPERTS, CPU)]
    return [*placed, *((rf"blk\.{layer}{EXPERTS}", CPU) for layer in range(options.n_cpu_moe))]


def _placed(placements: list[tuple[str, str]], on_cpu: bool) -> Any:
    """An array of `_Placed`, which ends with an empty entry. Raises OptionError for a buffer that llama.cpp lacks."""
    most = int(bindings.llama_max_tensor_buft_overrides()) - 1
    if len(placements) > most:
        raise OptionError(f"{len(placements)} tensor overrides: llama.cpp takes at most {most}")
    types = library.buffer_types()
    array = (_Placed * (len(placements) + 1))()
    for entry, (pattern, buffer) in zip(array, placements, strict=False):
        if buffer not in types:
            raise OptionError(f"tensor override {pattern}={buffer}: this llama.cpp has {', '.join(types)}")
        entry.pattern, entry.buffer_type = pattern.encode(), types[CPU if on_cpu else buffer]
    return array


def _devices(names: tuple[str, ...]) -> Any:
    """An array of devices, which ends with a null. Raises OptionError for a device that llama.cpp lacks."""
    known = library.gpus()
    wanted = () if names == ("none",) else names
    for name in wanted:
        if name not in known:
            raise OptionError(
                f"device {name}: this llama.cpp has {', '.join(known) or 'no GPU'}; `none` uses the CPU only"
            )
    return (ctypes.c_void_p * (len(wanted) + 1))(*(known[name] for name in wanted), None)


def _shares(shares: tuple[float, ...]) -> Any:
    most = int(bindings.llama_max_devices())
    if len(shares) > most:
        raise OptionError(f"tensor split over {len(shares)} GPUs: llama.cpp takes at most {most}")
    return (ctypes.c_float * most)(*shares)
