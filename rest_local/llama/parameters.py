"""Converts `ModelOptions` to `llama_model_params`, and keeps the arrays alive that those point to.

Contract: this module makes no decisions; it only translates values for llama.cpp. The result must be kept until the
load has returned.

`Adapters` are the LoRA adapters of an open model. All of them of a model are loaded with it and freed before it. A
context applies all of them, each with its scale. A child process has tried each file before, because it could crash the
process (`rest_local.llama.probe`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rest_local.errors import AdapterInvalid, OptionError
from rest_local.llama import library
from rest_local.llama.loaded import bindings, llama_cpp
from rest_local.llama.options import SPLIT_MODES, Adapter, ModelOptions, Override

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


_SAMPLE = 1 << 20  # bytes at each end of a file that enter its digest


class Adapters:
    """The loaded adapters of one model. `identity`: digest and scale of each, JSON-ready."""

    def __init__(self, model: int, wanted: Sequence[Adapter]) -> None:
        """Raises AdapterInvalid with the file and the cause."""
        self._pointers: list[Any] = []
        self.wanted = tuple(wanted)
        try:
            for adapter in self.wanted:
                self._pointers.append(load(model, adapter.path))
            self.identity = [(_digest(adapter.path), adapter.scale) for adapter in self.wanted]
        except BaseException:
            self.close()
            raise

    def apply(self, context: int) -> None:
        """Make a context compute with them. Raises AdapterInvalid if llama.cpp refuses."""
        if not self._pointers:
            return
        count = len(self._pointers)
        pointers = (bindings.llama_adapter_lora_p_ctypes * count)(*self._pointers)
        scales = (ctypes.c_float * count)(*(adapter.scale for adapter in self.wanted))
        if bindings.llama_set_adapters_lora(context, pointers, count, scales):
            raise AdapterInvalid(self.wanted[0].path, "llama.cpp cannot apply it to this model")

    def close(self) -> None:
        """Free them. A second call does nothing. Contexts that use them must be closed before."""
        while self._pointers:
            bindings.llama_adapter_lora_free(self._pointers.pop())


def load(model: int, path: Path) -> Any:
    """Load a llama_adapter_lora_p. Raises AdapterInvalid. May abort on a hostile file, so `probe` tries it first."""
    with library.log_lines.collected_errors() as errors:
        pointer = bindings.llama_adapter_lora_init(model, os.fsencode(path))
    if not pointer:
        raise AdapterInvalid(path, one_cause(errors))
    if bindings.llama_adapter_get_alora_n_invocation_tokens(pointer):
        bindings.llama_adapter_lora_free(pointer)
        raise AdapterInvalid(path, "is an activated LoRA (aLoRA), which only applies after its own start sequence")
    return pointer


def one_cause(errors: Sequence[str]) -> str:
    """llama.cpp's errors as one cause: the last line names it, the lines before come from the file reader."""
    last = next((line for line in reversed(errors) if line), "")
    cause = last.split("failed to apply lora adapter: ")[-1].strip().rstrip(".: ")
    return f"llama.cpp cannot load it: {cause[:300]}" if cause else "llama.cpp cannot load it"


def _digest(path: Path) -> str:
    """A digest of the size, the beginning and the end. That suffices, because training changes every weight."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        return hashlib.sha256(b"%d" % size + begin + file.read(_SAMPLE)).hexdigest()[:32]
