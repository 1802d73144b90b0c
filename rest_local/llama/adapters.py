"""LoRA adapters of an open model: loads them, applies them to contexts, and frees them.

Contract: all adapters of a model are loaded with it and freed before it. A context applies all of them, each with its
scale. A child process has tried each file before, because it could crash the process (`rest_local.llama.probe`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as bindings

from rest_local.errors import AdapterInvalid
from rest_local.llama import library
from rest_local.llama.options import Adapter

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
